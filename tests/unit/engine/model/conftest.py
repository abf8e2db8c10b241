"""The C kernels as they are compiled for this processor, and for ones that can do less."""

import platform

import pytest

from services.engine.model import kernels as kernel_library
from services.engine.model.kernels import Kernels, load_kernels

LACKING = {"without bf16 dot products": "-mno-avx512bf16", "without AVX-512": "-mno-avx512f"}


@pytest.fixture(scope="session", params=["this processor's", *LACKING])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    flag = LACKING.get(request.param)
    with pytest.MonkeyPatch.context() as patch:
        if flag is None:
            found = load_kernels()
        else:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("kernels")))
            patch.setenv("CC", f"cc -fopenmp {flag}")
            # After -march=native, which would bring them back.
            patch.setattr(kernel_library, "_FLAGS", (*kernel_library._FLAGS, flag))
            found = load_kernels.__wrapped__()
    if found is None:
        # Where there is a compiler, only that of another family of processors may not know the flag.
        assert flag is None or load_kernels() is None or platform.machine() not in ("x86_64", "AMD64")
        pytest.skip("no C compiler here that knows these processors")
    return found

"""The sampler's two ways of drawing, and small constants, so that a vocabulary of a few dozen tokens walks through
every path of both."""

from collections.abc import Iterator

import pytest

from services.engine.model.kernels import load_kernels
from services.engine.sampling import kernel_draw, ordering, sampler, truncation, weights


@pytest.fixture(scope="module", params=["C", "PyTorch"])
def each_drawer(request: pytest.FixtureRequest) -> Iterator[str]:
    """Samplers draw by the C kernels in one run of a test and by PyTorch in the other."""
    if request.param == "C" and load_kernels() is None:
        pytest.skip("no C compiler here")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "PyTorch":
            patch.setattr(sampler, "load_kernels", lambda: None)
        yield request.param


@pytest.fixture(scope="module")
def small_constants() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "BLOCK", 4)
        patch.setattr(truncation, "LEADERS", (6, 14))
        patch.setattr(weights, "GROUP", 16)
        patch.setattr(kernel_draw, "BLOCK", 4)
        patch.setattr(kernel_draw, "FIRST_TRY", 2)
        yield

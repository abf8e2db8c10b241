"""The decoder's step in C: its matrix products for every shape, on processors with and without bf16 dot products, on
any number of threads; and that it runs wherever it should."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.engine.model import kernels as kernel_library
from services.engine.model.cpu_decoder import CpuDecoder
from services.engine.model.decoder import Decoder
from services.engine.model.kernel_structures import LinearArguments
from services.engine.model.kernels import Kernels, load_kernels
from services.engine.model.loader import load_model
from services.engine.model.packed_weights import PackedWeights

# Rows and columns around the edges of tiles and panels; the last has more rows than one item takes.
SHAPES = ((1, 1, 1), (2, 33, 7), (3, 64, 65), (7, 96, 48), (8, 31, 130), (15, 100, 63), (29, 257, 64), (300, 40, 33))


@pytest.fixture(params=["this processor's", "without bf16 dot products", "without AVX-512"])
def kernels(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if request.param != "this processor's":
        wide = "-mno-avx512bf16" if request.param == "without bf16 dot products" else "-mno-avx512f"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("CC", f"cc -fopenmp {wide}")
        # After -march=native, which would bring them back.
        monkeypatch.setattr(kernel_library, "_FLAGS", (*kernel_library._FLAGS, wide))
        found = load_kernels.__wrapped__()
    else:
        found = load_kernels()
    if found is None:
        pytest.skip("no C compiler here that knows these processors")
    return found


def product(kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, threads: int) -> Tensor:
    outputs, inputs = weight.shape
    packed = PackedWeights(kernels, [(outputs, inputs, False)])
    address, panels = packed.add(weight, gated=False)
    linear = LinearArguments(address, None if bias is None else bias.data_ptr(), inputs, outputs, panels)
    out = torch.full((len(x), outputs), torch.nan)
    run = kernels.long.linear_float
    run.argtypes = [ctypes.POINTER(LinearArguments), *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2]
    run.restype = None
    run(linear, x.data_ptr(), out.data_ptr(), len(x), threads)
    return out


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_right_and_a_rows_bits_its_own(kernels: Kernels, threads: int, with_bias: bool) -> None:
    for rows, inputs, outputs in SHAPES:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, inputs, generator=generator).bfloat16()
        weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
        bias = torch.randn(outputs, generator=generator).bfloat16() if with_bias else None
        found = product(kernels, x, weight, bias, threads)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
        for row in {0, rows // 2, rows - 1}:
            assert torch.equal(product(kernels, x[row : row + 1].clone(), weight, bias, 1)[0], found[row])


def test_more_threads_than_cores_change_no_bit(kernels: Kernels) -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(512, 64).bfloat16()
    expected = product(kernels, x, weight, None, 1)
    for threads in (2, 5, 9, 4, 9):
        assert torch.equal(product(kernels, x, weight, None, threads), expected)


def test_a_matrix_that_was_not_announced_is_refused(kernels: Kernels) -> None:
    packed = PackedWeights(kernels, [(32, 32, False)])
    packed.add(torch.zeros(32, 32, dtype=torch.bfloat16), gated=False)
    with pytest.raises(ValueError, match="announced"):
        packed.add(torch.zeros(32, 32, dtype=torch.bfloat16), gated=False)


def test_it_runs_in_bf16_and_the_other_elsewhere(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if load_kernels() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    loaded = load_model(smollm2, dtype="bfloat16", max_model_len=64)
    assert isinstance(loaded.model, CpuDecoder)
    assert loaded.brings_threads
    assert not load_model(smollm2, dtype="bfloat16", max_model_len=64, use_kernels=False).brings_threads
    assert isinstance(load_model(smollm2, dtype="float32", max_model_len=64).model, Decoder)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert isinstance(load_model(smollm2, dtype="bfloat16", max_model_len=64).model, Decoder)

"""The decoder's step in C: its matrix products for every shape, on processors with and without bf16 dot products, on
any number of threads; and that it runs wherever it should."""

from pathlib import Path

import pytest
import torch
from packed_product import PackedMatrix

from services.engine.model.cpu_decoder import CpuDecoder
from services.engine.model.decoder import Decoder
from services.engine.model.kernels import Kernels, load_kernels
from services.engine.model.loader import load_model
from services.engine.model.packed_weights import MatrixPlan, PackedWeights

# Rows and columns around the edges of tiles and panels; the last has more rows than one item takes.
SHAPES = ((1, 1, 1), (2, 33, 7), (3, 64, 65), (7, 96, 48), (8, 31, 130), (15, 100, 63), (29, 257, 64), (300, 40, 33))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_right_and_a_rows_bits_its_own(kernels: Kernels, threads: int, with_bias: bool) -> None:
    for rows, inputs, outputs in SHAPES:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, inputs, generator=generator).bfloat16()
        weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
        bias = torch.randn(outputs, generator=generator).bfloat16() if with_bias else None
        matrix = PackedMatrix(kernels, weight, bias)
        found = matrix.times(x, threads)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
        for row in {0, rows // 2, rows - 1}:
            assert torch.equal(matrix.times(x[row : row + 1].clone())[0], found[row])


def test_more_threads_than_cores_change_no_bit(kernels: Kernels) -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(512, 64).bfloat16()
    matrix = PackedMatrix(kernels, weight)
    expected = matrix.times(x)
    for threads in (2, 5, 9, 4, 9):
        assert torch.equal(matrix.times(x, threads), expected)


def test_a_matrix_that_was_not_announced_is_refused(kernels: Kernels) -> None:
    packed = PackedWeights(kernels, [MatrixPlan(32, 32), MatrixPlan(32, 64)])
    packed.add(torch.zeros(32, 32, dtype=torch.bfloat16))
    for weight in (torch.zeros(32, 32, dtype=torch.bfloat16), torch.zeros(32, 64)):
        with pytest.raises(ValueError, match="announced"):
            packed.add(weight)


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

"""Weights of 8 and 4 bits: products for every shape against float64, each row's bits its own, the rounding no worse
than the plain one, and the same weights with the kernels and without."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_product import PackedMatrix
from torch import Tensor

from services.engine.model.kernels import Kernels
from services.engine.model.quantization import GROUP, WeightFormat, rounded_weights

FORMATS = (WeightFormat.INT8, WeightFormat.INT4)
# As in SmolLM2: fused projections, output, gate and up, down, and a piece of the one that makes logits.
MODEL_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (1000, 576))


def random_matrix(outputs: int, inputs: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(outputs, 1, generator=generator) * 0.2 + 0.01
    return (torch.randn(outputs, inputs, generator=generator) * spread).bfloat16()


def check_products(matrix: PackedMatrix, x: Tensor, bias: Tensor | None, threads: int) -> None:
    weights = matrix.weights() if bias is None else matrix.weights() - bias.float()[:, None]
    found = matrix.times(x, threads)
    expected = x.double() @ weights.double().T + (0 if bias is None else bias.double())
    sizes = x.double().abs() @ weights.double().abs().T + 1  # what rounding may add is in proportion to the terms
    assert ((found.double() - expected).abs() <= 1e-5 * sizes).all()
    for row in {0, len(x) // 2, len(x) - 1}:
        assert torch.equal(matrix.times(x[row : row + 1].clone())[0], found[row])


@pytest.mark.parametrize("format_", FORMATS)
@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 200),
    outputs=st.integers(1, 140),
    with_bias=st.booleans(),
    threads=st.integers(1, 3),
)
def test_products_are_right_and_a_rows_bits_its_own(
    kernels: Kernels, format_: WeightFormat, rows: int, inputs: int, outputs: int, with_bias: bool, threads: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16() if with_bias else None
    check_products(PackedMatrix(kernels, random_matrix(outputs, inputs, 1), bias, format_), x, bias, threads)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_products_of_a_models_shapes(kernels: Kernels, format_: WeightFormat, shape: tuple[int, int]) -> None:
    matrix = PackedMatrix(kernels, random_matrix(*shape, seed=2), None, format_)
    bits = {WeightFormat.INT8: 8 + 16 / shape[1], WeightFormat.INT4: 4 + 16 / GROUP}[format_]
    assert matrix.num_bytes <= (shape[0] + 31) // 32 * 32 * shape[1] * bits / 8 + 64
    for rows in (1, 8, 33, 300):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).bfloat16()
        check_products(matrix, x, None, threads=2)


@pytest.mark.parametrize("inputs", [1, 31, 32, 100, 576])
def test_kernels_and_pytorch_round_alike(kernels: Kernels, inputs: int) -> None:
    weight = random_matrix(96, inputs, seed=3)
    weight[5] = 0
    for format_ in FORMATS:
        ours, theirs = PackedMatrix(kernels, weight, None, format_).weights(), rounded_weights(weight.float(), format_)
        # Where two scales are as good, the order of a sum decides.
        assert (ours == theirs).float().mean() > 0.9
        torch.testing.assert_close((ours - weight).square().sum(), (theirs - weight).square().sum(), rtol=0.01, atol=0)
        assert (ours[5] == 0).all()


def test_rounding_is_no_worse_than_by_the_largest_weight() -> None:
    weight = random_matrix(64, 32 * GROUP, seed=4).float()
    weight[::7, ::50] *= 4  # weights that stick out
    eight = rounded_weights(weight, WeightFormat.INT8)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((eight - weight).abs() <= 0.75 * step).all()

    groups = weight.view(64, -1, GROUP)
    steps = groups.abs().amax(-1, keepdim=True) / 7
    plain = (groups / steps).round() * steps
    four = rounded_weights(weight, WeightFormat.INT4).view_as(groups)
    errors, plain_errors = (four - groups).square().sum(-1), (plain - groups).square().sum(-1)
    assert (errors <= 1.02 * plain_errors).float().mean() > 0.9
    assert errors.sum() < 0.85 * plain_errors.sum()
    assert (four.view(64, -1, GROUP) / groups).nan_to_num(1).gt(-1e-6).all()  # no weight changes its sign
    assert rounded_weights(weight, WeightFormat.BF16) is weight


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("format_", FORMATS)
def test_what_is_not_finite_does_not_become_a_number(kernels: Kernels, format_: WeightFormat, broken: float) -> None:
    weight = random_matrix(40, 70, seed=5)
    weight[7, 66] = broken
    out = PackedMatrix(kernels, weight, None, format_).times(torch.ones(3, 70, dtype=torch.bfloat16))
    assert out[:, 7].isnan().all()
    assert out[:, :7].isfinite().all()
    assert out[:, 8:].isfinite().all()
    assert rounded_weights(weight, format_)[7].isnan().any()

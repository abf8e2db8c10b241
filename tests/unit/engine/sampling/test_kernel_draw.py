"""The C kernels and PyTorch draw the same tokens from the same distributions, on any processor and any number of
threads; and the exponential that both have is what it says."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import power_of_e, request
from torch import Tensor

from services.engine.model import kernels as kernel_library
from services.engine.model.kernels import Kernels, load_kernels
from services.engine.sampling import kernel_draw
from services.engine.sampling.draw import Drawer
from services.engine.sampling.kernel_draw import KernelDrawer
from services.engine.sampling.row_state import RowState
from services.engine.sampling.torch_draw import TorchDrawer
from services.engine.sampling.weights import exponential
from shared.sampling_params import SamplingParams

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["this processor's", "without AVX-512", "without AVX"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if request.param == "this processor's":
        found = load_kernels()
    else:
        narrow = "-mno-avx512f" if request.param == "without AVX-512" else "-mno-avx"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
            # After -march=native, which would bring them back.
            patch.setattr(kernel_library, "_FLAGS", (*kernel_library._FLAGS, narrow))
            found = load_kernels.__wrapped__()
    if found is None:
        pytest.skip("no C compiler here that knows these processors")
    return found


ASKING: list[dict] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 1e-40},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 3.0},  # most of the row
    {"top_p": 1e-12},
    {"top_p": 1 - 2**-53},
    {"top_k": 20},
    {"top_k": 700, "top_p": 0.8},
    {"top_k": 2},
    {"min_p": 0.05},
    {"min_p": 1e-9, "temperature": 2.0},
    {"min_p": 1.0},
    {"min_p": 1e-4, "top_k": 300, "top_p": 0.95, "temperature": 1.5},
]


def states_of(vocab: int, repeats: int) -> list[RowState]:
    requests = [request(i, [1] * (1 + i % 7), [], SamplingParams(seed=i, **p)) for i, p in enumerate(ASKING * repeats)]
    return [RowState(request_, vocab, [2]) for request_ in requests]


def peaked(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    fall = torch.arange(2, vocab + 2).log()[torch.randperm(vocab, generator=generator)]
    return 20 - torch.linspace(1.2, 2.5, rows).unsqueeze(1) * fall + torch.randn(rows, vocab, generator=generator)


LOGITS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "like a model's": peaked,
    "flat": lambda rows, vocab, generator: 2 * torch.randn(rows, vocab, generator=generator),
    "all but equal": lambda rows, vocab, generator: (torch.randn(rows, vocab, generator=generator) / 3).round(),
    "bf16": lambda rows, vocab, generator: peaked(rows, vocab, generator).bfloat16().float(),
    "mostly masked": lambda rows, vocab, generator: torch.randn(rows, vocab, generator=generator).masked_fill_(
        torch.arange(vocab) % 50 > 0, -torch.inf
    ),
}


@pytest.mark.parametrize("kind", list(LOGITS))
@pytest.mark.parametrize(("vocab", "repeats"), [(49_152, 1), (3_001, 6), (37, 20)])
def test_both_draw_the_same_tokens_from_the_same_distributions(kernels, kind: str, vocab: int, repeats: int) -> None:
    states = states_of(vocab, repeats)
    logits = LOGITS[kind](len(states), vocab, torch.Generator().manual_seed(vocab))
    before, rows = logits.clone(), list(range(0, len(states), 2))
    expected = TorchDrawer(vocab, CPU).lay_out(states).draw(logits, rows)
    for threads in (1, 3):
        found = KernelDrawer(kernels, vocab, threads).lay_out(states).draw(logits, rows)
        assert found.token_ids == expected.token_ids
        assert found.row_maxima == expected.row_maxima
        assert found.processed is not None
        assert expected.processed is not None
        assert torch.equal(found.processed, expected.processed)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("block", [3, 16, 128])
@pytest.mark.parametrize("first_try", [1, 16, 1000])
def test_how_a_row_is_looked_at_changes_no_token(kernels, block: int, first_try: int, monkeypatch) -> None:
    vocab, states = 2_000, states_of(2_000, 4)
    logits = peaked(len(states), vocab, torch.Generator().manual_seed(1))
    expected = KernelDrawer(kernels, vocab, 2).lay_out(states).draw(logits, ())
    monkeypatch.setattr(kernel_draw, "BLOCK", block)
    monkeypatch.setattr(kernel_draw, "FIRST_TRY", first_try)
    assert KernelDrawer(kernels, vocab, 2).lay_out(states).draw(logits, ()).token_ids == expected.token_ids


@pytest.mark.parametrize("kind", list(LOGITS))
def test_both_tell_the_same_logprobs(kernels, kind: str) -> None:
    vocab, count = 3_001, 150
    logits = LOGITS[kind](count, vocab, torch.Generator().manual_seed(3))
    rows = [(7 * row) % count for row in range(count)]
    # Of the rows that are mostly masked, tokens that are not.
    token_ids = [(row * 150) % vocab for row in range(count)]
    counts = [row % 23 for row in range(count - 1)] + [9999]
    drawers: list[Drawer] = [TorchDrawer(vocab, CPU), KernelDrawer(kernels, vocab, 3)]
    expected, found = (drawer.token_logprobs(logits, rows, token_ids, counts) for drawer in drawers)
    for one, other in zip(found, expected, strict=True):
        assert one.top_token_ids == other.top_token_ids
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-12)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-12)


def test_the_exponentials_of_both_are_the_same_bits(kernels) -> None:
    # A row of two logits, 0 and x, adds up to 1 + e^x, which its logprobs tell.
    x = -torch.rand(5_000, generator=torch.Generator().manual_seed(4)) * torch.logspace(-6, 1.5, 5_000)
    logits = torch.stack([torch.zeros_like(x), x], dim=1)
    rows = range(len(x))
    drawers: list[Drawer] = [TorchDrawer(2, CPU), KernelDrawer(kernels, 2, 1)]
    expected, found = (drawer.token_logprobs(logits, rows, [0] * len(x), [0] * len(x)) for drawer in drawers)
    assert [e.logprob for e in found] == pytest.approx([e.logprob for e in expected], rel=1e-14)


@given(st.integers(0xBD000000, 0xC2820000))
@settings(deadline=None, max_examples=60)
def test_the_exponential_never_falls_and_is_near_the_true_one(bits: int) -> None:
    # Neighbours among float32's numbers, from -65 or so to -0.03, in falling order.
    x = (torch.arange(bits, bits + 4_000) - 2**32).int().view(torch.float32)
    y = exponential(x.clone())
    assert bool((y.diff() <= 0).all())
    assert [float(value) for value in y[:50]] == [float(power_of_e(value)) for value in x[:50].numpy()]
    true = x.double().clamp(min=-64).exp()
    assert float(((y.double() - true) / true).abs().max()) < (6e-7 if float(x[-1]) > -10 else 4e-6)


def test_the_exponential_at_the_ends() -> None:
    ends = exponential(torch.tensor([0.0, -0.0, -1e-45, -1e-9, -200.0, -math.inf]))
    assert ends[:4].tolist() == [1.0] * 4
    assert ends[4:].tolist() == pytest.approx([math.exp(-64)] * 2, rel=4e-6)

"""Rows over many steps: state kept and state rebuilt agree, and min_tokens, bad words and grammars hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import request

from services.engine.request import Request
from services.engine.sampling.row_state import RowState, TokenCounts
from services.engine.sampling.sampler import Sampler
from shared.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("each_drawer")
VOCAB = 60
EOS = 2


def make_sampler() -> Sampler:
    return Sampler(vocab_size=VOCAB, eos_token_ids=[EOS], device=torch.device("cpu"))


def model(request_: Request) -> torch.Tensor:
    """Stands in for a model: logits [vocab] that depend on the position and the last token."""
    generator = torch.Generator().manual_seed(1000 * len(request_.token_ids) + request_.token_ids[-1])
    return torch.randn(VOCAB, generator=generator)


def step(sampler: Sampler, requests: list[Request]) -> None:
    for request_, result in zip(
        requests, sampler.sample(torch.stack([model(r) for r in requests]), requests), strict=True
    ):
        assert result.token_id is not None, result.error
        request_.token_ids.append(result.token_id)


ASKING = [
    SamplingParams(
        seed=11, max_tokens=99, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=9, stop_token_ids=[7]
    ),
    SamplingParams(seed=12, top_p=0.8, presence_penalty=1.5, bad_words_token_ids=[[5], [8, 9], [3, 4, 5]]),
    SamplingParams(temperature=0.0, frequency_penalty=2.0),
    SamplingParams(seed=13, top_k=10, logit_bias={4: 3.0}, allowed_token_ids=list(range(3, 30))),
    SamplingParams(seed=14),
]


def undisturbed(params: SamplingParams, steps: int) -> list[int]:
    alone = request(0, [1, 6], [], params)
    sampler = make_sampler()
    for _ in range(steps):
        step(sampler, [alone])
    return alone.token_ids


def test_mixed_batches_that_come_and_go_give_the_tokens_of_each_alone() -> None:
    requests = [request(i, [1, 6], [], params) for i, params in enumerate(ASKING)]
    sampler = make_sampler()
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        chosen = torch.randperm(len(requests), generator=generator)[
            : 1 + int(torch.randint(5, (), generator=generator))
        ]
        step(sampler, [requests[i] for i in chosen.tolist()])
    for request_, params in zip(requests, ASKING, strict=True):
        assert request_.token_ids == undisturbed(params, request_.num_output_tokens)


@pytest.mark.parametrize("params", ASKING)
@pytest.mark.parametrize("disturbance", ["released", "another engine", "tokens changed behind its back"])
def test_a_request_that_is_disturbed_goes_on_as_if_it_had_not_been(params: SamplingParams, disturbance: str) -> None:
    expected = undisturbed(params, 24)
    sampler, running = make_sampler(), request(0, [1, 6], [], params)
    for number in range(24):
        if number % 5 == 4:
            if disturbance == "released":
                sampler.release(running.key)
                sampler.release(running.key)
            elif disturbance == "another engine":
                output = running.token_ids[2:]
                sampler, running = make_sampler(), request(0, [1, 6], output, params)
            else:
                del running.token_ids[-2:]
                step(sampler, [running])
                step(sampler, [running])
        step(sampler, [running])
    assert running.token_ids == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.token_ids.append(6),
        lambda r: r.token_ids.__delitem__(slice(-2, None)),  # the one that is last now is 6 again
        lambda r: r.token_ids.__setitem__(-1, 5),
        lambda r: setattr(r, "num_prompt_tokens", 1),
        lambda r: setattr(r, "sampling", SamplingParams()),
    ],
)
def test_a_state_is_rebuilt_for_tokens_or_parameters_that_it_does_not_describe(change) -> None:
    described = request(0, [1, 6], [7, 6], SamplingParams(frequency_penalty=1.0))
    state = RowState(described, VOCAB, [EOS])
    assert state.describes(described)
    change(described)
    assert not state.describes(described)


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)), st.lists(st.integers(0, 200), max_size=150))
@settings(deadline=None, max_examples=60)
def test_counts_updated_equal_counts_rebuilt(prompt: list[int], output: list[int], more: list[int]) -> None:
    updated = TokenCounts(prompt, output)
    for token_id in more:
        updated.add(token_id)
    rebuilt = TokenCounts(prompt, [*output, *more])

    def as_dict(counts: TokenCounts) -> dict[int, float]:
        assert len(counts.ids) == len(set(counts.ids.tolist()))
        return dict(zip(counts.ids.tolist(), counts.output_counts.tolist(), strict=True))

    assert as_dict(updated) == as_dict(rebuilt)
    assert as_dict(rebuilt) == {t: [*output, *more].count(t) for t in {*prompt, *output, *more}}


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_min_tokens_bans_eos_and_stop_ids_until_exactly_so_many_tokens_are_there(
    min_tokens: int, ignore_eos: bool
) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [EOS, 9]] = torch.tensor([50.0, 40.0])
    params = SamplingParams(temperature=0.0, min_tokens=min_tokens, stop_token_ids=[9], ignore_eos=ignore_eos)
    running, sampler = request(0, [1], [], params), make_sampler()
    for _ in range(5):
        running.token_ids.append(sampler.sample(logits.clone(), [running])[0].token_id or 0)
    assert running.token_ids[1:] == [0] * min_tokens + [EOS] * (5 - min_tokens)
    resumed = request(1, [1], [0] * min_tokens, params)
    assert make_sampler().sample(logits.clone(), [resumed])[0].token_id == EOS


def test_a_bad_word_is_never_completed_though_its_beginning_may_appear() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 8, 9]] = torch.tensor([3.0, 2.0, 1.0])

    def next_token(output: list[int], bad_words: list[list[int]], prompt: list[int]) -> int | None:
        params = SamplingParams(temperature=0.0, bad_words_token_ids=bad_words)
        return make_sampler().sample(logits.clone(), [request(0, prompt, output, params)])[0].token_id

    assert next_token([], [[5]], [1]) == 8
    assert next_token([4], [[4, 5]], [1]) == 8
    assert next_token([3], [[4, 5]], [1]) == 5
    assert next_token([3, 4], [[3, 4, 5], [4, 8]], [1]) == 9
    assert next_token([4], [[3, 4, 5]], [1, 3]) == 5  # the beginning counts in the output alone
    assert next_token([], [[4, 5]], [1, 4]) == 5


def test_a_grammars_bitmask_bans_what_it_has_no_bit_for() -> None:
    requests = [request(i, [1], [], SamplingParams(temperature=0.0, logit_bias={40: 100.0})) for i in range(3)]
    words = torch.full((3, 2), -1, dtype=torch.int32)
    words[1] = torch.tensor([1 << 7, 0])
    words[2] = torch.tensor([-(2**31), 1 << (33 - 32)])
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(3, 1)
    sampled = make_sampler().sample(logits, requests, words)
    assert [result.token_id for result in sampled] == [40, 7, 33]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_real_vocabulary_in_a_real_batch_equals_row_by_row(threads: int) -> None:
    vocab = 151_936
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.9),
        SamplingParams(seed=3, top_k=20),
        SamplingParams(seed=4, top_p=0.95, temperature=2.0),
        SamplingParams(seed=5, top_k=3000, min_p=1e-5),
    ]
    requests = [request(i, [1], [], params) for i, params in enumerate(kinds)]
    # bf16 has many ties, and every step of the conversion to float32 must be the same alone and in a batch.
    logits = (torch.randn(6, vocab, generator=torch.Generator().manual_seed(9)) * 3).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        options = {"vocab_size": vocab, "eos_token_ids": [2], "device": torch.device("cpu")}
        together = Sampler(**options).sample(logits, requests)
        torch.set_num_threads(3 - threads)
        alone = [Sampler(**options).sample(logits[i : i + 1], [requests[i]])[0] for i in range(6)]
    finally:
        torch.set_num_threads(before)
    assert together == alone
    assert together[0].token_id == int(logits[0].float().argmax())

"""The requests that evaluation harnesses score with, as lm-eval sends them, against transformers' own scores.

`make eval-test` runs lm-eval itself (test_lm_eval.py).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.server_process import ServerProcess, tandem_serve
from tests.integration.likelihood_task import Reference, Scored, parse, payload

MODEL = "SmolLM2-135M-Instruct"
TOLERANCE = 1e-3
# Of a sum over a text: float32 has seven digits, and a step rounds thousands of times.
RELATIVE_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--dtype", "float32", "--kv-cache-memory", "0.5", "--max-model-len", "2048")
    with tandem_serve(tmp_path_factory.mktemp("likelihoods"), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


@pytest.fixture(scope="module")
def pairs(reference: Reference) -> list[tuple[list[int], list[int]]]:
    return reference.pairs()


@pytest.fixture(scope="module")
def expected(reference: Reference, pairs: list[tuple[list[int], list[int]]]) -> list[Scored]:
    return [reference.score(context, continuation) for context, continuation in pairs]


def complete(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def assert_agree(scored: Sequence[Scored], expected: Sequence[Scored]) -> None:
    for one, other in zip(scored, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE, rel=RELATIVE_TOLERANCE)
        assert one.greedy is other.greedy


@pytest.mark.parametrize("batch_size", [1, 4])
def test_prompts_of_token_ids_in_batches(server: ServerProcess, pairs, expected, batch_size: int) -> None:
    scored: list[Scored] = []
    for batch in batches(pairs, batch_size):
        answer = complete(server, payload(MODEL, [context + continuation for context, continuation in batch]))
        scored += parse(answer, [len(context) for context, _ in batch])
    assert_agree(scored, expected)
    assert {one.greedy for one in expected} == {True, False}


def test_prompts_as_text(server: ServerProcess, reference: Reference, pairs, expected) -> None:
    """tokenized_requests=False: the harness decodes its ids, and the server encodes the text again."""
    texts = [reference.tokenizer.decode(context + continuation) for context, continuation in pairs]
    answer = complete(server, payload(MODEL, texts) | {"add_special_tokens": False})
    assert_agree(parse(answer, [len(context) for context, _ in pairs]), expected)
    for choice, text in zip(answer["choices"], texts, strict=True):
        assert choice["text"].startswith(text)


def test_nothing_generated(server: ServerProcess, pairs, expected) -> None:
    """max_tokens 0 only scores the prompt: nothing follows it, and the text is the prompt's."""
    prompts = [context + continuation for context, continuation in pairs]
    answer = complete(server, payload(MODEL, prompts) | {"max_tokens": 0})
    assert_agree(parse(answer, [len(context) for context, _ in pairs], generated=0), expected)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * len(prompts)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scores_again_from_the_prefix_cache(server: ServerProcess, reference: Reference, max_tokens: int) -> None:
    """Blocks in the cache carry no logits: the prompt is scored whole the second time too."""
    token_ids = reference.tokenizer("one two three four five " * 12, add_special_tokens=False).input_ids
    body = payload(MODEL, token_ids) | {"max_tokens": max_tokens}
    for _ in range(2):
        (scored,) = parse(complete(server, body), [1], generated=max_tokens)
        assert scored.logprob == pytest.approx(reference.score(token_ids[:1], token_ids[1:]).logprob, abs=TOLERANCE)


def test_every_token_its_alternatives_and_its_place(server: ServerProcess, reference: Reference) -> None:
    text = "北京 is the capital 👩‍👩‍👧‍👦 of China"
    token_ids = reference.tokenizer(text, add_special_tokens=False).input_ids
    answer = complete(server, {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 5, "model": MODEL})
    (choice,) = answer["choices"]
    assert choice["text"] == text
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(token_ids)}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][0] == 0
    expected = reference.token_logprobs(token_ids)
    for position, token_id in enumerate(token_ids[1:]):
        assert logprobs["token_logprobs"][position + 1] == pytest.approx(
            expected[position, token_id].item(), abs=TOLERANCE
        )
        top = sorted(logprobs["top_logprobs"][position + 1].values(), reverse=True)[:5]
        assert top == pytest.approx(expected[position].topk(5).values.tolist(), abs=TOLERANCE)
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not name.startswith("bytes:"):
            assert text[offset:].startswith(name)


def test_prompt_logprobs_and_ranks(server: ServerProcess, reference: Reference) -> None:
    token_ids = reference.tokenizer("The capital of France is Paris", add_special_tokens=False).input_ids
    body = {"model": MODEL, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 3, "temperature": 0}
    (choice,) = complete(server, body)["choices"]
    expected = reference.token_logprobs(token_ids)
    assert choice["prompt_logprobs"][0] is None
    for position, token_id in enumerate(token_ids[1:]):
        entry = choice["prompt_logprobs"][position + 1][str(token_id)]
        assert entry["logprob"] == pytest.approx(expected[position, token_id].item(), abs=TOLERANCE)
        assert entry["rank"] == 1 + int((expected[position] > expected[position, token_id]).sum())


def batches(pairs: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [pairs[start : start + size] for start in range(0, len(pairs), size)]

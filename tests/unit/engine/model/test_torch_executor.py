"""The executor's own part: what it hands the sampler, whose fault stays whose, and what it refuses to compute."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_driver import Driver, RecordingSampler, make_executor

from services.engine.executor import torch_executor
from services.engine.executor.interface import Executor
from services.engine.executor.torch_executor import TorchExecutor
from services.engine.request import Request, RequestKey, ScheduledRequest, Step
from services.engine.sampling.processors import ENTRY_POINT_GROUP, ProcessorContext
from services.engine.settings import EngineSettings
from shared.model_source import fingerprint
from shared.protocol import TokenLogprobs
from shared.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=[2, 7],
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_request(number: int, token_ids: list[int], blocks: list[int], **sampling: Any) -> Request:
    return Request(
        RequestKey(b"test", number), list(token_ids), len(token_ids), SamplingParams(**sampling), block_table=blocks
    )


def test_it_describes_the_model(folder: Path) -> None:
    executor: Executor = make_executor(folder, served_model_name=["tiny", "alias"], max_model_len=40)
    description = executor.description
    assert description.name == "tiny"
    assert description.fingerprint == f"{fingerprint(folder)}-float32"
    assert make_executor(folder, dtype="bfloat16").description.fingerprint == f"{fingerprint(folder)}-bfloat16"
    limits = description.limits
    assert (limits.max_model_len, limits.vocab_size, limits.block_size) == (40, 60, 4)
    assert limits.eos_token_ids == [2, 7]
    assert executor.num_blocks == 256


def test_only_requests_whose_last_token_was_computed_are_sampled(folder: Path) -> None:
    executor = make_executor(folder)
    whole, part = make_request(1, [3, 4, 5], [0]), make_request(2, [3, 4, 5, 6, 8], [1, 2])
    results = executor.execute(Step([ScheduledRequest(whole, 0, 3), ScheduledRequest(part, 0, 4)]))
    assert results[0].token_id is not None
    assert results[1].token_id is None
    assert results[1].error is None
    # A step that samples nothing at all.
    results = executor.execute(Step([ScheduledRequest(part, 0, 2)]))
    assert results[0].token_id is None


def test_an_empty_step_gives_nothing(folder: Path) -> None:
    assert make_executor(folder).execute(Step([])) == []


def test_prompt_logprobs_come_in_shares_and_fit_together(folder: Path) -> None:
    prompt = [3, 9, 27, 21, 3, 9, 14]

    def logprobs(chunks: list[int]) -> list[TokenLogprobs]:
        executor = make_executor(folder)
        request = make_request(1, prompt, [5, 2], prompt_logprobs=0)
        found: list[TokenLogprobs] = []
        start = 0
        for count in chunks:
            result = executor.execute(Step([ScheduledRequest(request, start, count)]))[0]
            found += result.prompt_logprobs or []
            start += count
        assert result.token_id is not None
        return found

    whole = logprobs([7])
    assert [entry.token_id for entry in whole] == prompt[1:]
    assert logprobs([3, 3, 1]) == whole
    assert logprobs([6, 1]) == whole


def test_prompt_logprobs_are_not_computed_again_once_there_is_output(folder: Path) -> None:
    executor = make_executor(folder)
    request = make_request(1, [3, 9, 27], [0], prompt_logprobs=0)
    request.token_ids.append(5)
    result = executor.execute(Step([ScheduledRequest(request, 0, 4)]))[0]
    assert result.prompt_logprobs is None
    assert result.token_id is not None


@pytest.mark.parametrize("at_once", [1, 7])
def test_a_long_prompt_is_scored_part_by_part_with_equal_logprobs(
    folder: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = TorchExecutor(
        EngineSettings(model=str(folder), dtype="float32", device="cpu", threads=1, block_size=4, num_kv_blocks=64)
    )

    def score() -> list[TokenLogprobs] | None:
        request = make_request(1, [3 + i % 50 for i in range(30)], list(range(8)), prompt_logprobs=2)
        (result,) = executor.execute(Step([ScheduledRequest(request, 0, 30)]))
        executor.release(request)
        return result.prompt_logprobs

    most = 0
    head = executor.loaded.model.logits

    def watched(states: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(states))
        return head(states)

    whole = score()
    assert whole is not None
    assert len(whole) == 29
    monkeypatch.setattr(torch_executor, "SCORED_ROWS_AT_ONCE", at_once)
    monkeypatch.setattr(executor.loaded.model, "logits", watched)
    assert score() == whole
    assert most == at_once


class BanFive:
    def __init__(self, context: ProcessorContext) -> None:
        assert context.vocab_size == 60

    def on_batch(self, changes: object) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits[:, 5] = -torch.inf
        return logits


def test_installed_logits_processors_are_at_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings(model=str(folder), dtype="float32", device="cpu", threads=1, num_kv_blocks=8)
    wants_five = {"temperature": 0.0, "logit_bias": {5: 100.0}}
    step = Step([ScheduledRequest(make_request(1, [4, 9], [0], **wants_five), 0, 2)])
    assert TorchExecutor(settings).execute(step)[0].token_id == 5
    point = EntryPoint("ban five", f"{__name__}:BanFive", ENTRY_POINT_GROUP)
    monkeypatch.setattr("services.engine.sampling.processors.entry_points", lambda group: [point])
    monkeypatch.setattr(EntryPoint, "load", lambda self: BanFive)
    assert TorchExecutor(settings).execute(step)[0].token_id not in (5, None)


def test_logprobs_that_fail_end_their_own_request_alone(folder: Path) -> None:
    class Failing(RecordingSampler):
        def prompt_logprobs(self, logits: torch.Tensor, next_token_ids: list[int], count: int) -> list[TokenLogprobs]:
            if next_token_ids[0] == 9:
                raise ValueError("the logits hold NaN")
            return super().prompt_logprobs(logits, next_token_ids, count)

    executor = make_executor(folder, Failing())
    requests = [make_request(i, [3, second, 5], [i], prompt_logprobs=0) for i, second in enumerate((9, 10))]
    bad, good = executor.execute(Step([ScheduledRequest(request, 0, 3) for request in requests]))
    assert bad.error == "the logits hold NaN"
    assert good.error is None
    assert good.prompt_logprobs is not None
    assert len(good.prompt_logprobs) == 2


@pytest.mark.parametrize("token_id", [60, -1, 2**31 - 1])
def test_a_token_outside_the_vocabulary_fails_its_request_alone(folder: Path, token_id: int) -> None:
    executor = make_executor(folder)
    alone = executor.execute(Step([ScheduledRequest(make_request(1, [3, 4, 5], [0]), 0, 3)]))[0].token_id
    good, bad = make_request(1, [3, 4, 5], [0]), make_request(2, [3, token_id, 5], [1])
    results = executor.execute(Step([ScheduledRequest(bad, 0, 3), ScheduledRequest(good, 0, 3)]))
    assert results[0].token_id is None
    assert results[0].error is not None
    assert str(token_id) in results[0].error
    assert results[1].token_id == alone
    only_bad = executor.execute(Step([ScheduledRequest(bad, 0, 3)]))
    assert only_bad[0].error is not None


@pytest.mark.parametrize("blocks", [[], [0], [0, 256], [-1, 0]])
def test_blocks_that_are_not_there_stop_the_engine_before_anything_is_written(folder: Path, blocks: list[int]) -> None:
    executor = make_executor(folder)
    before = executor._pool.keys[0].clone()
    with pytest.raises(RuntimeError, match="block"):
        executor.execute(Step([ScheduledRequest(make_request(1, [3, 4, 5, 6, 8], blocks), 0, 5)]))
    assert torch.equal(executor._pool.keys[0], before)


def test_released_requests_are_the_samplers_to_forget(folder: Path) -> None:
    sampler = RecordingSampler()
    executor = make_executor(folder, sampler)
    request = make_request(1, [3, 4, 5], [0])
    executor.release(request)
    executor.release(request)
    assert sampler.released == [request.key, request.key]


def test_a_closed_executor_says_so(folder: Path) -> None:
    executor = make_executor(folder)
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.execute(Step([ScheduledRequest(make_request(1, [3, 4, 5], [0]), 0, 3)]))


def test_the_longest_request_reaches_its_last_position(folder: Path) -> None:
    executor = make_executor(folder)
    assert executor.description.limits.max_model_len == 64
    for length in (61, 62, 63):
        outputs = Driver(executor).run([[3] * length], max_tokens=64 - length)
        assert len(outputs[0]) == 64 - length
    result = executor.execute(Step([ScheduledRequest(make_request(1, [3] * 64, list(range(16))), 0, 64)]))
    assert result[0].token_id is not None

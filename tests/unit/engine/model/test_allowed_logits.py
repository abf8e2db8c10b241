"""Logits of those tokens alone that grammars' masks allow: to the bit what they are without, on every processor; and
what the executor makes of them."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_driver import RecordingSampler
from numpy.typing import NDArray
from packed_product import PackedMatrix
from tiny_models import NATIVE, save_model

from services.engine.core import EngineCore
from services.engine.executor.torch_executor import TorchExecutor
from services.engine.grammars import TokenMasks
from services.engine.model.kernels import Kernels, load_kernels
from services.engine.model.quantization import WeightFormat
from services.engine.request import Request, RequestKey, SampledToken, ScheduledRequest, Step
from services.engine.settings import EngineSettings
from shared.sampling_params import SamplingParams
from tests.engine_harness import PEER, make_add, make_settings
from tests.grammar_harness import constrain, run_constrained
from tests.token_bitmask import pack

Allowed = NDArray[np.bool_]

# Rows, inputs and tokens around the edges of tiles, panels and a mask's words.
SHAPES = ((1, 7, 1), (2, 33, 31), (5, 64, 33), (9, 96, 48), (16, 31, 130), (33, 100, 1000), (300, 40, 70))
SHARES = (1.0, 0.002, 0.0, 0.05, 0.5, 1.0, 0.01)
VOCAB = 101  # of tiny_models


def random_allowed(rows: int, vocab: int, seed: int) -> Allowed:
    """Rows that may have anything, a few tokens, half of them, or nothing."""
    shares = np.resize(np.array(SHARES), rows)
    return np.random.default_rng(seed).random((rows, vocab)) < shares[:, None]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("format_", [WeightFormat.BF16, WeightFormat.INT8, WeightFormat.INT4])
def test_what_is_allowed_has_the_same_bits_and_all_else_is_banned(
    kernels: Kernels, format_: WeightFormat, threads: int
) -> None:
    for rows, inputs, vocab in SHAPES:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, inputs, generator=generator).bfloat16()
        weight, bias = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((vocab, inputs), (vocab,)))
        matrix = PackedMatrix(kernels, weight, bias if rows % 2 else None, format_)
        whole = matrix.times(x)
        for seed in range(3):
            allowed = random_allowed(rows, vocab, seed)
            found = matrix.times_where(x, pack(allowed), threads)
            assert torch.equal(found, whole.masked_fill(torch.from_numpy(~allowed), -torch.inf))


def test_a_row_that_is_nan_shows_in_what_it_allows_and_nowhere_else(kernels: Kernels) -> None:
    x = torch.ones(20, 48).bfloat16()
    x[7, 5] = torch.nan
    allowed = np.zeros((20, 200), dtype=bool)
    allowed[:, [3, 150]] = True
    found = PackedMatrix(kernels, torch.ones(200, 48).bfloat16()).times_where(x, pack(allowed))
    assert found[7, [3, 150]].isnan().all()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(found[others] == 48, torch.from_numpy(allowed[others]))
    assert not found[others].isnan().any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_model(NATIVE["llama"](), folder)
    return folder


@pytest.fixture
def make_executor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TorchExecutor]:
    if load_kernels() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    def make(shortcut: bool, sampler: Any = None, **fields: Any) -> TorchExecutor:
        settings = EngineSettings(
            model=str(folder), dtype="bfloat16", device="cpu", threads=1, block_size=4, num_kv_blocks=512, **fields
        )
        executor = TorchExecutor(settings, sampler=sampler)
        assert executor.loaded.allowed_logits is not None
        if not shortcut:
            executor._loaded = replace(executor.loaded, allowed_logits=None)
        return executor

    return make


def masks_of(rows: Sequence[int], allowed: Allowed) -> TokenMasks:
    filled: Future[None] = Future()
    filled.set_result(None)
    return TokenMasks(rows, pack(allowed).numpy(), -(-allowed.shape[1] // 32), filled)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "temperature": 3.0, "logprobs": 4},
    {"seed": 3, "top_p": 0.8},
    {"seed": 4, "top_k": 3, "min_p": 0.05},
    {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.4},
    {"seed": 5, "presence_penalty": 1.0, "logit_bias": {4: 3.0, 9: -2.0}},
    {"seed": 6, "allowed_token_ids": list(range(0, VOCAB, 2))},
]


def generate(executor: TorchExecutor, steps: int = 6) -> list[list[SampledToken]]:
    """Every kind of request with and without a grammar, side by side, under masks that are the same in every run."""
    requests = [
        Request(
            RequestKey(b"test", number),
            [3, 7, number + 1],
            3,
            SamplingParams(**KINDS[number % len(KINDS)]),
            block_table=[*range(4 * number, 4 * number + 4)],
        )
        for number in range(3 * len(KINDS))
    ]
    results: list[list[SampledToken]] = []
    for number in range(steps):
        allowed = random_allowed(len(requests), VOCAB, number)
        allowed[:, 2 * number] = True  # nobody bans an even one
        allowed[: len(KINDS)] = True  # these have no grammar
        scheduled = [ScheduledRequest(r, r.num_computed_tokens, r.num_tokens - r.num_computed_tokens) for r in requests]
        masks = masks_of(range(len(requests)), allowed)
        results.append(executor.execute(Step(scheduled, token_masks=masks)))
        for row, (request, result) in enumerate(zip(requests, results[-1], strict=True)):
            assert result.token_id is not None, result.error
            assert allowed[row, result.token_id]
            request.num_computed_tokens = request.num_tokens
            request.token_ids.append(result.token_id)
    return results


@pytest.mark.parametrize("fields", [{}, {"logprobs_mode": "processed"}, {"quantization": "int8"}])
def test_tokens_and_logprobs_are_the_same_as_with_all_logits(
    make_executor: Callable[..., TorchExecutor], fields: dict[str, Any]
) -> None:
    # The same logprobs to the last bit: those of rows that ask for them are of all tokens.
    assert generate(make_executor(True, **fields)) == generate(make_executor(False, **fields))


def test_a_real_model_writes_the_same_within_a_schema_and_beside_it(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if load_kernels() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    text = {"type": "string", "maxLength": 12}
    schema = json.dumps({"type": "object", "properties": {"a": text, "b": {"type": "integer"}}, "required": ["a", "b"]})
    settings = make_settings(
        smollm2, executor="torch", device="cpu", dtype="bfloat16", num_kv_blocks=200, max_num_batched_tokens=64
    )
    executor = TorchExecutor(settings)
    core = EngineCore(executor, settings)
    with_shortcut = executor.loaded
    assert with_shortcut.allowed_logits is not None
    texts: list[dict[int, list[int]]] = []
    for loaded in (with_shortcut, replace(with_shortcut, allowed_logits=None)):
        executor._loaded = loaded
        for number in range(8):
            structured = constrain("json_schema", schema) if number % 4 else None
            kind = {"temperature": 0.0} if number % 2 else {"temperature": 1.0, "seed": number}
            add = make_add(number, [7, 300 + number], max_tokens=24, structured_output=structured, **kind)
            core.add(PEER, add)
        texts.append({number: result.token_ids for number, result in run_constrained(core).items()})
    assert texts[0] == texts[1]
    assert all(texts[0].values())
    core.close()


def test_only_rows_that_ask_for_logprobs_get_more_than_is_allowed(make_executor: Callable[..., TorchExecutor]) -> None:
    class Watching(RecordingSampler):
        masked: bool | None = None

        def sample(self, logits: torch.Tensor, requests: Sequence[Request], token_bitmask: Any = None) -> Any:
            self.masked = token_bitmask is not None
            return super().sample(logits, requests, token_bitmask)

    sampler = Watching()
    executor = make_executor(True, sampler)
    allowed = np.zeros((3, VOCAB), dtype=bool)
    allowed[0] = True
    allowed[1:, [5, 100]] = True
    for logprobs in (None, 0):
        asks = [None, None, logprobs]
        requests = [
            Request(RequestKey(b"test", n), [3, 4], 2, SamplingParams(logprobs=asks[n]), block_table=[n])
            for n in range(3)
        ]
        scheduled = [ScheduledRequest(r, 0, 2) for r in requests]
        executor.execute(Step(scheduled, token_masks=masks_of(range(3), allowed)))
        finite = [int(sampler.logits[n][1].isfinite().sum()) for n in range(3)]
        assert finite == [VOCAB, 2, 2 if logprobs is None else VOCAB]
        assert sampler.masked is (logprobs is not None)


def test_a_request_whose_states_are_broken_fails_alone(
    make_executor: Callable[..., TorchExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(True)
    forward = executor.loaded.model.forward

    def broken(*arguments: Any) -> torch.Tensor:
        states = forward(*arguments)
        states[1] = torch.nan
        return states

    monkeypatch.setattr(executor.loaded.model, "forward", broken)
    allowed = np.zeros((3, VOCAB), dtype=bool)
    allowed[:, 50] = True
    requests = [
        Request(RequestKey(b"test", n), [3, 4], 2, SamplingParams(temperature=0.0), block_table=[n]) for n in range(3)
    ]
    scheduled = [ScheduledRequest(r, 0, 2) for r in requests]
    results = executor.execute(Step(scheduled, token_masks=masks_of(range(3), allowed)))
    assert [result.token_id for result in results] == [50, None, 50]
    assert "NaN" in str(results[1].error)

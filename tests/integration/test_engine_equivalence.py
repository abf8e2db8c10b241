"""However the engine runs a request, its tokens are the same: scheduler, KV cache, model and sampler together, on
SmolLM2. Greedy tokens in float32 are transformers' own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import PEER, Result, make_add, run_to_end
from smollm2_prompts import smollm2_prompts

from services.engine.core import EngineCore
from services.engine.executor.interface import ModelDescription
from services.engine.executor.torch_executor import TorchExecutor
from services.engine.model.kernels import load_kernels
from services.engine.request import Request, SampledToken, Step
from services.engine.settings import EngineSettings
from shared.protocol import Add, FinishReason

MAX_TOKENS = 64
BLOCK_SIZE = 16

# What rows of one batch may ask for; each prompt below gets one of them.
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.3, "min_p": 0.05, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0.7, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.2, "logprobs": 0},
    {"temperature": 1.0, "min_tokens": 20, "logit_bias": {28: -5.0, 198: 3.0}},
    {"temperature": 2.0, "top_p": 0.5, "bad_words_token_ids": [[28], [260, 253]]},
]


class FewerBlocks:
    """An executor of which the scheduler may use only so many KV blocks: a model is loaded once for all tests."""

    def __init__(self, executor: TorchExecutor, num_blocks: int) -> None:
        assert num_blocks <= executor.num_blocks
        self._executor = executor
        self.num_blocks = num_blocks

    @property
    def description(self) -> ModelDescription:
        return self._executor.description

    def execute(self, step: Step) -> list[SampledToken]:
        return self._executor.execute(step)

    def release(self, request: Request) -> None:
        self._executor.release(request)

    def close(self) -> None:
        self._executor.close()


def make_executor(folder: Path, dtype: str, **settings: Any) -> TorchExecutor:
    fixed: dict[str, Any] = {"device": "cpu", "threads": 1, "block_size": BLOCK_SIZE, "num_kv_blocks": 512}
    return TorchExecutor(EngineSettings(model=str(folder), dtype=dtype, **fixed, **settings))


def make_core(executor: TorchExecutor, num_blocks: int = 512, **settings: Any) -> EngineCore:
    defaults = {"enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    return EngineCore(FewerBlocks(executor, num_blocks), EngineSettings(**{**defaults, **settings}))


def run(core: EngineCore, adds: Sequence[Add]) -> list[Result]:
    """All of them at once, to their ends."""
    for add in adds:
        core.add(PEER, add)
    results = run_to_end(core)
    for add in adds:
        assert results[add.request_id].error is None
    return [results[add.request_id] for add in adds]


def tokens(results: Sequence[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


def greedy(request_id: int, prompt: list[int], **fields: Any) -> Add:
    return make_add(request_id, prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, **fields)


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    return smollm2_prompts(smollm2)


@pytest.fixture(scope="module")
def executor(smollm2: Path) -> TorchExecutor:
    return make_executor(smollm2, "float32")


@pytest.fixture(scope="module")
def adds(prompts: list[list[int]]) -> list[Add]:
    return [greedy(i, prompt) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def together(executor: TorchExecutor, adds: list[Add]) -> list[list[int]]:
    """All in one batch: what every other way of running them is compared with."""
    core = make_core(executor)
    outputs = tokens(run(core, adds))
    assert len(outputs) >= 20
    assert all(len(output) == MAX_TOKENS for output in outputs)
    assert core.statistics.steps == MAX_TOKENS  # they did share every step
    return outputs


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


def test_in_one_batch_every_token_is_the_one_that_transformers_finds_likeliest(
    reference: Any, prompts: list[list[int]], together: list[list[int]]
) -> None:
    # By induction this is what its greedy generation gives, at a fraction of the time.
    for prompt, output in zip(prompts, together, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output


def test_transformers_generate_gives_the_same(
    reference: Any, prompts: list[list[int]], together: list[list[int]]
) -> None:
    for i in (5, 10):
        prompt = torch.tensor([prompts[i]])
        # The mask is given, since generate would guess that the pad id (which ends each message here) is padding.
        generated = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=None,
        )
        assert generated[0, len(prompts[i]) :].tolist() == together[i]


@pytest.mark.parametrize("half", [0, 1])
def test_one_by_one(executor: TorchExecutor, adds: list[Add], together: list[list[int]], half: int) -> None:
    core = make_core(executor)
    assert [run(core, [add])[0].token_ids for add in adds[half::2]] == together[half::2]


def test_in_chunks_of_a_small_budget(executor: TorchExecutor, adds: list[Add], together: list[list[int]]) -> None:
    core = make_core(executor, max_num_batched_tokens=29, max_num_seqs=23)
    assert tokens(run(core, adds)) == together
    # No prompt is computed in one go beside the others' decodes.
    assert core.statistics.steps > MAX_TOKENS + sum(add.request_id < 10 for add in adds)


def test_with_prefixes_from_the_cache(executor: TorchExecutor, adds: list[Add], together: list[list[int]]) -> None:
    core = make_core(executor, enable_prefix_caching=True)
    # One after the other, so that the first has computed the system prompt that the next ones share.
    assert tokens(run(core, adds[:1])) == together[:1]
    first = run(core, adds)
    again = run(core, adds)
    assert tokens(first) == together
    assert tokens(again) == together
    assert all(result.cached_tokens for result in first[:10])
    for add, result in zip(adds, again, strict=True):
        # All full blocks of the prompt, but for the last token, which is computed to sample from.
        length = len(add.prompt_token_ids) // 4
        assert result.cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_preempted_again_and_again_for_want_of_blocks(
    executor: TorchExecutor, adds: list[Add], together: list[list[int]], enable_prefix_caching: bool
) -> None:
    # A request grows to at most 8 blocks: about three fit, and more begin.
    core = make_core(executor, num_blocks=26, enable_prefix_caching=enable_prefix_caching, max_num_batched_tokens=64)
    assert tokens(run(core, adds)) == together
    assert core.statistics.preemptions >= 5


def test_resumed_from_any_point(executor: TorchExecutor, prompts: list[list[int]], together: list[list[int]]) -> None:
    done = [(7 * i) % MAX_TOKENS for i in range(len(prompts))]
    adds = [greedy(i, prompt, output=together[i][: done[i]]) for i, prompt in enumerate(prompts)]
    rest = tokens(run(make_core(executor, enable_prefix_caching=True), adds))
    assert [together[i][: done[i]] + rest[i] for i in range(len(rest))] == together


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_seeded_rows_of_a_mixed_batch_are_as_alone_preempted_and_resumed(
    smollm2: Path, executor: TorchExecutor, prompts: list[list[int]], dtype: str
) -> None:
    if load_kernels() is None:
        pytest.skip("no C compiler here; PyTorch's attention makes no such promise")
    if dtype != "float32":
        executor = make_executor(smollm2, dtype)

    def ask(i: int, output: list[int] | None = None) -> Add:
        asked = {"max_tokens": 40, **ASKED[i % len(ASKED)]}
        return make_add(i, prompts[i], output=output, seed=1000 + i, **asked)

    adds = [ask(i) for i in range(len(prompts))]
    mixed = run(make_core(executor), adds)
    assert any(result.finish_reason is FinishReason.LENGTH for result in mixed)
    logprobs = [[output.logprobs for output in result.outputs] for result in mixed]
    crowded = make_core(executor, num_blocks=12, max_num_batched_tokens=40, enable_prefix_caching=True)
    preempted = run(crowded, adds)
    assert crowded.statistics.preemptions >= 3
    assert tokens(preempted) == tokens(mixed)
    assert [[output.logprobs for output in result.outputs] for result in preempted] == logprobs
    core = make_core(executor)
    for i in range(len(ASKED)):  # one of each kind
        alone = run(core, [adds[i]])[0]
        assert alone.token_ids == mixed[i].token_ids
        assert [output.logprobs for output in alone.outputs] == logprobs[i]
        if len(alone.token_ids) > 15:
            resumed = run(core, [ask(i, alone.token_ids[:15])])[0]
            assert alone.token_ids[:15] + resumed.token_ids == alone.token_ids


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_give_the_same_tokens_however_they_run(
    smollm2: Path, prompts: list[list[int]], quantization: str
) -> None:
    if load_kernels() is None:
        pytest.skip("no C compiler here; PyTorch's attention makes no such promise")
    executor = make_executor(smollm2, "bfloat16", quantization=quantization)
    adds = [make_add(i, prompt, max_tokens=24, temperature=0.0, ignore_eos=True) for i, prompt in enumerate(prompts)]
    together = tokens(run(make_core(executor), adds))
    assert len({tuple(output) for output in together}) > len(together) // 2
    for i in (0, 9, 15):
        assert tokens(run(make_core(executor), [adds[i]])) == [together[i]]
    assert tokens(run(make_core(executor, max_num_batched_tokens=29, max_num_seqs=9), adds)) == together
    cached = make_core(executor, enable_prefix_caching=True)
    run(cached, adds[:1])
    again = run(cached, adds)
    assert tokens(again) == together
    assert all(result.cached_tokens for result in again[:10])
    crowded = make_core(executor, num_blocks=12, max_num_batched_tokens=64, enable_prefix_caching=True)
    assert tokens(run(crowded, adds)) == together
    assert crowded.statistics.preemptions >= 2

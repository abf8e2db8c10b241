"""The simulated executor: tokens are functions of the sequence, time follows the presets, no weights are needed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import EOS, generate, make_core, make_settings, write_model

from services.engine.executor.simulated import TIMINGS, SimulatedExecutor
from services.engine.request import Request, RequestKey, ScheduledRequest, Step
from shared.model_source import ModelSourceError
from shared.protocol import FinishReason
from shared.sampling_params import SamplingParams


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def entry(start: int, num_tokens: int) -> ScheduledRequest:
    request = Request(RequestKey(b"p", start), [1] * (start + num_tokens), start + num_tokens, SamplingParams())
    return ScheduledRequest(request, start, num_tokens)


def test_random_tokens_follow_the_seed_and_the_prompt(model: Path) -> None:
    def tokens(prompt: list[int], seed: int) -> list[int]:
        return generate(make_core(model), prompt, seed=seed, max_tokens=20).token_ids

    assert tokens([5, 6, 7], 1) == tokens([5, 6, 7], 1)
    assert tokens([5, 6, 7], 1) != tokens([5, 6, 7], 2)
    assert tokens([5, 6, 7], 1) != tokens([5, 6, 8], 1)
    assert len(set(tokens([5, 6, 7], 1))) > 10


def test_random_tokens_are_never_special(tmp_path: Path) -> None:
    model = write_model(tmp_path, vocab_size=20, eos_token_id=[2, 17], bos_token_id=1, pad_token_id=None)
    added = {"added_tokens_decoder": {"0": {"special": True}, "5": {"special": False}, "16": {"special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    result = generate(make_core(model), [3], max_tokens=200)
    assert len(result.token_ids) == 200
    # 16 and what follows are special tokens and padding.
    assert set(result.token_ids) == set(range(3, 16))


def test_a_resumed_request_goes_on_identically(model: Path) -> None:
    whole = generate(make_core(model), [5, 6, 7], seed=3, max_tokens=20).token_ids
    for cut in (1, 10, 19):
        rest = generate(make_core(model), [5, 6, 7], output=whole[:cut], seed=3, max_tokens=20).token_ids
        assert whole[:cut] + rest == whole


def test_echo_repeats_the_prompt_and_ends(model: Path) -> None:
    prompt = [9, 8, 7, 900, 9]
    core = make_core(model, simulated_tokens="echo")
    result = generate(core, prompt, max_tokens=100)
    assert result.token_ids == [*prompt, EOS]
    assert result.finish_reason is FinishReason.STOP
    assert result.stop_token_id == EOS
    resumed = generate(core, prompt, output=prompt[:2], max_tokens=100)
    assert resumed.token_ids == [*prompt[2:], EOS]


def test_echo_goes_through_eos_where_it_is_ignored(model: Path) -> None:
    core = make_core(model, simulated_tokens="echo")
    result = generate(core, [9, EOS, 7], max_tokens=4, ignore_eos=True)
    assert result.token_ids == [9, EOS, 7, EOS]
    assert result.finish_reason is FinishReason.LENGTH


def test_echo_needs_an_eos(tmp_path: Path) -> None:
    model = write_model(tmp_path, eos_token_id=None)
    with pytest.raises(ModelSourceError, match="no eos"):
        SimulatedExecutor(make_settings(model, simulated_tokens="echo"))


def test_presets_take_the_time_of_their_parts() -> None:
    h100, h200 = TIMINGS["h100"], TIMINGS["h200"]
    prefill = Step([entry(0, 1000)])
    decode = Step([entry(1000, 1) for _ in range(32)])
    assert h100.milliseconds(prefill) == pytest.approx(6.5 + 32.5)
    assert h100.milliseconds(decode) == pytest.approx(6.5 + 32 * 0.004 + 32_000 * 4.9e-5)
    assert h200.milliseconds(decode) < h100.milliseconds(decode)
    assert TIMINGS["instant"].milliseconds(decode) == 0


def test_a_step_waits_what_its_timing_says(model: Path) -> None:
    slept: list[float] = []
    executor = SimulatedExecutor(make_settings(model, simulated_step_ms=25.0), sleep=slept.append)
    executor.execute(Step([entry(0, 4)]))
    assert slept[0] == pytest.approx(0.025, abs=0.01)
    instant = SimulatedExecutor(make_settings(model), sleep=slept.append)
    instant.execute(Step([entry(0, 4)]))
    assert len(slept) == 1


def test_its_weights_are_nobody_elses(model: Path) -> None:
    fingerprints = {
        SimulatedExecutor(make_settings(model, simulated_tokens=kind)).description.fingerprint
        for kind in ("random", "echo")
    }
    assert len(fingerprints) == 2
    assert all(fingerprint.startswith("simulated-") for fingerprint in fingerprints)


def test_the_pool_is_sized_by_the_accelerator(model: Path) -> None:
    sizes = {
        name: SimulatedExecutor(
            make_settings(model, num_kv_blocks=None, simulated_accelerator=name, block_size=16)
        ).num_blocks
        for name in ("h100", "h200")
    }
    assert 20_000 < sizes["h100"] < sizes["h200"] < 100_000


def test_a_context_beyond_the_models_is_refused(model: Path) -> None:
    with pytest.raises(ModelSourceError, match="4097"):
        SimulatedExecutor(make_settings(model, max_model_len=4097))


def test_it_needs_neither_torch_nor_transformers(model: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; import services.engine.main, services.engine.executor.simulated as s;"
        "from services.engine.settings import EngineSettings;"
        f"s.SimulatedExecutor(EngineSettings(model={str(model)!r}));"
        "assert not {'torch', 'transformers', 'tokenizers', 'fastapi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bits_behind_the_vocabulary_are_no_tokens(tmp_path: Path) -> None:
    class Masks:
        def __init__(self, *ids: int) -> None:
            self._ids = ids

        def bitmask(self, rows: Sequence[int]) -> np.ndarray:
            bits = np.zeros(1024, dtype=np.uint8)
            bits[list(self._ids)] = 1
            return np.packbits(bits, bitorder="little").view(np.int32)[None].repeat(len(rows), 0)

    executor = SimulatedExecutor(make_settings(write_model(tmp_path, vocab_size=1000), simulated_accelerator="instant"))
    request = Request(RequestKey(b"peer", 1), [5, 6], 2, SamplingParams())
    grammar: Any = object()
    request.grammar = grammar
    for ids, expected in (((7, 1000), 7), ((1000, 1001), None)):
        masks: Any = Masks(*ids)
        sampled = executor.execute(Step([ScheduledRequest(request, 0, 2)], token_masks=masks))[0]
        assert sampled.token_id == expected
        assert (sampled.error is None) == (expected is not None)

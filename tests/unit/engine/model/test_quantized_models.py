"""Models with weights of 8 and 4 bits: the kernels beside PyTorch's operations, the same bits in any company, the
identity that frontends see, and refusals that say what to do."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import Driver, RecordingSampler, make_executor
from tiny_models import NATIVE, OTHERS, random_prompts, save_model

from services.engine.model.cpu_decoder import CpuDecoder
from services.engine.model.decoder import Decoder
from services.engine.model.errors import ModelLoadError
from services.engine.model.kernels import load_kernels

BITS = ("int8", "int4")


def quantized(folder: Path, quantization: str, **settings: Any) -> Any:
    return make_executor(folder, dtype="bfloat16", quantization=quantization, **settings)


def scored(folder: Path, quantization: str, *, use_kernels: bool = True) -> torch.Tensor:
    """The logits after each token of two prompts."""
    sampler = RecordingSampler()
    executor = quantized(folder, quantization, sampler=sampler, use_kernels=use_kernels)
    Driver(executor).run(random_prompts([23, 40]), max_tokens=1, score_prompts=True)
    return torch.cat([sampler.logits[i][position][None].float() for i in (0, 1) for position in sampler.logits[i]])


@pytest.mark.parametrize("name", list(NATIVE))
def test_kernels_and_pytorch_compute_the_same_model(name: str, tmp_path: Path) -> None:
    if load_kernels() is None:
        pytest.skip("no C compiler here")
    save_model(NATIVE[name](), tmp_path)
    exact = scored(tmp_path, "none")
    errors: list[float] = []
    for quantization in BITS:
        ours, theirs = scored(tmp_path, quantization), scored(tmp_path, quantization, use_kernels=False)
        # Both round to bf16 again and again; which weights they have makes more of a difference.
        assert (ours - theirs).std() < 0.06 * exact.std()
        errors.append(((ours - exact).std() / exact.std()).item())
    assert errors[0] < 0.1
    assert errors[0] < errors[1] < 0.7


@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral-window"])
def test_a_request_gets_the_same_bits_alone_and_in_company(name: str, quantization: str, tmp_path: Path) -> None:
    if load_kernels() is None:
        pytest.skip("no C compiler here")
    save_model(NATIVE[name](), tmp_path)
    sampler = RecordingSampler()
    executor = quantized(tmp_path, quantization, sampler=sampler)
    assert isinstance(executor.loaded.model, CpuDecoder)
    prompts = random_prompts([1, 2, 18, 33, 50])

    def logits(batches: list[list[list[int]]], **driver: Any) -> list[dict[int, torch.Tensor]]:
        seen: list[dict[int, torch.Tensor]] = []
        for batch in batches:
            sampler.logits = {}
            Driver(executor, **driver).run(batch, max_tokens=8)
            seen += [sampler.logits[i] for i in range(len(batch))]
        return seen

    alone = logits([[prompt] for prompt in prompts])
    for other in (
        logits([prompts]),
        logits([prompts], budget=9),
        logits([prompts], budget=16, preempt_every=5),
        logits([prompts], budget=16, preempt_every=5, share_prefixes=True),
    ):
        for a, b in zip(alone, other, strict=True):
            assert a.keys() == b.keys()
            for position in a:
                assert torch.equal(a[position], b[position])


def test_weights_take_a_half_and_little_more_than_a_third_of_the_room(tmp_path: Path) -> None:
    if load_kernels() is None:
        pytest.skip("no C compiler here")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 128}
    config = NATIVE["llama"]()
    config.update(sizes)
    save_model(config, tmp_path)
    none, eight, four = (quantized(tmp_path, each).loaded.model.weight_bytes for each in ("none", *BITS))
    assert eight < 0.52 * none
    assert four < 0.4 * none


def test_weights_that_are_rounded_otherwise_have_another_identity(tmp_path: Path) -> None:
    save_model(NATIVE["llama"](), tmp_path)
    names = {each: quantized(tmp_path, each).description.fingerprint for each in ("none", *BITS)}
    assert len(set(names.values())) == 3
    # With a compiler and without, one model.
    assert quantized(tmp_path, "int4", use_kernels=False).description.fingerprint == names["int4"]
    assert quantized(tmp_path, "int4").description.fingerprint == names["int4"]


def test_a_processor_with_matrix_units_takes_the_kernels_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if load_kernels() is None:
        pytest.skip("no C compiler here")
    save_model(NATIVE["llama"](), tmp_path)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert isinstance(quantized(tmp_path, "int8").loaded.model, CpuDecoder)


def test_without_a_compiler_it_runs_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(NATIVE["llama"](), tmp_path)
    monkeypatch.setattr("services.engine.model.loader.load_kernels", lambda: None)
    with caplog.at_level(logging.WARNING):
        executor = quantized(tmp_path, "int4")
    assert isinstance(executor.loaded.model, Decoder)
    assert "rounded to int4 all the same, but save neither memory nor time" in caplog.text
    assert len(Driver(executor).run(random_prompts([7]), max_tokens=4)[0]) == 4


def test_what_cannot_be_quantized_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(OTHERS["gpt2"](), tmp_path / "gpt2")
    save_model(NATIVE["llama"](), tmp_path / "llama")
    with pytest.raises(ModelLoadError, match=r"native decoder covers of llama.*for this gpt2 model"):
        quantized(tmp_path / "gpt2", "int8")
    with pytest.raises(ModelLoadError, match="would run in float32: pass --dtype bfloat16"):
        make_executor(tmp_path / "llama", quantization="int4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelLoadError, match="works on CPUs only: leave it out on a GPU, or pass --device cpu"):
        quantized(tmp_path / "llama", "int8", device="cuda")

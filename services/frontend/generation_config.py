"""What a model's generation_config.json says of sampling: the defaults of requests that leave a field out, as in vLLM.

Its eos ids are the engine's. main.py loads it; http/sampling.py applies it.
"""

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.model_source import ModelSourceError, read_json

logger = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"


class GenerationConfigError(ValueError):
    """The file is wrong, or there is none where one was named; the message says which."""


class SamplingDefaults(BaseModel):
    """The fields that vLLM takes over. `max_new_tokens` is a limit of every request and no default."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    max_new_tokens: int | None = Field(default=None, ge=1)

    def limited(self, max_tokens: int) -> int:
        return max_tokens if self.max_new_tokens is None else min(max_tokens, self.max_new_tokens)


def load_sampling_defaults(source: str, model: str, revision: str | None = None) -> SamplingDefaults:
    """`source` as vLLM's --generation-config: "auto" (the model's own file, if it has one), "vllm" (none), or a folder.

    Raises GenerationConfigError.
    """
    if source == "vllm":
        return SamplingDefaults()
    path = _find(model, revision) if source == "auto" else Path(source).expanduser() / FILE_NAME
    if path is None:
        return SamplingDefaults()
    defaults = _read(path)
    if defaults != SamplingDefaults():
        given = {name: getattr(defaults, name) for name in sorted(defaults.model_fields_set)}
        logger.info("Sampling defaults of %s: %s (--generation-config vllm leaves them out)", path, given)
    return defaults


def _find(model: str, revision: str | None) -> Path | None:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder / FILE_NAME if (folder / FILE_NAME).is_file() else None
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]

    try:
        return Path(hf_hub_download(model, FILE_NAME, revision=revision))
    except Exception as error:  # the model has none, or the hub cannot be reached: the tokenizer came from its cache
        logger.info("%s has no %s that can be had: %s", model, FILE_NAME, str(error).split("\n")[0])
        return None


def _read(path: Path) -> SamplingDefaults:
    try:
        content = read_json(path)
    except ModelSourceError as error:
        raise GenerationConfigError(str(error)) from error
    # Some files write null for what they do not set.
    given = {name: value for name, value in content.items() if value is not None}
    try:
        return SamplingDefaults.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Input ")
        raise GenerationConfigError(
            f"{path}: {name} {message}, not {first['input']!r}; mend it, or leave it out with --generation-config vllm"
        ) from error

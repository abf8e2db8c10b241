"""Settings that both services have, and how they are read: flags, then TANDEM_… variables, then defaults."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

Values = TypeVar("Values")


def _split(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"begins as a JSON list and is none: {error}") from error
    return [part.strip() for part in value.split(",")] if value.strip() else []


# A list whose variable is written as plain words, first,second, or as a JSON list (for words with a comma in them).
# As a flag it may also be given several times.
CommaSeparated = Annotated[Values, NoDecode, BeforeValidator(_split)]


class ServiceSettings(BaseSettings):
    """The base of every service's one settings class. Field names are the flags' and the variables' names."""

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_",
        env_nested_delimiter="__",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        extra="ignore",
        protected_namespaces=(),
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least serious log line shown."
    )
    link_keys: Path | None = Field(
        None,
        description="A folder of keys (see tandem keygen): the link is encrypted, and lets in only who has one.",
    )


class ModelSettings(BaseSettings):
    """Which model, and under which names clients ask for it."""

    model: str = Field("", description="A local folder, or a name on the Hugging Face hub.")
    revision: str | None = Field(None, description="The hub's branch, tag or commit.")
    served_model_name: CommaSeparated[list[str]] = Field(
        default_factory=list,
        description="Names that clients use; the model's own by default. The first is answered.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that the model's repository carries.")

"""Settings that both services have, and how they are read: flags, then TANDEM_… variables, then defaults."""

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


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


class ModelSettings(BaseSettings):
    """Which model, and under which names clients ask for it."""

    model: str = Field("", description="A local folder, or a name on the Hugging Face hub.")
    revision: str | None = Field(None, description="The hub's branch, tag or commit.")
    served_model_name: list[str] = Field(
        default_factory=list,
        description="Names that clients use; the model's own by default. The first is answered.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that the model's repository carries.")

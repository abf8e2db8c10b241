"""The settings of `tandem top`."""

from typing import Annotated

from pydantic import Field, StringConstraints
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.settings import CommaSeparated, ServiceSettings

BaseUrl = Annotated[str, StringConstraints(pattern=r"^https?://[^/?#]+(/[^?#]*)?$")]


class TopSettings(BaseSettings):
    """A live view of a running deployment. Every frontend knows all engines; figures of requests are of the frontends
    that are named."""

    model_config = SettingsConfigDict(**(ServiceSettings.model_config | {"env_prefix": "TANDEM_TOP_"}))

    url: CommaSeparated[list[BaseUrl]] = Field(
        default_factory=lambda: ["http://127.0.0.1:8000"],
        min_length=1,
        description="Frontends, as http://host:port; several are added up.",
    )
    api_key: str | None = Field(None, description="A key that the frontends take, where they demand one.")
    interval: float = Field(2.0, ge=0.2, le=3600, description="Seconds between two looks.")
    window: float = Field(30.0, ge=1, le=86400, description="Seconds that rates and latencies are of.")
    once: bool = Field(False, description="Look twice, print, and end; so it is where the output is no terminal.")

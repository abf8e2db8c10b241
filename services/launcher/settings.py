"""The settings of `tandem serve`: those of both services, and how many of each to start."""

import os
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, CliSuppress

from services.engine.settings import EngineSettings
from services.frontend.settings import FrontendSettings, ServedModel
from services.launcher.environment import PREFIX, as_variables
from shared.settings import CommaSeparated

DECIDED_BY_LAUNCHER = (
    "discovery",
    "engine_addresses",
    "engine_service",
    "engine_namespace",
    "engine_port_name",
    "models",
    "link_host",
    "listen_fd",
    "workers",
)


class ServeSettings(FrontendSettings, EngineSettings):
    """Frontends and engines as processes of this machine. With no --model, SmolLM2-135M-Instruct is served."""

    frontends: int = Field(1, ge=1, le=64, description="Frontend processes; they share the port.")
    engines: int = Field(1, ge=1, le=64, description="Engine processes; the CPU's cores are divided among them.")

    trace: Literal["console"] | None = Field(
        None, description="console: print what each request did, and how long each part of it took, as a tree."
    )

    # The launcher decides these.
    discovery: CliSuppress[str] = "static"  # pyright: ignore[reportIncompatibleVariableOverride]
    engine_addresses: CliSuppress[CommaSeparated[list[str]]] = Field(default_factory=list)
    engine_service: CliSuppress[str] = ""
    engine_namespace: CliSuppress[str] = ""
    engine_port_name: CliSuppress[str] = "link"
    models: CliSuppress[list[ServedModel]] = Field(default_factory=list)
    link_host: CliSuppress[str] = "127.0.0.1"
    listen_fd: CliSuppress[int | None] = None
    workers: CliSuppress[int] = 1

    @model_validator(mode="after")
    def _refuse_what_the_launcher_decides(self) -> Self:
        for name in DECIDED_BY_LAUNCHER:
            if name in self.model_fields_set:
                flag = f"--{name.replace('_', '-')} (or {PREFIX}{name.upper()})"
                raise ValueError(f"{flag} is not for tandem serve, which decides it; use tandem frontend and engine")
        for name in ("link_port", "probe_port"):
            if getattr(self, name) and getattr(self, name) + self.engines - 1 > 65535:
                raise ValueError(f"--{name.replace('_', '-')} leaves no room for {self.engines} engines below 65536")
        return self


def child_environment(
    settings: ServeSettings, service: type[BaseSettings], overrides: dict[str, Any]
) -> dict[str, str]:
    """The environment of one child: ours, with what was set for its service, and `overrides` above all."""
    given = settings.model_fields_set & service.model_fields.keys()
    values = settings.model_dump(mode="json", include=given) | overrides
    ours = {PREFIX + name.upper() for name in ServeSettings.model_fields}
    environment = {name: value for name, value in os.environ.items() if name.upper() not in ours}
    return environment | as_variables(values)

"""Writes the tables of docs/configuration.md from the settings classes: `make docs`. A test holds them together."""

import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from services.engine.settings import EngineSettings
from services.frontend.settings import FrontendSettings
from services.launcher.settings import ServeSettings
from services.top.settings import TopSettings

DOCUMENT = Path(__file__).with_name("configuration.md")
_START, _END = "<!-- generated: {} -->", "<!-- end -->"


def with_tables(document: str) -> str:
    """The document with every table made anew. Raises ValueError where a place for one is missing."""
    both = FrontendSettings.model_fields.keys() & EngineSettings.model_fields.keys()
    own_of_serve = (
        ServeSettings.model_fields.keys() - FrontendSettings.model_fields.keys() - EngineSettings.model_fields.keys()
    )
    places: dict[str, tuple[type[BaseSettings], set[str]]] = {
        "both": (EngineSettings, set(both)),
        "frontend": (FrontendSettings, FrontendSettings.model_fields.keys() - both),
        "engine": (EngineSettings, EngineSettings.model_fields.keys() - both),
        "serve": (ServeSettings, set(own_of_serve)),
        "top": (TopSettings, set(TopSettings.model_fields)),
    }
    for name, (settings, fields) in places.items():
        before, found, rest = document.partition(_START.format(name))
        _, ended, after = rest.partition(_END)
        if not found or not ended:
            raise ValueError(f"{DOCUMENT.name} has no place for the table {name!r}")
        document = f"{before}{found}\n{_table(settings, fields)}\n{ended}{after}"
    return document


def _table(settings: type[BaseSettings], names: set[str]) -> str:
    prefix = settings.model_config.get("env_prefix", "")
    lines = ["| flag and variable | value | default | what it does |", "|---|---|---|---|"]
    for name, field in settings.model_fields.items():
        if name in names:
            flag = f"`--{name.replace('_', '-')}`<br>`{prefix}{name.upper()}`"
            lines.append(
                f"| {flag} | {_value(field.annotation)} | {_default(name, field)} | {_description(name, field)} |"
            )
    return "\n".join(lines)


def _value(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return _value(next(choice for choice in arguments if choice is not type(None)))
    if origin in (list, tuple):
        return f"list of {_value(arguments[0])}"
    if origin is typing.Annotated:
        return _value(arguments[0])
    words = {bool: "yes or no", int: "whole number", float: "number", str: "text", Path: "path"}
    return words.get(annotation, "JSON object")


def _description(name: str, field: FieldInfo) -> str:
    services = {"frontend": FrontendSettings, "engine": EngineSettings}
    texts = {
        key: service.model_fields[name].description for key, service in services.items() if name in service.model_fields
    }
    if len(set(texts.values())) < 2:
        return field.description or ""
    return "<br>".join(f"{key}: {text}" for key, text in texts.items())


def _default(name: str, field: FieldInfo) -> str:
    if name in ("heartbeat_timeout", "shutdown_grace"):
        values = [service.model_fields[name].default for service in (FrontendSettings, EngineSettings)]
        if values[0] != values[1]:
            return f"`{values[0]:g}` (frontend), `{values[1]:g}` (engine)"
    default = field.get_default(call_default_factory=True) if field.default_factory else field.default  # type: ignore[call-arg]
    if default in (None, "", PydanticUndefined) or default == []:
        return ""
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, list | tuple):
        return ", ".join(f"`{part}`" for part in default)
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def main() -> int:
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes what the services' settings classes accept into the chart's values.schema.json.

`engine.settings` and `frontend.settings` take any field of EngineSettings and FrontendSettings but those that the chart
sets itself from other values. `python -m tests.chart.settings_schema` brings the schema up to date; a test compares.
"""

import json
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings

from services.engine.settings import EngineSettings
from services.frontend.settings import FrontendSettings

SCHEMA = Path(__file__).parents[2] / "charts/tandem/values.schema.json"

# Fields that templates set, each from a value of its own, or that only mean something outside a pod.
SET_BY_CHART = {
    "model",
    "revision",
    "served_model_name",
    "shutdown_grace",
    "link_keys",
    "ready_file",
}
FRONTEND_SET_BY_CHART = SET_BY_CHART | {
    "host",
    "port",
    "models",
    "discovery",
    "engine_addresses",
    "engine_service",
    "engine_namespace",
    "engine_port_name",
    "reasoning_parser",
    "tool_call_parser",
    "chat_template",
    "listen_fd",
    "api_key",
    "api_key_file",
    "drain_delay",
}
ENGINE_SET_BY_CHART = SET_BY_CHART | {"link_host", "link_port", "probe_host", "probe_port", "device"}


def fields_schema(settings: type[BaseSettings], without: set[str]) -> dict[str, Any]:
    """The JSON schema of a settings class's fields that a user of the chart may set."""
    schema = settings.model_json_schema()
    properties = {name: field for name, field in schema["properties"].items() if name not in without}
    for field in properties.values():
        # Defaults stay in the services: an unset value here must not pin them.
        field.pop("default", None)
        field.pop("title", None)
    if "$ref" in json.dumps(properties):
        raise ValueError(f"a field of {settings.__name__} is a model; give it a value of its own in the chart")
    return {"type": "object", "additionalProperties": False, "properties": properties}


def with_settings(schema: dict[str, Any]) -> dict[str, Any]:
    """The chart's schema with both settings definitions made anew."""
    definitions = {
        **schema["definitions"],
        "engineSettings": fields_schema(EngineSettings, ENGINE_SET_BY_CHART),
        "frontendSettings": fields_schema(FrontendSettings, FRONTEND_SET_BY_CHART),
    }
    return {**schema, "definitions": definitions}


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(with_settings(json.loads(SCHEMA.read_text())), indent=2) + "\n")

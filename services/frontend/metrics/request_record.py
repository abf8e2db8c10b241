"""What becomes known of one HTTP request on its way, for the metrics and for its line in the access log."""

import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from services.frontend.http.choices import Choices
from services.frontend.http.usage import Usage

_RECORD = "tandem.record"  # where it is in the ASGI scope


@dataclass(slots=True)
class Generated:
    """The part of a request that engines have a share in. `operation` and `model` as OpenTelemetry names them; the
    model is the name that the client used, one of those that the frontend is configured with."""

    operation: str
    model: str
    choices: Choices
    usage: Usage

    @property
    def first_output_at(self) -> float:
        """When the first output of any choice was here, in seconds of time.perf_counter; 0 where none was."""
        return min((each.first_output_at for each in self.choices.generations if each.first_output_at), default=0.0)

    @property
    def completion_tokens(self) -> int:
        return sum(self.usage.by_choice)

    @property
    def finish_reasons(self) -> list[str]:
        return [reason.name.lower() for reason in self.choices.finish_reasons]

    def seconds_per_token(self) -> list[float]:
        """Of each finished choice with more than one token, the mean time of those after the first."""
        return [
            (each.finished_at - each.first_output_at) / (tokens - 1)
            for each, tokens in zip(self.choices.generations, self.usage.by_choice, strict=True)
            if tokens > 1 and each.finished_at and each.first_output_at
        ]


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request. `started` in seconds of time.perf_counter."""

    started: float = field(default_factory=time.perf_counter)
    generated: Generated | None = None


def begin_record(scope: MutableMapping[str, Any]) -> RequestRecord:
    record = scope[_RECORD] = RequestRecord()
    return record


def generates(scope: MutableMapping[str, Any], operation: str, model: str, choices: Choices, usage: Usage) -> None:
    """The request is in order, and its choices go to the engines."""
    record: RequestRecord | None = scope.get(_RECORD)
    if record is not None:
        record.generated = Generated(operation, model, choices, usage)

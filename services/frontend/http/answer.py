"""What chat and text completions have in common on their way out: the answer's head, and how chunks are framed."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.frontend.http.errors import ApiError
from services.frontend.http.json_bytes import json_bytes
from services.frontend.output.collector import Delta
from shared.protocol import FinishReason

DONE = b"data: [DONE]\n\n"

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
# Of the choices of a stream that an error ends, as vLLM says it.
FAILED = b'"error"'


@dataclass(slots=True)
class AnswerHead:
    """What every chunk of one answer repeats. `prefix` is chatcmpl or cmpl."""

    prefix: str
    kind: str
    model: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}

    def chunk_prefix(self) -> bytes:
        """A chunk up to where its choices begin, made once: afterwards only what is new is serialised."""
        return b"data: " + json_bytes(self.as_json())[:-1] + b","


class Chunks(Protocol):
    """Makes the chunks of one stream, as bytes that may be sent in one write."""

    def write(self, deltas: list[tuple[int, Delta]]) -> bytes:
        """The chunks of what is new, each choice's finish included."""
        ...

    def fail(self) -> bytes:
        """The finish reason `error` of every choice that has none yet; the error itself follows."""
        ...

    def end(self) -> bytes:
        """What follows the last choice's end, before [DONE]: the usage, if asked."""
        ...


def error_chunk(error: ApiError) -> bytes:
    """An error after the first byte."""
    return b"data: " + json_bytes(error.body()) + b"\n\n"

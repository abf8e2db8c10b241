"""Chat completions on their way out: chunks of a stream, and the whole answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.frontend.http.answer import FAILED, FINISH_REASONS, AnswerHead
from services.frontend.http.json_bytes import json_bytes
from services.frontend.http.logprobs import LogprobFormat
from services.frontend.http.usage import Usage
from services.frontend.output.collector import Delta
from services.frontend.output.tools import ToolCallDelta
from shared.protocol import FinishReason

# A chunk of text after the text.
_CLOSING = b'},"logprobs":null,"finish_reason":null}]}\n\n'


def _has_more_than_text(delta: Delta) -> bool:
    return bool(delta.reasoning or delta.tool_calls or delta.logprobs)


@dataclass(slots=True)
class ChatAnswer:
    """How one request's chat answer is written. `reasoning_fields` is empty where the client wants no reasoning;
    `echo` is text that the answer begins with; `prompt_token_ids` is set where token ids were asked for."""

    head: AnswerHead
    num_choices: int
    usage: Usage
    logprobs: LogprobFormat
    prompt_logprobs: LogprobFormat
    reasoning_fields: Sequence[str]
    splits_reasoning: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: str = ""
    prompt_token_ids: list[int] | None = None

    def whole(self, deltas: dict[int, Delta]) -> dict[str, Any]:
        """The answer that is not streamed, from each choice's one merged delta."""
        for index, delta in deltas.items():
            self.usage.add(index, delta)
        answer = {
            **self.head.as_json(),
            "choices": [self._choice(index, deltas[index]) for index in range(self.num_choices)],
            "usage": self.usage.as_json(),
        }
        if (prompt_logprobs := deltas[0].prompt_logprobs) is not None:
            answer["prompt_logprobs"] = self.prompt_logprobs.prompt(prompt_logprobs)
        if self.prompt_token_ids is not None:
            answer["prompt_token_ids"] = self.prompt_token_ids
        return answer

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        content: str | None = self.echo + delta.content
        if not content and (self.splits_reasoning or delta.tool_calls):
            content = None  # it only thought, was cut off while thinking, or only called tools
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        for name in self.reasoning_fields:
            message[name] = delta.reasoning or None
        if delta.tool_calls:
            message["tool_calls"] = [_whole_call(call) for call in delta.tool_calls]
        choice = {
            "index": index,
            "message": message,
            "logprobs": None if delta.logprobs is None else self.logprobs.chat(delta.logprobs),
            "finish_reason": None if delta.finish_reason is None else _finish_reason(delta, delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        if self.prompt_token_ids is not None:
            choice["token_ids"] = delta.token_ids
        return choice


@dataclass(slots=True)
class ChatChunks:
    """The chunks of one streamed chat answer."""

    answer: ChatAnswer
    _prefix: bytes = b""
    _reasoning_keys: list[bytes] = field(default_factory=list)
    _openings: dict[int, bytes] = field(default_factory=dict)
    _only_text: bool = False  # a chunk with new text has nothing else that is new
    _begun: bool = False
    _unfinished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._unfinished = set(range(self.answer.num_choices))
        self._prefix = self.answer.head.chunk_prefix()
        self._reasoning_keys = [json_bytes(name) + b":" for name in self.answer.reasoning_fields]
        self._only_text = self.answer.prompt_token_ids is None and not self.answer.continuous_usage

    def write(self, deltas: list[tuple[int, Delta]]) -> bytes:
        chunks: list[bytes] = []
        for index, delta in deltas:
            self.answer.usage.add(index, delta)
        if not self._begun:
            self._begun = True
            self._begin(chunks)
        for index, delta in deltas:
            if self._only_text and delta.finish_reason is None and not _has_more_than_text(delta):
                # Nearly every chunk of nearly every stream.
                if delta.content:
                    chunks += (self._opening(index), json_bytes(delta.content), _CLOSING)
            else:
                self._write_choice(chunks, index, delta)
        return b"".join(chunks)

    def _opening(self, index: int) -> bytes:
        """A chunk of text up to the text."""
        opening = self._openings.get(index)
        if opening is None:
            opening = self._openings[index] = self._prefix + b'"choices":[{"index":%d,"delta":{"content":' % index
        return opening

    def fail(self) -> bytes:
        chunks: list[bytes] = []
        for index in sorted(self._unfinished):
            self._chunk(chunks, index, b"{}", finish=FAILED)
        return b"".join(chunks)

    def end(self) -> bytes:
        if not self.answer.include_usage:
            return b""
        return b"".join((self._prefix, b'"choices":[],"usage":', json_bytes(self.answer.usage.as_json()), b"}\n\n"))

    def _begin(self, chunks: list[bytes]) -> None:
        prompt = b""
        if self.answer.prompt_token_ids is not None:
            prompt = b',"prompt_token_ids":' + json_bytes(self.answer.prompt_token_ids)
        for index in range(self.answer.num_choices):
            content = json_bytes(self.answer.echo)
            self._chunk(chunks, index, b'{"role":"assistant","content":' + content + b"}", after=prompt)
            prompt = b""

    def _write_choice(self, chunks: list[bytes], index: int, delta: Delta) -> None:
        logprobs = b"null"
        if delta.logprobs:
            logprobs = json_bytes(self.answer.logprobs.chat(delta.logprobs))
        ids = b""
        if self.answer.prompt_token_ids is not None and delta.token_ids:
            ids = b',"token_ids":' + json_bytes(delta.token_ids)
        has_details = bool(delta.logprobs) or bool(ids)
        if delta.reasoning and self._reasoning_keys:
            text = json_bytes(delta.reasoning)
            body = b"{" + b",".join([key + text for key in self._reasoning_keys]) + b"}"
            # What belongs to the delta as a whole goes with its last chunk.
            last = not delta.content and not delta.tool_calls
            self._chunk(chunks, index, body, logprobs if last else b"null", ids if last else b"")
            has_details = has_details and not last
        if delta.content or (has_details and not delta.tool_calls):
            body = b'{"content":' + json_bytes(delta.content) + b"}"
            last = not delta.tool_calls
            self._chunk(chunks, index, body, logprobs if last else b"null", ids if last else b"")
        if delta.tool_calls:
            body = json_bytes({"tool_calls": [_call_delta(call) for call in delta.tool_calls]})
            self._chunk(chunks, index, body, logprobs, ids)
        if delta.finish_reason is not None:
            self._unfinished.discard(index)
            finish = b'"%b"' % _finish_reason(delta, delta.finish_reason).encode()
            stop_reason = b',"stop_reason":' + json_bytes(delta.stop_reason)
            self._chunk(chunks, index, b"{}", extra=stop_reason, finish=finish)

    def _chunk(
        self,
        chunks: list[bytes],
        index: int,
        delta: bytes,
        logprobs: bytes = b"null",
        extra: bytes = b"",
        finish: bytes = b"null",
        after: bytes = b"",
    ) -> None:
        chunks += (
            self._prefix,
            b'"choices":[{"index":%d,"delta":' % index,
            delta,
            b',"logprobs":',
            logprobs,
            b',"finish_reason":',
            finish,
            extra,
            b"}]",
            after,
        )
        if self.answer.continuous_usage:
            chunks += (b',"usage":', json_bytes(self.answer.usage.as_json()))
        chunks.append(b"}\n\n")


def _finish_reason(delta: Delta, reason: FinishReason) -> str:
    return "tool_calls" if delta.called_tools else FINISH_REASONS[reason]


def _whole_call(call: ToolCallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """A call's id, type and name are in its first delta only."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(call)}

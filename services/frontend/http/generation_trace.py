"""What a request's trace says of its generation, under OpenTelemetry's names (gen_ai.…): asked, made, and written.

Where a request is sampled, its sinks and its answer are wrapped, to be counted and timed; others run as they are.
"""

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from services.frontend.generation import GenerationError, TokenSink
from services.frontend.http.answer import FINISH_REASONS, Chunks
from services.frontend.http.schemas.chat import ChatCompletionRequest
from services.frontend.http.schemas.completion import CompletionRequest
from services.frontend.http.usage import Usage
from services.frontend.output.collector import Delta
from services.frontend.tracing import RequestTrace
from shared.protocol import RequestOutput
from shared.sampling_params import SamplingParams
from shared.tracing import Attributes

PROVIDER = "tandem"
# Of one text, and of a request's messages: a trace is no archive, even where texts are recorded.
MAX_TEXT_CHARACTERS = 32_768
MAX_MESSAGES = 256

Whole = Callable[[dict[int, Delta]], dict[str, Any]]


class GenerationRecord:
    """One request's generation. `model` is the name that it is answered under; `usage` is counted by the answer."""

    def __init__(
        self,
        trace: RequestTrace,
        request: ChatCompletionRequest | CompletionRequest,
        model: str,
        sampling: SamplingParams,
    ) -> None:
        self.usage: Usage | None = None
        self._trace = trace
        self._request = request
        self._model = model
        self._sampling = sampling
        self._began = 0  # to be written, in Unix nanoseconds
        self._last_written = 0
        self._num_chunks = 0
        self._num_bytes = 0
        self._detokenize_ns = 0
        self._finish_reasons: dict[int, str] = {}
        self._texts: dict[int, _Texts] = {}
        trace.details.append(self._describe)

    def sink(self, sink: TokenSink) -> TokenSink:
        return _TimedSink(sink, self) if self._trace.sampled else sink

    def chunks(self, chunks: Chunks) -> Chunks:
        return _CountedChunks(chunks, self) if self._trace.sampled else chunks

    def whole(self, whole: Whole) -> Whole:
        if not self._trace.sampled:
            return whole

        def counted(deltas: dict[int, Delta]) -> dict[str, Any]:
            self._began = time.time_ns()
            self.take(deltas.items())
            return whole(deltas)

        return counted

    def took(self, nanoseconds: int) -> None:
        """So long the output of a step was made into text."""
        self._detokenize_ns += nanoseconds

    def take(self, deltas: Iterable[tuple[int, Delta]]) -> None:
        """What is about to be written."""
        for index, delta in deltas:
            if delta.finish_reason is not None:
                self._finish_reasons[index] = FINISH_REASONS.get(delta.finish_reason, delta.finish_reason.name.lower())
            if self._trace.content:
                self._texts.setdefault(index, _Texts()).add(delta)

    def written(self, frames: bytes) -> bytes:
        if frames:
            self._last_written = time.time_ns()
            self._began = self._began or self._last_written
            self._num_chunks += 1
            self._num_bytes += len(frames)
        return frames

    def _describe(self) -> None:
        trace, request = self._trace, self._request
        is_chat = isinstance(request, ChatCompletionRequest)
        trace.attributes |= {
            "gen_ai.operation.name": "chat" if is_chat else "text_completion",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": request.model or self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.stream": bool(request.stream),
            **_asked(self._sampling, request.n or 1),
            **_used(self.usage),
        }
        if trace.error is not None:
            trace.attributes["error.type"] = str(trace.error_status)
        if self._finish_reasons:
            trace.attributes["gen_ai.response.finish_reasons"] = [
                self._finish_reasons[index] for index in sorted(self._finish_reasons)
            ]
        if trace.content and trace.sampled:
            trace.attributes["gen_ai.input.messages"] = json.dumps(_input_messages(request), ensure_ascii=False)
            trace.attributes["gen_ai.output.messages"] = json.dumps(self._output_messages(), ensure_ascii=False)
        if self._began:
            self._describe_answer()

    def _describe_answer(self) -> None:
        attributes: Attributes = {"tandem.detokenize.seconds": self._detokenize_ns / 1e9}
        if not self._request.stream:
            self._trace.new_span("respond", self._began, attributes)
            return
        self._trace.attributes["gen_ai.response.time_to_first_chunk"] = (self._began - self._trace.started) / 1e9
        attributes |= {"tandem.stream.writes": self._num_chunks, "tandem.stream.bytes": self._num_bytes}
        self._trace.new_span("stream", self._began, attributes, end=self._last_written)

    def _output_messages(self) -> list[dict[str, Any]]:
        return [
            {
                "role": "assistant",
                "parts": self._texts[index].parts(),
                "finish_reason": self._finish_reasons.get(index, "error"),
            }
            for index in sorted(self._texts)[:MAX_MESSAGES]
        ]


class _TimedSink:
    """A TokenSink that measures how long the one behind it takes: detokenizer, stop strings, parsers."""

    def __init__(self, sink: TokenSink, record: GenerationRecord) -> None:
        self._sink = sink
        self._record = record

    def accept(self, output: RequestOutput) -> bool:
        began = time.perf_counter_ns()
        over = self._sink.accept(output)
        self._record.took(time.perf_counter_ns() - began)
        return over

    def fail(self, error: GenerationError) -> None:
        self._sink.fail(error)


class _CountedChunks:
    """Chunks that are counted on their way out."""

    def __init__(self, chunks: Chunks, record: GenerationRecord) -> None:
        self._chunks = chunks
        self._record = record

    def write(self, deltas: list[tuple[int, Delta]]) -> bytes:
        self._record.take(deltas)
        return self._record.written(self._chunks.write(deltas))

    def fail(self) -> bytes:
        return self._chunks.fail()

    def end(self) -> bytes:
        return self._chunks.end()


class _Texts:
    """One choice's texts, as far as a trace keeps them."""

    def __init__(self) -> None:
        self._content = ""
        self._reasoning = ""

    def add(self, delta: Delta) -> None:
        self._content = (self._content + delta.content)[:MAX_TEXT_CHARACTERS]
        self._reasoning = (self._reasoning + delta.reasoning)[:MAX_TEXT_CHARACTERS]

    def parts(self) -> list[dict[str, str]]:
        parts = [{"type": "reasoning", "content": self._reasoning}, {"type": "text", "content": self._content}]
        return [part for part in parts if part["content"]]


def _asked(sampling: SamplingParams, n: int) -> Attributes:
    asked: Attributes = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
    }
    if sampling.top_k:
        asked["gen_ai.request.top_k"] = sampling.top_k
    if sampling.frequency_penalty:
        asked["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    if sampling.presence_penalty:
        asked["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    if n != 1:
        asked["gen_ai.request.choice.count"] = n
    return asked


def _used(usage: Usage | None) -> Attributes:
    if usage is None:
        return {}
    counts = usage.as_json()
    used: Attributes = {
        "gen_ai.usage.input_tokens": counts["prompt_tokens"],
        "gen_ai.usage.output_tokens": counts["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": counts["prompt_tokens_details"]["cached_tokens"],
    }
    details = counts.get("completion_tokens_details")
    if details is not None:
        used["gen_ai.usage.reasoning.output_tokens"] = details["reasoning_tokens"]
    return used


def _input_messages(request: ChatCompletionRequest | CompletionRequest) -> list[dict[str, Any]]:
    if isinstance(request, ChatCompletionRequest):
        texts = [(message.role, message.content or "") for message in request.messages[-MAX_MESSAGES:]]
    else:
        texts = [("user", prompt) for prompt in request.prompt[:MAX_MESSAGES] if isinstance(prompt, str)]
    return [{"role": role, "parts": [{"type": "text", "content": text[:MAX_TEXT_CHARACTERS]}]} for role, text in texts]

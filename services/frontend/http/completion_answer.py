"""Text completions on their way out: chunks of a stream, and the whole answer."""

from dataclasses import dataclass, field
from typing import Any

from services.frontend.http.answer import FAILED, FINISH_REASONS, AnswerHead
from services.frontend.http.json_bytes import json_bytes
from services.frontend.http.logprobs import CompletionLogprobs, LogprobFormat, joined
from services.frontend.http.usage import Usage
from services.frontend.output.collector import Delta
from services.frontend.tokenizer import Tokenizer

# A chunk of text after the text.
_CLOSING = b',"logprobs":null,"finish_reason":null}]}\n\n'


@dataclass(slots=True)
class EchoedPrompt:
    """One prompt of the request; `text` is empty where it is not echoed."""

    token_ids: list[int]
    text: str = ""


@dataclass(slots=True)
class CompletionAnswer:
    """How one request's completions are written. Choice i belongs to prompt i // choices_per_prompt."""

    head: AnswerHead
    prompts: list[EchoedPrompt]
    choices_per_prompt: int
    usage: Usage
    tokenizer: Tokenizer
    logprobs: LogprobFormat
    prompt_logprobs: LogprobFormat
    hidden_token_ids: frozenset[int]
    echo: bool = False
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    wants_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    _by_choice: list[CompletionLogprobs] = field(default_factory=list)
    _begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._by_choice = [
            CompletionLogprobs(self.logprobs, self.tokenizer, self.hidden_token_ids, begins_text=self.echo)
            for _ in range(self.num_choices)
        ]

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.choices_per_prompt

    def prompt_of(self, index: int) -> EchoedPrompt:
        return self.prompts[index // self.choices_per_prompt]

    def text_and_logprobs(self, index: int, delta: Delta) -> tuple[str, dict[str, Any] | None]:
        """A delta's text and logprobs, the echoed prompt before a choice's first."""
        begins = self.echo and index not in self._begun
        self._begun.add(index)
        text = self.prompt_of(index).text + delta.content if begins else delta.content
        if not self.wants_logprobs:
            return text, None
        state = self._by_choice[index]
        prompt = self.prompt_of(index)
        echoed = state.prompt(prompt.text, prompt.token_ids, delta.prompt_logprobs or []) if begins else None
        logprobs = state.output(delta.logprobs or [])
        return text, logprobs if echoed is None else joined(echoed, logprobs)

    def whole(self, deltas: dict[int, Delta]) -> dict[str, Any]:
        """The answer that is not streamed, from each choice's one merged delta."""
        for index, delta in deltas.items():
            self.usage.add(index, delta)
        return {
            **self.head.as_json(),
            "choices": [
                self._choice(index, deltas[index], deltas[index - index % self.choices_per_prompt])
                for index in range(self.num_choices)
            ],
            "usage": self.usage.as_json(),
        }

    def _choice(self, index: int, delta: Delta, first: Delta) -> dict[str, Any]:
        """`first` is the first choice's of the same prompt: it was scored with that one."""
        text, logprobs = self.text_and_logprobs(index, delta)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if delta.finish_reason is None else FINISH_REASONS.get(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        if self.wants_prompt_logprobs and first.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.prompt_logprobs.prompt(first.prompt_logprobs)
        if self.wants_token_ids:
            choice["prompt_token_ids"] = self.prompt_of(index).token_ids
            choice["token_ids"] = delta.token_ids
        return choice


@dataclass(slots=True)
class CompletionChunks:
    """The chunks of one streamed completion."""

    answer: CompletionAnswer
    _prefix: bytes = b""
    _openings: dict[int, bytes] = field(default_factory=dict)
    _only_text: bool = False  # a chunk with new text has nothing else that is new
    _ids_sent: set[int] = field(default_factory=set)
    _unfinished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._unfinished = set(range(self.answer.num_choices))
        self._prefix = self.answer.head.chunk_prefix()
        answer = self.answer
        self._only_text = not (
            answer.echo or answer.wants_logprobs or answer.wants_token_ids or answer.continuous_usage
        )

    def write(self, deltas: list[tuple[int, Delta]]) -> bytes:
        chunks: list[bytes] = []
        for index, delta in deltas:
            self.answer.usage.add(index, delta)
        for index, delta in deltas:
            if self._only_text and delta.finish_reason is None:
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
            opening = self._openings[index] = self._prefix + b'"choices":[{"index":%d,"text":' % index
        return opening

    def fail(self) -> bytes:
        chunks: list[bytes] = []
        for index in sorted(self._unfinished):
            self._chunk(chunks, index, "", finish=FAILED)
        return b"".join(chunks)

    def end(self) -> bytes:
        if not self.answer.include_usage:
            return b""
        return b"".join((self._prefix, b'"choices":[],"usage":', json_bytes(self.answer.usage.as_json()), b"}\n\n"))

    def _write_choice(self, chunks: list[bytes], index: int, delta: Delta) -> None:
        answer = self.answer
        text, logprobs = answer.text_and_logprobs(index, delta)
        ids = b""
        if answer.wants_token_ids:
            if index not in self._ids_sent:
                self._ids_sent.add(index)
                ids = b',"prompt_token_ids":' + json_bytes(answer.prompt_of(index).token_ids)
            ids += b',"token_ids":' + json_bytes(delta.token_ids)
        has_logprobs = logprobs is not None and bool(logprobs["tokens"])
        if text or has_logprobs or ids:
            self._chunk(chunks, index, text, json_bytes(logprobs) if has_logprobs else b"null", ids)
        if delta.finish_reason is not None:
            self._unfinished.discard(index)
            finish = b'"%b","stop_reason":%b' % (
                FINISH_REASONS[delta.finish_reason].encode(),
                json_bytes(delta.stop_reason),
            )
            self._chunk(chunks, index, "", finish=finish)

    def _chunk(
        self,
        chunks: list[bytes],
        index: int,
        text: str,
        logprobs: bytes = b"null",
        extra: bytes = b"",
        finish: bytes = b"null",
    ) -> None:
        chunks += (
            self._prefix,
            b'"choices":[{"index":%d,"text":' % index,
            json_bytes(text),
            b',"logprobs":',
            logprobs,
            b',"finish_reason":',
            finish,
            extra,
            b"}]",
        )
        if self.answer.continuous_usage:
            chunks += (b',"usage":', json_bytes(self.answer.usage.as_json()))
        chunks.append(b"}\n\n")

"""One choice's way from token ids to text: detokenizer → stop strings → reasoning → tools → the request's collector.

`accept` runs once for every request of every step, on the event loop: it is the only loop over tokens in the
process, so its plain case (no stop strings, no reasoning left to split, no tools) takes a step's tokens at once.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.generation import GenerationError
from services.frontend.output.answer_tokens import AnswerTokens
from services.frontend.output.collector import Collector, Delta
from services.frontend.output.reasoning import ReasoningParser
from services.frontend.output.stop_strings import StopMatcher
from services.frontend.output.tools import ToolCallDelta, ToolParser
from services.frontend.output.tools.parser import merge_calls
from services.frontend.tokenizer import Tokenizer
from shared.protocol import FinishReason, RequestOutput

logger = logging.getLogger(__name__)

_FAILURES = {
    FinishReason.ERROR: (500, "the engine could not go on with this request"),
    FinishReason.OVERLOADED: (503, "every engine is at its limit of waiting requests"),
    FinishReason.HANDED_OVER: (503, "the engine stopped and no other took this request over"),
}


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the client asked of the text.

    `stop` strings are looked for in all that is generated, reasoning included. `min_tokens`: a stop string counts
    only where its last character comes from a later token than that, wherever it begins; the engine sees to eos
    and stop ids. `stop_token_ids`: an output that one of these ended did not end by itself. `hide_reasoning`: no
    ids and logprobs of what stands before the answer; its text and count are still told.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    hide_reasoning: bool = False


class OutputProcessor:
    """A TokenSink: turns one choice's outputs into deltas of the collector. Its errors are its request's alone."""

    __slots__ = (
        "_answer_tokens",
        "_collector",
        "_completion_tokens",
        "_detokenizer",
        "_ended",
        "_index",
        "_matcher",
        "_options",
        "_reasoning",
        "_reasoning_tokens",
        "_text_length",
        "_tokenizer",
        "_tool_calls",
        "_tools",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: OutputOptions,
        collector: Collector,
        index: int,
        reasoning: ReasoningParser | None = None,
        prompt_token_ids: Sequence[int] = (),
        tools: ToolParser | None = None,
    ) -> None:
        """`prompt_token_ids`: the text continues that of the prompt, its leading space and last character included."""
        self._tokenizer = tokenizer
        self._options = options
        self._collector = collector
        self._index = index
        self._reasoning = reasoning
        self._answer_tokens = AnswerTokens(reasoning) if options.hide_reasoning and reasoning is not None else None
        self._tools = tools
        self._tool_calls: list[ToolCallDelta] = []  # of the step at hand
        markers = [parser.marker_token_ids for parser in (reasoning, tools) if parser is not None]
        self._detokenizer = tokenizer.detokenizer(
            options.skip_special_tokens,
            options.spaces_between_special_tokens,
            frozenset().union(*markers),
            prompt_token_ids,
        )
        self._matcher = StopMatcher(options.stop, options.include_stop_str_in_output) if options.stop else None
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._text_length = 0  # characters that the detokenizer gave while reasoning was split
        self._ended = False

    def accept(self, output: RequestOutput) -> bool:
        """Take a step's output; True: it was the last. After that, whatever comes is ignored."""
        if self._ended:
            return True
        try:
            if (
                output.finish_reason is None
                and self._matcher is None
                and self._reasoning is None
                and self._tools is None
            ):
                content = self._detokenizer.push(output.token_ids)
                self._completion_tokens += len(output.token_ids)
                self._put(output, content, "", len(output.token_ids), None, None)
            else:
                self._accept_by_token(output)
        except Exception:
            logger.exception("Cannot decode the output of choice %d; this request fails, others go on", self._index)
            self.fail(GenerationError("the generated tokens could not be decoded"))
        return self._ended

    def fail(self, error: GenerationError) -> None:
        """End the choice with an error."""
        if not self._ended:
            self._ended = True
            self._collector.put(
                self._index,
                Delta(completion_tokens=self._completion_tokens, reasoning_tokens=self._reasoning_tokens, error=error),
            )

    def _accept_by_token(self, output: RequestOutput) -> None:
        finish_reason = output.finish_reason
        if finish_reason is not None and finish_reason in _FAILURES:
            status, message = _FAILURES[finish_reason]
            self.fail(GenerationError(output.error or message, status))
            return
        token_ids = output.token_ids
        # As in vLLM, the token that ended the sequence is no part of its text unless the client wants it.
        silent = finish_reason is FinishReason.STOP and output.stop_token_id is not None
        visible = len(token_ids) - 1 if silent and not self._options.include_stop_str_in_output else len(token_ids)
        content: list[str] = []
        reasoning: list[str] = []
        stop: str | None = None
        used = 0
        for token_id in token_ids:
            text = self._detokenizer.push((token_id,)) if used < visible else ""
            used += 1
            self._completion_tokens += 1
            stop = self._take(text, content, reasoning)
            if stop is not None or (self._tools is not None and self._tools.done):
                break
        # The only call that was allowed is complete: the model may not go on.
        complete = self._tools is not None and self._tools.done
        if stop is None and finish_reason is not None and not complete:
            stop = self._take_rest(content, reasoning)
        if complete:
            stop = None  # which only follows
        stop_reason: int | str | None = stop
        if stop is not None or complete:
            finish_reason = FinishReason.STOP
        elif output.stop_token_id != self._tokenizer.eos_token_id:
            stop_reason = output.stop_token_id
        if finish_reason is not None:
            self._ended = True
            self._finish_parsers(content, reasoning)
        by_itself = finish_reason is FinishReason.STOP and stop is None
        if output.stop_token_id in self._options.stop_token_ids and not complete:
            by_itself = False
        called = by_itself and self._tools is not None and self._tools.called
        self._put(output, "".join(content), "".join(reasoning), used, finish_reason, stop_reason, called)

    def _take(self, text: str, content: list[str], reasoning: list[str]) -> str | None:
        """One token's text through stop strings and reasoning. Returns the stop string that it completed."""
        parser = self._reasoning
        start = self._text_length
        length = len(text)
        stop = None
        if self._matcher is not None and text:
            early = self._completion_tokens <= self._options.min_tokens
            text, stop = self._matcher.push(text, early)
        if parser is None:
            self._answer(text, content)
            return stop
        self._text_length = start + length
        thought, answer = parser.push(text)
        parser.add_token(start, start + length)
        reasoning.append(thought)
        self._answer(answer, content)
        self._reasoning_tokens = parser.reasoning_tokens
        if parser.done:
            self._reasoning = None
        return stop

    def _take_rest(self, content: list[str], reasoning: list[str]) -> str | None:
        """No token follows: what the detokenizer and the matcher held back. A stop string may still be complete."""
        text, stop = self._detokenizer.flush(), None
        if self._matcher is not None:
            early = self._completion_tokens <= self._options.min_tokens
            text, stop = self._matcher.push(text, early)
            if stop is None:
                text += self._matcher.flush()
        if self._reasoning is None:
            self._answer(text, content)
        else:
            thought, answer = self._reasoning.push(text)
            reasoning.append(thought)
            self._answer(answer, content)
        return stop

    def _answer(self, text: str, content: list[str]) -> None:
        """Text that is no reasoning."""
        if self._tools is not None:
            text, calls = self._tools.push(text)
            self._tool_calls = merge_calls(self._tool_calls, calls)
        content.append(text)

    def _finish_parsers(self, content: list[str], reasoning: list[str]) -> None:
        if self._reasoning is not None:
            thought, answer = self._reasoning.finish()
            reasoning.append(thought)
            self._answer(answer, content)
            self._reasoning_tokens = self._reasoning.reasoning_tokens
        if self._tools is not None:
            text, calls = self._tools.finish()
            self._tool_calls = merge_calls(self._tool_calls, calls)
            content.append(text)

    def _put(
        self,
        output: RequestOutput,
        content: str,
        reasoning: str,
        used: int,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        called_tools: bool = False,
    ) -> None:
        token_ids = output.token_ids
        logprobs = output.logprobs if self._options.logprobs else None
        if used < len(token_ids):  # a stop string ended it within this step
            token_ids = token_ids[:used]
            logprobs = logprobs[:used] if logprobs else logprobs
        if self._answer_tokens is not None:
            token_ids, logprobs = self._answer_tokens.push(token_ids, logprobs)
            if self._answer_tokens.done:
                self._answer_tokens = None
        calls, self._tool_calls = self._tool_calls, []
        self._collector.put(
            self._index,
            Delta(
                content,
                reasoning,
                calls,
                token_ids,
                logprobs,
                output.prompt_logprobs,
                output.cached_tokens,
                self._completion_tokens,
                self._reasoning_tokens,
                finish_reason,
                called_tools,
                stop_reason,
            ),
        )

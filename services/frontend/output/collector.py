"""Holds what one HTTP request has not read yet, for all its choices: processors put, the response's writer gets.

A reader that keeps up gets each step's delta by itself. A slow one gets fewer, larger deltas and never less text: past
a few, what is unread is merged, so the number of objects grows with the logarithm of the tokens, and no character is
copied more often than that.
"""

import asyncio
from collections.abc import Callable

import msgspec

from services.frontend.generation import GenerationError
from services.frontend.output.tools.parser import ToolCallDelta, merge_calls
from shared.protocol import FinishReason, TokenLogprobs

# Unread deltas of one choice up to which none is merged: a reader that is a few steps late has not fallen behind.
UNMERGED = 16


class Delta(msgspec.Struct):
    """What became known of one choice since the client last read.

    Text may be held back (half a character, what may be a stop string or a tag), so the text of `token_ids`
    can come with a later delta; ids and logprobs travel with the delta in which they arrived.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []
    token_ids: list[int] = []  # all new ones, reasoning included unless it is hidden
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids, where asked
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int | None = None
    completion_tokens: int = 0  # in total so far
    reasoning_tokens: int = 0  # in total so far
    finish_reason: FinishReason | None = None
    called_tools: bool = False  # the model ended by itself, with complete calls
    stop_reason: int | str | None = None
    error: GenerationError | None = None

    def merge(self, other: "Delta") -> "Delta":
        """This delta and the one right after it, as one. Neither is changed: their lists may be shared."""
        return Delta(
            self.content + other.content,
            self.reasoning + other.reasoning,
            merge_calls(self.tool_calls, other.tool_calls) if self.tool_calls else other.tool_calls,
            self.token_ids + other.token_ids,
            _joined(self.logprobs, other.logprobs),
            other.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs,
            other.cached_tokens if self.cached_tokens is None else self.cached_tokens,
            other.completion_tokens,
            other.reasoning_tokens,
            other.finish_reason if self.finish_reason is None else self.finish_reason,
            self.called_tools or other.called_tools,
            other.stop_reason if self.stop_reason is None else self.stop_reason,
            other.error if self.error is None else self.error,
        )


def _joined(first: list[TokenLogprobs] | None, second: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _size(delta: Delta) -> int:
    return len(delta.token_ids) + len(delta.reasoning)  # the ids of hidden reasoning are left out


class Collector:
    """All choices of one HTTP request. Everything runs on the event loop; there is one reader, which either waits
    (`get`) or is told (`notify`) and then takes."""

    def __init__(self, num_choices: int) -> None:
        self._unread: list[list[Delta]] = [[] for _ in range(num_choices)]
        self._running = set(range(num_choices))
        self._wake: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Every choice has finished or failed, and all of it was read."""
        return not self._running and not any(self._unread)

    def put(self, index: int, delta: Delta) -> None:
        """Add to a choice that has not ended. Never blocks; wakes the reader at most once until it has read."""
        if index not in self._running:
            return  # its end may still be unread: nothing is to be merged into it
        unread = self._unread[index]
        if len(unread) >= UNMERGED:
            # Only runs of similar size are merged, as in a binary counter: merging into one growing string would
            # copy all that is unread for every token.
            while unread and _size(unread[-1]) <= _size(delta):
                delta = unread.pop().merge(delta)
        unread.append(delta)
        if delta.finish_reason is not None or delta.error is not None:
            self._running.discard(index)
        wake = self._wake
        if wake is not None:
            self._wake = None
            wake()

    def fail(self, error: GenerationError) -> None:
        """End the answer with an error, unless every choice has ended."""
        if self._running:
            self.put(min(self._running), Delta(error=error))

    def notify(self, wake: Callable[[], None] | None) -> None:
        """Have `wake` called once, as soon as there is something to take: perhaps at once. It must not take it itself.
        None: no more."""
        if wake is not None and any(self._unread):
            wake()
        else:
            self._wake = wake

    def take(self, wake: Callable[[], None] | None = None) -> list[tuple[int, Delta]]:
        """All that is there, in choice order; of one choice there may be several. `wake` as in `notify`."""
        self._wake = wake
        ready: list[tuple[int, Delta]] = []
        for index, unread in enumerate(self._unread):
            for delta in unread:
                ready.append((index, delta))
            unread.clear()
        return ready

    async def get(self) -> list[tuple[int, Delta]]:
        """Wait until something is there, and take all of it; an empty list once all is done."""
        while not any(self._unread):
            if not self._running:
                return []
            readable = asyncio.Event()
            self._wake = readable.set
            await readable.wait()
        return self.take()

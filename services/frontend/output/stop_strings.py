"""Finds stop strings in text that arrives in pieces, and holds back only what may still become one.

An Aho-Corasick automaton (Aho and Corasick, 1975): one step a character however many stop strings there are, and
its state is the longest end of the text with which some stop string begins, which is exactly what must wait.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache


class StopMatcher:
    """Which match wins depends on the text alone, not on how it is cut: the one whose last character comes first;
    of those that end together, the one that begins first. `include`: the match stays in the text, nothing waits.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if not stops or not all(stops):
            raise ValueError("stop strings must not be empty")
        automaton = _automaton(tuple(stops))
        self._include = include
        self._state = 0
        self._next = automaton.next
        self._fallback = automaton.fallback
        self._depth = automaton.depth
        self._source = automaton.source
        self._match = automaton.match
        self._first = automaton.first

    def push(self, text: str, ignore_matches: bool = False) -> tuple[str, str | None]:
        """The text that may leave now, and the stop string where one was found: the text then ends before it (or
        with it), and the matcher is spent. With `ignore_matches` a match that ends in this text does not count; it
        may still be the beginning of one that ends later.
        """
        state = self._state
        if not state and not self._first(text):
            return text, None
        begin = state
        position, length = 0, len(text)
        while position < length:
            if not state:
                first = self._first(text, position)
                if first is None:
                    break
                position = first.start()
            char = text[position]
            position += 1
            while (successor := self._next[state].get(char)) is None and state:
                state = self._fallback[state]
            state = successor or 0
            stop = self._match[state]
            if stop is not None and not ignore_matches:
                self._state = 0
                return self._released(begin, text, position, 0 if self._include else len(stop)), stop
        # After an ignored match: only an end of the text that can still grow into a stop string has to wait.
        while state and not self._next[state]:
            state = self._fallback[state]
        self._state = state
        return self._released(begin, text, length, 0 if self._include else self._depth[state]), None

    def flush(self) -> str:
        """The text ends here: what was held back."""
        held = self._released(self._state, "", 0, 0)
        self._state = 0
        return held

    def _released(self, begin: int, text: str, end: int, keep: int) -> str:
        """What was held back in the state `begin`, then the text up to `end`, less the last `keep` characters."""
        held = 0 if self._include else self._depth[begin]
        release = held + end - keep
        if release <= held:
            return self._source[begin][:release]
        return self._source[begin][:held] + text[: release - held]


@dataclass(frozen=True, slots=True)
class _Automaton:
    """For each state: its successors; the state of its longest proper end; its length, and a stop string that begins
    with it; the longest stop string that ends here. `first` finds the first character of any stop string."""

    next: list[dict[str, int]]
    fallback: list[int]
    depth: list[int]
    source: list[str]
    match: list[str | None]
    first: Callable[..., re.Match[str] | None]


# The choices of one request share it, and requests of one program mostly have the same stop strings.
@lru_cache(maxsize=16)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    successors: list[dict[str, int]] = [{}]
    fallbacks, depth, source = [0], [0], [""]
    match: list[str | None] = [None]
    for stop in stops:
        state = 0
        for char in stop:
            successor = successors[state].get(char)
            if successor is None:
                successor = len(successors)
                successors[state][char] = successor
                successors.append({})
                fallbacks.append(0)
                depth.append(depth[state] + 1)
                source.append(stop)
                match.append(None)
            state = successor
        match[state] = stop
    queue = deque(successors[0].values())
    while queue:
        state = queue.popleft()
        for char, successor in successors[state].items():
            fallback = fallbacks[state]
            while char not in successors[fallback] and fallback:
                fallback = fallbacks[fallback]
            fallback = successors[fallback].get(char, 0)
            fallbacks[successor] = fallback
            if match[successor] is None:
                match[successor] = match[fallback]
            queue.append(successor)
    first = re.compile("[" + "".join(re.escape(char) for char in successors[0]) + "]").search
    return _Automaton(successors, fallbacks, depth, source, match, first)

"""Finds stop strings in text that arrives in pieces, and holds back only what may still become one.

An Aho-Corasick automaton (Aho and Corasick, 1975): one step a character however many stop strings there are, and
its state is the longest end of the text with which some stop string begins, which is exactly what must wait.
"""

import re
from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Which match wins depends on the text alone, not on how it is cut: the one whose last character comes first;
    of those that end together, the one that begins first. `include`: the match stays in the text, nothing waits.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if not stops or not all(stops):
            raise ValueError("stop strings must not be empty")
        self._stops = tuple(stops)
        self._include = include
        self._state = 0
        # For each state: its successors; the state of its longest proper end; its length, and a stop string that
        # begins with it; the longest stop string that ends here.
        self._next: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [0]
        self._depth: list[int] = [0]
        self._source: list[str] = [""]
        self._match: list[str | None] = [None]
        self._build()
        self._first = re.compile("[" + "".join(re.escape(char) for char in self._next[0]) + "]").search

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

    def _build(self) -> None:
        for stop in self._stops:
            state = 0
            for char in stop:
                successor = self._next[state].get(char)
                if successor is None:
                    successor = len(self._next)
                    self._next[state][char] = successor
                    self._next.append({})
                    self._fallback.append(0)
                    self._depth.append(self._depth[state] + 1)
                    self._source.append(stop)
                    self._match.append(None)
                state = successor
            self._match[state] = stop
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, successor in self._next[state].items():
                fallback = self._fallback[state]
                while char not in self._next[fallback] and fallback:
                    fallback = self._fallback[fallback]
                fallback = self._next[fallback].get(char, 0)
                self._fallback[successor] = fallback
                if self._match[successor] is None:
                    self._match[successor] = self._match[fallback]
                queue.append(successor)

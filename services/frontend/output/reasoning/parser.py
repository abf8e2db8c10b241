"""One choice's split into reasoning and answer, by two tags in the text. `registry.py` knows the models' habits.

It reads text, after stop strings were looked for, so a tag may be one token or ordinary text that is cut anywhere.
Where the tags are special tokens, the processor keeps the detokenizer from skipping `marker_token_ids`.
"""

import enum
from collections import deque
from collections.abc import Collection

from services.frontend.output.tags import partial_tag

# The answer's first line keeps its indentation, but blanks without end are not held for ever.
_LONGEST_INDENT = 256


class Phase(enum.Enum):
    """Where in the output the parser is."""

    OPENING = enum.auto()  # nothing but blanks so far: the opening tag may come
    REASONING = enum.auto()
    ANSWER_START = enum.auto()  # the answer's leading blank lines are being dropped
    ANSWER = enum.auto()


class ReasoningParser:
    """What the tags enclose is reasoning, word for word; what follows is the answer, less its leading blank lines.

    - The opening tag counts only where the output begins (blanks may come before it). With `opened` the output is
      reasoning from the start: the prompt has opened it, or the model is known to leave the tag out. Should the
      model write the tag all the same, it is dropped.
    - Without either, all is answer: a tag further on is text like any other.
    - Everything up to the first closing tag is reasoning; where none comes, it was cut off and there is no answer.
    - Held back is only what may still be a tag, and blanks that may still be dropped.
    """

    def __init__(
        self,
        open_tag: str,
        close_tag: str,
        phase: Phase = Phase.OPENING,
        opened: bool = False,
        marker_token_ids: Collection[int] = (),
    ) -> None:
        for tag in (open_tag, close_tag):
            if not tag or tag[0].isspace():
                raise ValueError(f"a reasoning tag must not be empty nor begin with a blank, as {tag!r} does")
        self.marker_token_ids = frozenset(marker_token_ids)
        self._open_tag = open_tag
        self._close_tag = close_tag
        self._phase = phase
        self._opened = opened
        self._held = ""
        self._length = 0  # characters pushed so far
        self._begin: int | None = 0 if opened and phase is Phase.OPENING else None  # where reasoning begins
        self._end: int | None = None  # where it ends, before the closing tag
        self._answer_from = 0 if phase is Phase.ANSWER_START else None  # where the tags are behind us
        self._undecided: deque[tuple[int, int]] = deque()  # tokens whose text is not all sorted yet
        self.reasoning_tokens = 0
        self.num_known = 0  # tokens of which it is known where they stand
        self.num_before_answer = 0  # of these, the first so many: reasoning and its tags

    @property
    def ahead(self) -> tuple[str, str, bool] | None:
        """Of a new parser: the tags of the reasoning that may come before the answer, and whether it has begun. None:
        the output is all answer."""
        if self._phase is not Phase.OPENING:
            return None
        return self._open_tag, self._close_tag, self._opened

    @property
    def done(self) -> bool:
        """The rest is answer, as it comes, and every token has been counted."""
        return self._phase is Phase.ANSWER and not self._undecided

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that this text makes certain."""
        if not text:
            return "", ""
        self._length += len(text)
        if self._phase is Phase.ANSWER:
            return "", text
        text = self._held + text
        self._held = ""
        reasoning = ""
        if self._phase is Phase.OPENING:
            reasoning, text = self._look_for_opening(text)
        if self._phase is Phase.REASONING:
            inside, text = self._look_for_closing(text)
            reasoning += inside
        if self._phase is Phase.ANSWER_START:
            text = self._drop_blank_lines(text)
        return (reasoning, text) if self._phase is Phase.ANSWER else (reasoning, "")

    def finish(self) -> tuple[str, str]:
        """The output ends here: what was held back is what it would be if nothing followed."""
        held, self._held = self._held, ""
        if self._phase is Phase.REASONING or (self._phase is Phase.OPENING and self._opened):
            rest = held, ""
        else:
            rest = "", "" if held.isspace() else held
            self._answer_from = self._answer_from or 0
        self._count_tokens(last=True)
        return rest

    def add_token(self, start: int, end: int) -> None:
        """Count a token whose text is characters start to end of the output (none, for part of a character).

        A token is reasoning where any of its text is. Tokens of the tags themselves are not, as in vLLM's
        count_reasoning_tokens. A token without text counts with the place where it stands.
        """
        self._undecided.append((start, end))
        self._count_tokens()

    def _count_tokens(self, last: bool = False) -> None:
        if self._phase is Phase.OPENING and not self._opened and not last:
            return
        settled = self._length - len(self._held)
        while self._undecided:
            start, end = self._undecided[0]
            if end > settled and not last:
                return
            self._undecided.popleft()
            self.num_known += 1
            self.num_before_answer += self._is_before_answer(start, end)
            self.reasoning_tokens += self._is_reasoning(start, end)

    def _is_reasoning(self, start: int, end: int) -> bool:
        if self._begin is None:
            return False
        closed = end + 1 if self._end is None else self._end
        if start == end:
            return self._begin <= start < closed
        return max(start, self._begin) < min(end, closed)

    def _is_before_answer(self, start: int, end: int) -> bool:
        """A token that begins within the closing tag and ends in the answer is the answer's."""
        if self._answer_from is None:
            return True
        return start < self._answer_from and (end <= self._answer_from or start < (self._end or 0))

    def _look_for_opening(self, text: str) -> tuple[str, str]:
        body = text.lstrip()
        blanks = text[: len(text) - len(body)]
        if body.startswith(self._open_tag):
            self._begin = self._length - len(body) + len(self._open_tag)
            self._phase = Phase.REASONING
            return blanks if self._opened else "", body[len(self._open_tag) :]
        if self._open_tag.startswith(body):
            if self._opened:
                self._held = body
                return blanks, ""
            self._held = _last_line(blanks) + body
            return "", ""
        if self._opened:
            self._phase = Phase.REASONING
        else:
            self._phase, self._answer_from = Phase.ANSWER_START, 0
        return "", text

    def _look_for_closing(self, text: str) -> tuple[str, str]:
        position = text.find(self._close_tag)
        if position < 0:
            cut = len(text) - partial_tag(text, self._close_tag)
            self._held = text[cut:]
            return text[:cut], ""
        self._end = self._length - len(text) + position
        self._answer_from = self._end + len(self._close_tag)
        self._phase = Phase.ANSWER_START
        return text[:position], text[position + len(self._close_tag) :]

    def _drop_blank_lines(self, text: str) -> str:
        body = text.lstrip()
        indent = _last_line(text[: len(text) - len(body)])
        if not body:
            self._held = indent
            return ""
        self._phase = Phase.ANSWER
        return indent + body


def _last_line(blanks: str) -> str:
    return blanks[blanks.rfind("\n") + 1 :][-_LONGEST_INDENT:]

"""What the parsers of tool calls have in common: text in, content and calls out, for any way of cutting the text.

A format's parser says what opens a call (`openings`) and reads on from there (`_calls`), as if all of the text were
at hand: it is a generator, which yields where it needs more. What it cannot read is content.
"""

import functools
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from services.frontend.output.tags import partial_tag
from services.frontend.output.tools.value import Value

Result = TypeVar("Result")
# Yields where the text so far does not decide what comes next.
Reading = Generator[None, None, Result]

# Blanks that only set calls apart are no content, but blanks without end are not held for ever.
_LONGEST_BLANK = 256
_LONGEST_NAME = 256
_NAME = re.compile(r"[\w.:/+-]{1,256}")


@dataclass(slots=True)
class ToolCallDelta:
    """What became known of one call: first its id and name, then its arguments (JSON) piece by piece."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


def merge_calls(first: list[ToolCallDelta], second: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Deltas that follow each other, as few as say the same. Neither list is changed."""
    if not first or not second or first[-1].index != second[0].index:
        return first + second
    last = first[-1]
    joined = ToolCallDelta(last.index, last.arguments + second[0].arguments, last.id, last.name)
    return [*first[:-1], joined, *second[1:]]


class Broken(Exception):
    """The text goes on as no call does, from where the parser has read to."""


class _Complete(Exception):
    """The one call that was allowed is complete."""


class ToolParser(ABC):
    """One choice's split into content and tool calls.

    - Content is all that belongs to no call, word for word; only blanks that set calls apart are left out.
    - A call begins when its name is known and its arguments have begun. What breaks off before is content; what
      breaks off later leaves a call whose arguments end there, which are then no valid JSON, and the rest is content.
    - Held back is only what may still be a call, and blanks that may still be left out.
    - With `single`, everything ends with the first call.

    `names` are the functions that the request offers. A format without marks of its own needs them to tell a call
    from text; the others leave it to the client to refuse a function that it does not have.
    """

    openings: ClassVar[tuple[str, ...]]
    # What of the format may be a special token, which the detokenizer must not skip.
    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, names: Collection[str], *, single: bool = False, marker_token_ids: Collection[int] = ()) -> None:
        self.marker_token_ids = frozenset(marker_token_ids)
        self.num_calls = 0
        self.done = False
        self._names = frozenset(names)
        self._single = single
        self._open = False  # a call has begun and is not complete
        self._broke_off = False  # as one before it never will be
        self._text = ""  # what is not settled yet, and what follows it
        self._at = 0  # read up to here
        self._settled = 0  # given on as content, or part of a call that has begun
        self._ended = False
        self._blank = ""  # all that the content since the last call is, unless it is None
        self._only_blanks = True
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._script = self._run()

    @property
    def called(self) -> bool:
        """There are calls, and all of them are complete."""
        return self.num_calls > 0 and not self._open and not self._broke_off

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """The content and the calls that this text makes certain. Nothing more comes once it is `done`."""
        if not text or self.done:
            return "", []
        self._text = self._text[self._settled :] + text
        self._at -= self._settled
        self._settled = 0
        return self._go_on()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """The output ends here: what was held back is what it would be if nothing followed."""
        if self.done:
            return "", []
        self._ended = True
        content, deltas = self._go_on()
        self.done = True
        if self._blank and not self.num_calls:
            content += self._blank
        return content, deltas

    def _go_on(self) -> tuple[str, list[ToolCallDelta]]:
        try:
            next(self._script)
        except (StopIteration, _Complete):
            self.done = True
        content, deltas = "".join(self._content), self._deltas
        self._content, self._deltas = [], []
        return content, deltas

    def _run(self) -> Reading[None]:
        while (yield from self._to_opening()):
            try:
                yield from self._calls()
            except Broken:
                if self._ended and self._open:
                    self._settled = self._at = len(self._text)  # cut off inside of a call: no content comes of it
                self._broke_off |= self._open
                self._open = False
                self._give_content(self._at)

    def _to_opening(self) -> Reading[bool]:
        """Content, up to where a call may begin. False: the output is over."""
        # Where the only call that was allowed has broken off, the rest is content.
        openings = () if self._broke_off and self._single else self.openings
        while True:
            if openings and (found := _any_of(openings).search(self._text, self._at)):
                self._give_content(found.start())
                return True
            rest = self._text[self._at :]
            held = 0 if self._ended else max((partial_tag(rest, opening) for opening in openings), default=0)
            self._give_content(len(self._text) - held)
            if self._ended:
                return False
            yield

    def _give_content(self, end: int) -> None:
        text = self._text[self._settled : end]
        self._settled = self._at = end
        if self._only_blanks:
            self._blank += text
            if self._blank.isspace() and len(self._blank) <= _LONGEST_BLANK:
                return
            text, self._blank = self._blank, ""
            self._only_blanks = not text
        if text:
            self._content.append(text)

    # What formats are written with.

    @abstractmethod
    def _calls(self) -> Reading[None]:
        """Read calls from one of the `openings`. Raises Broken where there is none, or it does not go on as one."""

    def _begin_call(self, name: str) -> None:
        """A call begins. Raises Broken where no function can have the name."""
        if not _NAME.fullmatch(name):
            raise Broken
        self._blank, self._only_blanks = "", True
        self._deltas.append(ToolCallDelta(self.num_calls, "", self._new_id(), name))
        self.num_calls += 1
        self._open = True
        self._settled = self._at

    def _give_arguments(self, text: str) -> None:
        if not text:
            return
        index = self.num_calls - 1
        if self._deltas and self._deltas[-1].index == index:
            self._deltas[-1].arguments += text
        else:
            self._deltas.append(ToolCallDelta(index, text))

    def _end_call(self) -> None:
        self._open = False
        self._settled = self._at
        if self._single:
            raise _Complete

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def _more(self) -> Reading[None]:
        if self._ended:
            raise Broken
        yield

    def _char(self) -> Reading[str]:
        """The next character, which stays unread."""
        while self._at >= len(self._text):
            yield from self._more()
        return self._text[self._at]

    def _after_blanks(self) -> Reading[str]:
        """The next character that is no blank."""
        while (yield from self._char()).isspace():
            self._at += 1
        return self._text[self._at]

    def _take(self, literal: str) -> Reading[bool]:
        """Read the literal, where it is what comes next."""
        while len(self._text) - self._at < len(literal) and literal.startswith(self._text[self._at :]):
            if self._ended:
                return False
            yield
        if not self._text.startswith(literal, self._at):
            return False
        self._at += len(literal)
        return True

    def _take_end(self, literal: str) -> Reading[bool]:
        """Read a mark that ends a call, where it is what comes next: all of it, or what the output's end left of it."""
        if (yield from self._take(literal)):
            self._settled = self._at
            return True
        if self._ended and literal.startswith(self._text[self._at :]):
            self._settled = self._at = len(self._text)
        return False

    def _until(self, literal: str) -> Reading[str]:
        """Read the text before a literal, and the literal. Only names are read so: raises Broken where it is long."""
        start = self._at - self._settled
        while True:
            begin = self._settled + start
            position = self._text.find(literal, begin, begin + _LONGEST_NAME + len(literal))
            if position >= 0:
                self._at = position + len(literal)
                return self._text[begin:position]
            if len(self._text) >= begin + _LONGEST_NAME + len(literal):
                raise Broken
            yield from self._more()

    def _value(self, value: Value, give: Callable[[str], None], *, settle: bool = False) -> Reading[None]:
        """Read a value, and give on what is certain. `settle`: what was given on belongs to the call."""
        while True:
            text, self._at = value.read(self._text, self._at)
            give(text)
            if settle:
                self._settled = self._at - len(value.held)
            if value.done:
                return
            if value.broken:
                raise Broken
            if self._ended and settle:
                give(value.unfinished)
            yield from self._more()


@functools.cache
def _any_of(openings: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, openings)))

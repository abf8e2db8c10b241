"""Reads one JSON value from text that arrives in pieces, and gives it on as it comes. `json_calls.py` uses it.

What is given on is what was written, character for character, but for control characters inside strings and escapes
that JSON does not know: models write both, and clients could not read them. They become what was meant.
"""

import enum
import re

from services.frontend.output.tools.value import Value

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_BLANKS = re.compile(r"[ \t\n\r]+")
_NUMBER_PART = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LETTERS = re.compile(r"[a-z]+")
_WORDS = ("true", "false", "null")
_CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class _Expect(enum.Enum):
    """What comes next."""

    VALUE = enum.auto()
    ITEM_OR_END = enum.auto()  # right after [
    KEY_OR_END = enum.auto()  # right after {
    KEY = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    NUMBER = enum.auto()
    WORD = enum.auto()


class JsonValue(Value):
    """One JSON value. What is `held` is a number, word or escape that is not over."""

    def __init__(self) -> None:
        super().__init__()
        self._expect = _Expect.VALUE
        self._open: list[str] = []  # the brackets that will close what is open
        self._is_key = False

    @property
    def unfinished(self) -> str:
        """What of `held` is given on where the output ends here: all of it, as the beginning of what it would be."""
        return self.held

    def _step(self, text: str, at: int, out: list[str]) -> int:
        match self._expect:
            case _Expect.STRING:
                return self._in_string(text, at, out)
            case _Expect.ESCAPE:
                return self._in_escape(text, at, out)
            case _Expect.HEX:
                return self._in_hex(text, at, out)
            case _Expect.NUMBER:
                return self._in_number(text, at, out)
            case _Expect.WORD:
                return self._in_word(text, at, out)
        blanks = _BLANKS.match(text, at)
        if blanks is not None:
            out.append(blanks.group())
            return blanks.end()
        return self._between(text[at], at, out)

    def _between(self, char: str, at: int, out: list[str]) -> int:
        expect = self._expect
        if char == '"' and expect in (_Expect.VALUE, _Expect.ITEM_OR_END, _Expect.KEY, _Expect.KEY_OR_END):
            self._is_key = expect in (_Expect.KEY, _Expect.KEY_OR_END)
            self._expect = _Expect.STRING
        elif expect in (_Expect.VALUE, _Expect.ITEM_OR_END) and char in "{[":
            self._open.append("}" if char == "{" else "]")
            self._expect = _Expect.KEY_OR_END if char == "{" else _Expect.ITEM_OR_END
        elif expect in (_Expect.VALUE, _Expect.ITEM_OR_END) and char in "-0123456789":
            self._expect = _Expect.NUMBER
            return at
        elif expect in (_Expect.VALUE, _Expect.ITEM_OR_END) and char in "tfn":
            self._expect = _Expect.WORD
            return at
        elif expect is _Expect.COLON and char == ":":
            self._expect = _Expect.VALUE
        elif expect is _Expect.COMMA_OR_END and char == ",":
            self._expect = _Expect.KEY if self._open[-1] == "}" else _Expect.VALUE
        elif self._open and char == self._open[-1] and expect not in (_Expect.VALUE, _Expect.KEY, _Expect.COLON):
            self._open.pop()
            self._value_ends()
        else:
            self.broken = True
            return at
        out.append(char)
        return at + 1

    def _value_ends(self) -> None:
        if self._open:
            self._expect = _Expect.COMMA_OR_END
        else:
            self.done = True

    def _in_string(self, text: str, at: int, out: list[str]) -> int:
        run = _IN_STRING.match(text, at)
        if run is not None:
            out.append(run.group())
            return run.end()
        char = text[at]
        if char == '"':
            out.append(char)
            if self._is_key:
                self._expect = _Expect.COLON
            else:
                self._value_ends()
        elif char == "\\":
            self.held = char
            self._expect = _Expect.ESCAPE
        else:
            out.append(_CONTROLS.get(char) or f"\\u{ord(char):04x}")
        return at + 1

    def _in_escape(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if char == "u":
            self.held += char
            self._expect = _Expect.HEX
            return at + 1
        self.held = ""
        self._expect = _Expect.STRING
        if char in '"\\/bfnrt':
            out.append("\\" + char)
            return at + 1
        if char == "'":
            out.append(char)
            return at + 1
        out.append("\\\\")  # such as the \d of a regular expression: the backslash was meant
        return at

    def _in_hex(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if char in "0123456789abcdefABCDEF":
            self.held += char
            if len(self.held) < len("\\u0000"):
                return at + 1
            out.append(self.held)
            at += 1
        else:
            out.append("\\" + self.held)
        self.held = ""
        self._expect = _Expect.STRING
        return at

    def _in_number(self, text: str, at: int, out: list[str]) -> int:
        part = _NUMBER_PART.match(text, at)
        if part is not None:
            self.held += part.group()
            return part.end()
        if _NUMBER.fullmatch(self.held):
            self._give_held(out)
        else:
            self.broken = True
        return at

    def _in_word(self, text: str, at: int, out: list[str]) -> int:
        letters = _LETTERS.match(text, at)
        end = at
        while letters is not None and end < letters.end() and self.held not in _WORDS:
            self.held += text[end]
            end += 1
            if not any(word.startswith(self.held) for word in _WORDS):
                self.held = self.held[:-1]
                self.broken = True
                return end - 1
        if self.held in _WORDS:
            self._give_held(out)
        elif letters is None:
            self.broken = True
        return end

    def _give_held(self, out: list[str]) -> None:
        out.append(self.held)
        self.held = ""
        self._value_ends()

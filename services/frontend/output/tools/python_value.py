"""Reads one Python literal from text that arrives in pieces, and gives it on as JSON. `pythonic.py` uses it.

Lists, tuples, dicts, strings, numbers, True, False and None; JSON's own spellings of the last three too. The JSON is
what json.dumps would write of the value, so that it does not depend on how the model sets its blanks.
"""

import enum
import json
import re

from services.frontend.output.tools.value import Value

_BLANKS = re.compile(r"\s+")
_NUMBER_PART = re.compile(r"[-+.\w]+")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LETTERS = re.compile(r"[A-Za-z]+")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_IN_STRING = {"'": re.compile(r"[^\\']+"), '"': re.compile(r'[^\\"]+')}


class _Expect(enum.Enum):
    """What comes next."""

    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    QUOTE = enum.auto()  # right after a string's first quote: there may be three
    STRING = enum.auto()
    ESCAPE = enum.auto()
    NUMBER = enum.auto()
    WORD = enum.auto()


class PythonValue(Value):
    """One Python literal."""

    def __init__(self) -> None:
        super().__init__()
        self._expect = _Expect.VALUE
        self._open: list[str] = []
        self._empty = True  # whether the innermost bracket has nothing in it yet
        self._is_key = False
        self._quote = ""

    @property
    def unfinished(self) -> str:
        """What of `held` is given on where the output ends here: nothing, since it is not JSON yet."""
        return ""

    def _step(self, text: str, at: int, out: list[str]) -> int:
        match self._expect:
            case _Expect.QUOTE:
                return self._in_quotes(text, at, out)
            case _Expect.STRING:
                return self._in_string(text, at, out)
            case _Expect.ESCAPE:
                return self._in_escape(text, at, out)
            case _Expect.NUMBER:
                return self._in_number(text, at, out)
            case _Expect.WORD:
                return self._in_word(text, at, out)
        blanks = _BLANKS.match(text, at)
        return blanks.end() if blanks is not None else self._between(text[at], at, out)

    def _between(self, char: str, at: int, out: list[str]) -> int:
        expect = self._expect
        value = expect in (_Expect.VALUE, _Expect.VALUE_OR_END)
        key = expect is _Expect.KEY_OR_END
        if value and char in _CLOSING:
            self._begin_item(out)
            out.append("{" if char == "{" else "[")
            self._open.append(_CLOSING[char])
            self._empty = True
            self._expect = _Expect.KEY_OR_END if char == "{" else _Expect.VALUE_OR_END
        elif (value or key) and char in "\"'":
            self._begin_item(out)
            self._is_key = key
            self._quote = self.held = char
            self._expect = _Expect.QUOTE
        elif value and char in "-+.0123456789":
            self._begin_item(out)
            self._expect = _Expect.NUMBER
            return at
        elif value and char.isalpha():
            self._begin_item(out)
            self._expect = _Expect.WORD
            return at
        elif expect is _Expect.COLON and char == ":":
            out.append(": ")
            self._expect = _Expect.VALUE
        elif expect is _Expect.COMMA_OR_END and char == ",":
            self._expect = _Expect.KEY_OR_END if self._open[-1] == "}" else _Expect.VALUE_OR_END
        elif self._open and char == self._open[-1] and expect not in (_Expect.VALUE, _Expect.COLON):
            out.append("}" if char == "}" else "]")
            self._open.pop()
            self._value_ends()
        else:
            self.broken = True
            return at
        return at + 1

    def _begin_item(self, out: list[str]) -> None:
        # Python allows a comma after the last item, JSON does not: it is written when the next item comes.
        if self._open and self._expect is not _Expect.VALUE and not self._empty:
            out.append(", ")

    def _value_ends(self) -> None:
        self._empty = False
        if self._is_key:
            self._is_key = False
            self._expect = _Expect.COLON
        elif self._open:
            self._expect = _Expect.COMMA_OR_END
        else:
            self.done = True

    def _in_quotes(self, text: str, at: int, out: list[str]) -> int:
        quote = self._quote
        if text[at] == quote and len(self.held) < 3:
            self.held += quote
            return at + 1
        if len(self.held) == 2:  # an empty string
            out.append('""')
            self._value_ends()
        else:
            self._quote = self.held
            out.append('"')
            self._expect = _Expect.STRING
        self.held = ""
        return at

    def _in_string(self, text: str, at: int, out: list[str]) -> int:
        quote = self._quote
        if not self.held:
            run = _IN_STRING[quote[0]].match(text, at)
            if run is not None:
                out.append(_json_text(run.group()))
                return run.end()
            if text[at] == "\\":
                self.held = "\\"
                self._expect = _Expect.ESCAPE
                return at + 1
        if text[at] == quote[0]:
            self.held += quote[0]
            at += 1
            if self.held == quote:
                self.held = ""
                out.append('"')
                self._value_ends()
            return at
        out.append(_json_text(self.held))  # fewer quotes than end it
        self.held = ""
        return at

    def _in_escape(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        kind = self.held[1:2]
        if not kind:
            if char in _HEX_LENGTHS or char in "01234567":
                self.held += char
                return at + 1
            if char in _ESCAPES:
                out.append(_json_text(_ESCAPES[char]))
            elif char in "\\'\"":
                out.append(_json_text(char))
            elif char != "\n":
                out.append(_json_text("\\" + char))  # as Python does with an escape that is none
            return self._escape_ends(at + 1)
        digits = self.held[2:]
        if kind in _HEX_LENGTHS:
            if char in "0123456789abcdefABCDEF":
                self.held += char
                at += 1
                if len(digits) + 1 < _HEX_LENGTHS[kind]:
                    return at
                code = int(self.held[2:], 16)
                out.append(_json_text(chr(code)) if code < 0x110000 else _json_text(self.held))
            else:
                out.append(_json_text(self.held))
            return self._escape_ends(at)
        if char in "01234567" and len(self.held) < 4:
            self.held += char
            return at + 1
        out.append(_json_text(chr(int(self.held[1:], 8))))
        return self._escape_ends(at)

    def _escape_ends(self, at: int) -> int:
        self.held = ""
        self._expect = _Expect.STRING
        return at

    def _in_number(self, text: str, at: int, out: list[str]) -> int:
        part = _NUMBER_PART.match(text, at)
        if part is not None:
            self.held += part.group()
            return part.end()
        number = _json_number(self.held)
        if number is None:
            self.broken = True
            return at
        self._give(number, out)
        return at

    def _in_word(self, text: str, at: int, out: list[str]) -> int:
        letters = _LETTERS.match(text, at)
        if letters is not None:
            self.held += letters.group()
            return letters.end()
        word = _WORDS.get(self.held)
        if word is None:
            self.broken = True
            return at
        self._give(word, out)
        return at

    def _give(self, text: str, out: list[str]) -> None:
        out.append(text)
        self.held = ""
        self._value_ends()


def _json_text(text: str) -> str:
    """The text inside of JSON's quotes. A lone surrogate, which has no UTF-8 form, becomes an escape."""
    inside = json.dumps(text, ensure_ascii=False)[1:-1]
    return f"\\u{ord(inside):04x}" if len(inside) == 1 and "\ud800" <= inside <= "\udfff" else inside


def _json_number(text: str) -> str | None:
    """A Python number as JSON; None where it is none, or JSON has none like it."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        number = float(text)
        return json.dumps(number, allow_nan=False)
    except ValueError:
        return None

"""Calls that are written as JSON objects with a name and arguments, as most formats have them."""

import json
from typing import ClassVar

from services.frontend.output.tools.json_value import JsonValue
from services.frontend.output.tools.parser import Broken, Reading, ToolParser

_ARGUMENTS = ("arguments", "parameters")


class JsonToolParser(ToolParser):
    """For formats whose calls are JSON objects.

    The keys come in any order: arguments before the name are held until it is known. Where `only_known` is set, no
    mark tells a call from other JSON: the name must be one of the request's functions, there must be arguments, and
    no other keys than `known_keys`.
    """

    only_known: ClassVar[bool] = False
    known_keys: ClassVar[frozenset[str]] = frozenset({"name", "type", "id", *_ARGUMENTS})

    def _object(self) -> Reading[None]:
        """One call."""
        name: str | None = None
        arguments: str | None = None
        complete = False
        if not (yield from self._take("{")):
            raise Broken
        first = True
        while (yield from self._after_blanks()) != "}":
            if not first and not (yield from self._take(",")):
                if complete:
                    break  # models forget the outer brace; nothing of the call is missing
                raise Broken
            first = False
            key = yield from self._key()
            if key == "name" and name is None:
                name = yield from self._name()
                if arguments is not None and not complete:
                    self._whole_call(name, arguments)
                    complete = True
            elif key in _ARGUMENTS and arguments is None:
                if name is None:
                    arguments = yield from self._whole_arguments()
                else:
                    arguments = ""
                    yield from self._stream_call(name)
                    complete = True
            else:
                yield from self._value(JsonValue(), lambda text: None)
        else:
            self._at += 1
        if not complete:
            if name is None or self.only_known:
                raise Broken
            self._whole_call(name, "{}")
        self._settled = self._at

    def _objects(self) -> Reading[None]:
        """One call, or a list of them."""
        if (yield from self._after_blanks()) != "[":
            yield from self._object()
            return
        self._at += 1
        yield from self._after_blanks()
        yield from self._object()
        while (yield from self._after_blanks()) == ",":
            self._at += 1
            yield from self._after_blanks()
            yield from self._object()
        if not (yield from self._take("]")):
            raise Broken
        self._settled = self._at

    def _stream_call(self, name: str) -> Reading[None]:
        """A call whose name is known, from where its arguments begin."""
        if (yield from self._after_blanks()) != "{":
            self._whole_call(name, (yield from self._whole_arguments()))
            return
        self._begin_call(name)
        yield from self._value(JsonValue(), self._give_arguments, settle=True)
        self._end_call()

    def _whole_call(self, name: str, arguments: str) -> None:
        self._begin_call(name)
        self._give_arguments(arguments)
        self._end_call()

    def _whole_arguments(self) -> Reading[str]:
        """Arguments that are read before anything is given on: an object, one inside a string, or null for none."""
        text = (yield from self._text_of_value()).strip()
        if text == "null":
            return "{}"
        if text.startswith('"'):
            inside = json.loads(text).strip()
            inner = JsonValue()
            text, end = inner.read(inside, 0)
            if not inner.done or end != len(inside) or not _has_utf8(inside):
                raise Broken
        if not text.startswith("{"):
            raise Broken
        return text

    def _key(self) -> Reading[str]:
        if (yield from self._after_blanks()) != '"':
            raise Broken
        key = json.loads((yield from self._text_of_value()))
        if self.only_known and key not in self.known_keys:
            raise Broken
        if (yield from self._after_blanks()) != ":":
            raise Broken
        self._at += 1
        yield from self._after_blanks()
        return key

    def _name(self) -> Reading[str]:
        if (yield from self._after_blanks()) != '"':
            raise Broken
        name = json.loads((yield from self._text_of_value()))
        if not name or (self.only_known and name not in self._names):
            raise Broken
        return name

    def _text_of_value(self) -> Reading[str]:
        pieces: list[str] = []
        yield from self._value(JsonValue(), pieces.append)
        return "".join(pieces)


def _has_utf8(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)

"""Llama 3's format: bare JSON objects."""

from services.frontend.output.tools.json_calls import JsonToolParser
from services.frontend.output.tools.parser import Broken, Reading


class Llama3JsonParser(JsonToolParser):
    """`{"name": "f", "parameters": {…}}`, `<|python_tag|>` before it or not; a semicolon between calls.

    A JSON object is a call only where its name is one of the request's functions.
    """

    openings = ("<|python_tag|>", "{")
    markers = ("<|python_tag|>",)
    only_known = True

    def _calls(self) -> Reading[None]:
        yield from self._take("<|python_tag|>")
        while True:
            yield from self._after_blanks()
            yield from self._object()
            if (yield from self._after_blanks()) != ";":
                return
            semicolon = self._at - self._settled
            self._at += 1
            if (yield from self._after_blanks()) != "{":
                self._at = self._settled + semicolon
                raise Broken
            self._settled = self._at

"""Mistral's formats: after one mark a list of JSON objects, or a name and its arguments."""

import secrets
import string

from services.frontend.output.tools.json_calls import JsonToolParser
from services.frontend.output.tools.parser import Reading

_ID_LETTERS = string.ascii_letters + string.digits
_LONGEST_NAME = 256


class MistralParser(JsonToolParser):
    """`[TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]`, or (tokenizers from version 11 on)
    `[TOOL_CALLS]f[ARGS]{…}`, again for each call; `[CALL_ID]…` may stand before the arguments, and `[ARGS]` may be
    missing. Ids have nine letters and digits, since the models' templates refuse others.
    """

    openings = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def _calls(self) -> Reading[None]:
        yield from self._take("[TOOL_CALLS]")
        if (yield from self._after_blanks()) in "[{":
            yield from self._objects()
            return
        name = yield from self._text_before("[{")
        if (yield from self._take("[CALL_ID]")):
            yield from self._text_before("[{")
        yield from self._take("[ARGS]")
        yield from self._after_blanks()
        yield from self._stream_call(name.strip())

    def _text_before(self, ends: str) -> Reading[str]:
        """Read up to one of the characters, but no longer than a name can be."""
        text = ""
        while len(text) <= _LONGEST_NAME and (char := (yield from self._char())) not in ends:
            text += char
            self._at += 1
        return text

    def _new_id(self) -> str:
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))

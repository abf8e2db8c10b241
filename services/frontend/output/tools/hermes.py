"""Hermes' format, which Qwen's models and others write too: JSON objects between tags."""

from services.frontend.output.tools.json_calls import JsonToolParser
from services.frontend.output.tools.parser import Reading


class HermesParser(JsonToolParser):
    """`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, again for each call.

    A list of such objects inside one pair of tags is read too, and a closing tag may be missing.
    """

    openings = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")

    def _calls(self) -> Reading[None]:
        yield from self._take("<tool_call>")
        yield from self._objects()
        yield from self._after_blanks()
        yield from self._take_end("</tool_call>")

"""DeepSeek's format: each call between marks of its own, all of them between two more."""

from services.frontend.output.tools.json_calls import JsonToolParser
from services.frontend.output.tools.parser import Broken, Reading

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
CODE_BEGIN = "```json\n"
CODE_END = "```"


class DeepSeekV3Parser(JsonToolParser):
    """Within the outer marks, for each call `function<｜tool▁sep｜>f`, a line break and the arguments as a block of
    JSON (V3, R1); or `f<｜tool▁sep｜>{…}` (V3.1). The outer marks may be missing.
    """

    openings = (CALLS_BEGIN, CALL_BEGIN)
    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

    def _calls(self) -> Reading[None]:
        yield from self._take(CALLS_BEGIN)
        yield from self._after_blanks()
        if not (yield from self._take(CALL_BEGIN)):
            raise Broken
        yield from self._call()
        yield from self._after_blanks()
        while (yield from self._take(CALL_BEGIN)):
            yield from self._call()
            yield from self._after_blanks()
        if not (yield from self._take_end(CALLS_END)):
            raise Broken

    def _call(self) -> Reading[None]:
        name = yield from self._until(SEPARATOR)
        in_block = (yield from self._after_blanks()) != "{"
        if in_block:
            name = yield from self._until("\n")
            if not (yield from self._take(CODE_BEGIN)):
                raise Broken
        yield from self._stream_call(name.strip())
        yield from self._after_blanks()
        if in_block and (yield from self._take_end(CODE_END)):
            yield from self._after_blanks()
        yield from self._take_end(CALL_END)

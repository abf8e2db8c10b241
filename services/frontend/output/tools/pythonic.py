"""The format of Llama 3.2 and 4 and others: a Python list of function calls."""

import re

from services.frontend.output.tools.parser import Broken, Reading, ToolParser
from services.frontend.output.tools.python_value import PythonValue

_NAME_CHARACTER = re.compile(r"[\w.]")
_LONGEST_NAME = 256


class PythonicParser(ToolParser):
    """`[f(city="Paris", days=2), g()]`, inside `<|python_start|>` and `<|python_end|>` or not.

    A list is one of calls only where it begins with one of the request's functions. Arguments have names, and
    become JSON.
    """

    openings = ("<|python_start|>", "[")
    markers = ("<|python_start|>", "<|python_end|>")

    def _calls(self) -> Reading[None]:
        yield from self._take("<|python_start|>")
        yield from self._after_blanks()
        if not (yield from self._take("[")):
            raise Broken
        while True:
            yield from self._call()
            if (yield from self._after_blanks()) != ",":
                break
            self._at += 1
        if not (yield from self._take("]")):
            raise Broken
        self._settled = self._at
        yield from self._after_blanks()
        yield from self._take_end("<|python_end|>")

    def _call(self) -> Reading[None]:
        yield from self._after_blanks()
        name = yield from self._word()
        if name not in self._names or not (yield from self._take("(")):
            raise Broken
        first = True
        while (yield from self._after_blanks()) != ")":
            if not first:
                if not (yield from self._take(",")):
                    raise Broken
                if (yield from self._after_blanks()) == ")":
                    break
            argument = yield from self._word()
            yield from self._after_blanks()
            if not argument.isidentifier() or not (yield from self._take("=")):
                raise Broken
            if (yield from self._char()) == "=":
                raise Broken
            if first:
                self._begin_call(name)
                self._give_arguments("{")
            else:
                self._give_arguments(", ")
            first = False
            self._give_arguments(f'"{argument}": ')
            yield from self._value(PythonValue(), self._give_arguments, settle=True)
        self._at += 1
        if first:
            self._begin_call(name)
            self._give_arguments("{")
        self._give_arguments("}")
        self._end_call()

    def _word(self) -> Reading[str]:
        word = ""
        while len(word) <= _LONGEST_NAME and _NAME_CHARACTER.match((yield from self._char())):
            word += self._text[self._at]
            self._at += 1
        return word

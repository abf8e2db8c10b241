"""Grammars of calls, in the format that a parser reads: what the engine holds the model to where a call is required, or
a function is strict. llguidance's dialect of Lark:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.frontend.output.tools import deepseek_v3
from services.frontend.output.tools.python_grammar import python_arguments
from shared.grammars import JSON_OPTIONS


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function that may be called. `schema` is what its arguments must follow, as an object's JSON Schema; None: they
    are any object."""

    name: str
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Marks:
    """How the marks of a format are written: as a special token of the vocabulary (by its id), or as text."""

    special: Mapping[str, int]
    template: str

    def __call__(self, mark: str) -> str:
        return f"<[{self.special[mark]}]>" if mark in self.special else _text(mark)


def calls_grammar(parser: str, functions: Sequence[CallableFunction], marks: Marks, *, parallel: bool = True) -> str:
    """The output is calls and nothing else: one, or with `parallel` one or more. Raises ValueError where the format
    cannot hold a function's schema."""
    write = _FORMATS[parser](functions, marks)
    many = f"start: {write.begin} call ({write.between} call)* {write.end}\n"
    one = f"start: {write.begin} call {write.end}\n"
    return (many if parallel else one) + write.rules


def free_grammar(
    parser: str, functions: Sequence[CallableFunction], marks: Marks, *, answer: Mapping[str, Any] | None = None
) -> str:
    """The output is text in which whatever begins as a call goes on as one; or, where `answer` is given, either calls
    alone or JSON of that schema alone. Raises ValueError where the format cannot hold a function's schema."""
    write = _FORMATS[parser](functions, marks)
    if answer is not None:
        calls = f"{write.begin} call ({write.between} call)* {write.end}"
        return f"start: {calls} | answer\n{write.rules}answer: {_json(answer)}\n"
    rules = "".join(_up_to(f"until_{index}", trigger, marks) for index, (trigger, _) in enumerate(write.triggers))
    tags = [f"until_{index} {rest}" for index, (_, rest) in enumerate(write.triggers)]
    tags += [f"TEXT {marks(mark)}" for mark in write.in_text if mark in marks.special]
    return f"start: ({' | '.join(tags)})* TEXT\nTEXT: /{_ANY_TEXT}/\n{rules}{write.rules}"


_ANY_TEXT = "(?s:.*)"


@dataclass(frozen=True, slots=True)
class _Written:
    """Lark. A list of calls is `begin call (between call)* end`; in text, what begins with a trigger (a mark, or a
    regular expression between slashes) goes on with its rest, and the marks `in_text` may stand. `rules` define `call`
    and what it needs."""

    rules: str
    begin: str = ""
    between: str = ""
    end: str = ""
    triggers: tuple[tuple[str, str], ...] = ()
    in_text: tuple[str, ...] = ()


def _hermes(functions: Sequence[CallableFunction], marks: Marks) -> _Written:
    body = _objects(functions, "arguments")
    close = marks("</tool_call>")
    rules = f'call: {marks("<tool_call>")} "\\n" object "\\n" {close}\n{body}'
    rest = f'"\\n" object "\\n" {close}'
    return _Written(rules, between='"\\n"', triggers=(("<tool_call>", rest),))


def _llama3_json(functions: Sequence[CallableFunction], marks: Marks) -> _Written:
    rules = "call: object\n" + _objects(functions, "parameters")
    triggers: list[tuple[str, str]] = []
    for index, function in enumerate(functions):
        if function.schema is None:
            continue
        # Exactly what the parser takes for a call of this function.
        begin = r"\{\s*(\x22type\x22\s*:\s*\x22function\x22\s*,\s*)?\x22name\x22\s*:\s*"
        triggers.append((f"/{begin}\\x22{_escaped(function.name)}\\x22/", f'", \\"parameters\\": " args_{index} "}}"'))
    return _Written(rules, between='"; "', triggers=tuple(triggers), in_text=("<|python_tag|>",))


def _mistral(functions: Sequence[CallableFunction], marks: Marks) -> _Written:
    begin = marks("[TOOL_CALLS]")
    if "[ARGS]" in marks.template or "[ARGS]" in marks.special:
        calls = [f"{_text(function.name)} {marks('[ARGS]')} args_{index}" for index, function in enumerate(functions)]
        rules = f"call: {begin} named\nnamed: {' | '.join(calls)}\n{_arguments(functions)}"
        return _Written(rules, triggers=(("[TOOL_CALLS]", "named"),))
    rules = "call: object\n" + _objects(functions, "arguments")
    rest = '" [" call (", " call)* "]"'
    return _Written(rules, f'{begin} " ["', '", "', '"]"', (("[TOOL_CALLS]", rest),))


def _deepseek_v3(functions: Sequence[CallableFunction], marks: Marks) -> _Written:
    separator, end = marks(deepseek_v3.SEPARATOR), marks(deepseek_v3.CALL_END)
    in_blocks = deepseek_v3.CODE_BEGIN.strip() in marks.template
    calls: list[str] = []
    for index, function in enumerate(functions):
        if in_blocks:
            name = f"{separator} {_text(function.name + chr(10) + deepseek_v3.CODE_BEGIN)}"
            calls.append(f'"function" {name} args_{index} {_text(chr(10) + deepseek_v3.CODE_END)}')
        else:
            calls.append(f"{_text(function.name)} {separator} args_{index}")
    rules = f"call: {marks(deepseek_v3.CALL_BEGIN)} named {end}\nnamed: {' | '.join(calls)}\n{_arguments(functions)}"
    between = '"\\n"' if in_blocks else ""
    begin_all, end_all = deepseek_v3.CALLS_BEGIN, deepseek_v3.CALLS_END
    # In text the outer marks decide nothing: each call has marks of its own.
    triggers = ((deepseek_v3.CALL_BEGIN, f"named {end}"),)
    return _Written(rules, marks(begin_all), between, marks(end_all), triggers, (begin_all, end_all))


def _pythonic(functions: Sequence[CallableFunction], marks: Marks) -> _Written:
    rules = (
        f"call: {' | '.join(f'{_text(function.name)} parens_{index}' for index, function in enumerate(functions))}\n"
    )
    for index, function in enumerate(functions):
        try:
            rules += python_arguments(f"parens_{index}", function.schema, _json)
        except ValueError as error:
            raise ValueError(f"the schema of {function.name} {error}") from error
    # A strict function may come after another one in a list of calls. The trigger has read the opening parenthesis.
    triggers = tuple(
        (f"/[\\[,]\\s*{_escaped(function.name)}\\(/", f'inside_parens_{index} ")"')
        for index, function in enumerate(functions)
        if function.schema is not None
    )
    return _Written(rules, '"["', '", "', '"]"', triggers, ("<|python_start|>", "<|python_end|>"))


_FORMATS: dict[str, Callable[[Sequence[CallableFunction], Marks], _Written]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "deepseek_v3": _deepseek_v3,
    "pythonic": _pythonic,
}


def _objects(functions: Sequence[CallableFunction], key: str) -> str:
    """`object`: a call as a JSON object."""
    heads = [_text(f'{{"name": {json.dumps(function.name)}, "{key}": ') for function in functions]
    calls = " | ".join(f'{head} args_{index} "}}"' for index, head in enumerate(heads))
    return f"object: {calls}\n{_arguments(functions)}"


def _arguments(functions: Sequence[CallableFunction]) -> str:
    return "".join(f"args_{index}: {_json(function.schema)}\n" for index, function in enumerate(functions))


def _json(schema: Mapping[str, Any] | None) -> str:
    schema = {"type": "object"} if schema is None else schema
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def _up_to(name: str, trigger: str, marks: Marks) -> str:
    """A rule for any text that ends with the trigger's first occurrence."""
    if trigger in marks.special:
        return f"{name}: TEXT {marks(trigger)}\n"
    pattern = trigger[1:-1] if trigger.startswith("/") else _escaped(trigger)
    return f"{name}[lazy]: /{_ANY_TEXT}{pattern}/\n"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """The text as a regular expression between slashes."""
    return "".join(char if char.isalnum() or ord(char) > 127 else f"\\x{ord(char):02x}" for char in text)

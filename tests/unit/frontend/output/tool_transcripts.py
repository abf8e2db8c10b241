"""What models write when they call tools, in each format, and what it says."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.frontend.output.tools.parser import ToolCallDelta, ToolParser
from services.frontend.output.tools.registry import PARSERS

NAMES = ("weather", "get_time", "search.web", "noop")

Call = tuple[str, Any]


@dataclass(frozen=True)
class Said:
    """What became of an output: its content, and each call's name and arguments as text."""

    content: str
    calls: list[tuple[str, str]]
    called: bool

    @property
    def values(self) -> list[Call]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def parse(name: str, parts: Sequence[str], *, single: bool = False) -> Said:
    """What a parser makes of an output that comes in these parts; holds the deltas to what clients rely on."""
    return run(PARSERS[name](NAMES, single=single), parts)


def run(parser: ToolParser, parts: Sequence[str]) -> Said:
    content = ""
    calls: list[tuple[str, str]] = []
    ids: list[str] = []
    for text, deltas in [*(parser.push(part) for part in parts), parser.finish()]:
        content += text
        for delta in deltas:
            begin_or_go_on(delta, calls, ids)
    assert len(set(ids)) == len(ids)
    assert parser.num_calls == len(calls)
    assert parser.done
    return Said(content, calls, parser.called)


def begin_or_go_on(delta: ToolCallDelta, calls: list[tuple[str, str]], ids: list[str]) -> None:
    if delta.name is not None:
        assert delta.index == len(calls)
        assert delta.id
        ids.append(delta.id)
        calls.append((delta.name, delta.arguments))
    else:
        assert delta.id is None
        assert delta.arguments
        assert delta.index == len(calls) - 1
        name, arguments = calls[-1]
        calls[-1] = (name, arguments + delta.arguments)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments in calls
    )


def hermes_arguments_first(calls: Sequence[Call]) -> str:
    return "".join(
        f"<tool_call>{json.dumps({'arguments': arguments, 'name': name}, indent=1)}</tool_call>"
        for name, arguments in calls
    )


def hermes_list(calls: Sequence[Call]) -> str:
    return f"<tool_call>{json.dumps([{'name': name, 'arguments': arguments} for name, arguments in calls])}</tool_call>"


def llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def llama3_json_marked(calls: Sequence[Call]) -> str:
    written = [{"type": "function", "name": name, "parameters": arguments} for name, arguments in calls]
    return "<|python_tag|>" + ";".join(map(json.dumps, written))


def mistral(calls: Sequence[Call]) -> str:
    written = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS] {json.dumps(written, ensure_ascii=False)}"


def mistral_v11(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]aB3dE6gH9[ARGS]{json.dumps(value)}" for name, value in calls)


def mistral_v13(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}{json.dumps(value)}" for name, value in calls)


def deepseek_v3(calls: Sequence[Call]) -> str:
    inside = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(value)}\n```<｜tool▁call▁end｜>"
        for name, value in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    inside = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(value)}<｜tool▁call▁end｜>" for name, value in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def pythonic(calls: Sequence[Call]) -> str:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls]
    return f"[{', '.join(written)}]"


def pythonic_marked(calls: Sequence[Call]) -> str:
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


# Each way of writing calls, with the parser that reads it.
FORMATS = [
    ("hermes", hermes),
    ("hermes", hermes_arguments_first),
    ("hermes", hermes_list),
    ("llama3_json", llama3_json),
    ("llama3_json", llama3_json_marked),
    ("mistral", mistral),
    ("mistral", mistral_v11),
    ("mistral", mistral_v13),
    ("deepseek_v3", deepseek_v3),
    ("deepseek_v3", deepseek_v31),
    ("pythonic", pythonic),
    ("pythonic", pythonic_marked),
]

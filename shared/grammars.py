"""From what a request's output must look like to llguidance's own form of a grammar: one text for both services.

The frontend compiles it to see whether it can be served, the engine to mask tokens with it. See
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md for the Lark dialect.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from shared.structured_output import (
    CHOICE,
    GRAMMAR,
    JSON_OBJECT,
    JSON_SCHEMA,
    REGEX,
    STRUCTURAL_TAG,
    StructuredOutput,
)

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Compact JSON, or with one space after each separator, as Python writes it: small models that may write any blanks
# never stop writing them.
JSON_OPTIONS: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

# A row's mask keeps the whole batch waiting, and the states that its lexer has been in stay in memory: with
# llguidance's own limits, expressions like (.*[a-m].{25}x)* take tenths of a second and a hundred megabytes a request.
PARSER_LIMITS: dict[str, Any] = {"verbose_errors": False, "step_lexer_fuel": 100_000, "max_lexer_states": 100_000}

# What is forced would otherwise be tokenized as the model's tokenizer would, and the engine has none: the model
# itself chooses how to write it.
_HEADER = '%llguidance {"no_forcing": true}\n'
# In Lark a regular expression ends with a slash; `s` lets the dot match a line's end.
_ANY_TEXT = "(?s:.*)"


class InvalidGrammar(ValueError):
    """The value cannot be a grammar of its kind. `place` says where in the value, as a path or a position."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.place = place


Grammar = dict[str, Any]


def llguidance_grammar(structured: StructuredOutput, special_names: Mapping[str, int] | None = None) -> str:
    """The grammar as JSON text, as LLMatcher takes it. `special_names`: the tokens that are no text, by name; a tag
    that is one of them is matched as this token. Raises InvalidGrammar where the value has the wrong form."""
    special = special_names or {}
    answer, others = _answer(structured, special)
    main = _HEADER
    if not structured.reasoning_end:
        main += "start: @answer\n"
    else:
        # Blank lines between reasoning and answer belong to neither.
        main += 'GAP: "\\n" | "\\n\\n"\n' + _up_to("reasoning", structured.reasoning_end, special)
        if structured.reasoning_opened:
            main += "start: reasoning GAP? @answer\n"
        elif structured.reasoning_start:
            main += f"start: ({_tag(structured.reasoning_start, special)} reasoning GAP?)? @answer\n"
        else:
            main += "start: @answer\n"
    grammars = [{"name": "main", "lark_grammar": main}, {"name": "answer", **answer}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def parser_limits() -> "LLParserLimits":
    """What compiling and matching may cost, equal on both sides: what a frontend lets through an engine compiles."""
    from llguidance import LLParserLimits

    return LLParserLimits(**PARSER_LIMITS)


def _answer(structured: StructuredOutput, special: Mapping[str, int]) -> tuple[Grammar, list[Grammar]]:
    kind, value = structured.kind, structured.value
    if kind == JSON_OBJECT:
        return _json_grammar({"type": "object"}), []
    if kind == JSON_SCHEMA:
        return _json_grammar(_read_json(value)), []
    if kind == REGEX:
        from llguidance import regex_to_lark

        # \d is 0 to 9 alone, as JSON and other programs read numbers.
        return {"lark_grammar": f"start: /{regex_to_lark(value, 'd')}/"}, []
    if kind == CHOICE:
        choices = _read_json(value)
        if not isinstance(choices, list) or not choices:
            raise InvalidGrammar("must be a list of at least one string")
        for index, choice in enumerate(cast("list[object]", choices)):
            if not isinstance(choice, str):
                raise InvalidGrammar("must be a string", f"[{index}]")
        # One terminal: alternatives of a rule are tried side by side, and there may be no more than 2000.
        return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(_text, cast("list[str]", choices)))}, []
    if kind == GRAMMAR:
        return {"lark_grammar": value}, []
    if kind == STRUCTURAL_TAG:
        return _structural_tag(_read_json(value), special)
    raise InvalidGrammar(f"has the unknown kind {kind!r}")


def _json_grammar(schema: object) -> Grammar:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidGrammar("a schema must be an object")
    return {"json_schema": {**cast("dict[str, Any]", schema), "x-guidance": JSON_OPTIONS}}


def _structural_tag(value: object, special: Mapping[str, int]) -> tuple[Grammar, list[Grammar]]:
    """Free text in which each trigger begins one of the structures. Each is `begin`, JSON of its schema, `end`."""
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    structures, triggers = fields.get("structures"), fields.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise InvalidGrammar("must have a list `structures` (begin, schema, end) and a list `triggers`")
    by_trigger: dict[str, list[str]] = {}
    for trigger in cast("list[object]", triggers):
        if not isinstance(trigger, str) or not trigger:
            raise InvalidGrammar("must hold strings that are not empty", ".triggers")
        by_trigger[trigger] = []
    others: list[Grammar] = []
    for index, structure in enumerate(cast("list[object]", structures)):
        place = f".structures[{index}]"
        tag = cast("dict[str, Any]", structure) if isinstance(structure, dict) else {}
        begin, end = tag.get("begin"), tag.get("end", "")
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(tag.get("schema"), (dict, bool)):
            raise InvalidGrammar("must have `begin`, `schema` and `end`", place)
        trigger = next((trigger for trigger in by_trigger if begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidGrammar("begins with none of the triggers", f"{place}.begin")
        name = f"structure_{index}"
        others.append({"name": name, **_json_grammar(tag["schema"])})
        rest = [_text(begin[len(trigger) :])] if len(begin) > len(trigger) else []
        tail = [_tag(end, special)] if end else []
        by_trigger[trigger].append(" ".join([*rest, f"@{name}", *tail]))
    lark = f"TEXT: /{_ANY_TEXT}/\n"
    names: list[str] = []
    for index, (trigger, bodies) in enumerate(by_trigger.items()):
        if bodies:
            names.append(f"tag_{index}")
            lark += _up_to(f"until_{index}", trigger, special) + f"tag_{index}: until_{index} ({' | '.join(bodies)})\n"
    return {"lark_grammar": f"start: ({' | '.join(names)})* TEXT\n" + lark}, others


def _up_to(name: str, tag: str, special: Mapping[str, int]) -> str:
    """A rule for any text that ends with the tag's first occurrence."""
    if tag in special:
        return f"{name}: {name.upper()}_TEXT <[{special[tag]}]>\n{name.upper()}_TEXT: /{_ANY_TEXT}/\n"
    return f"{name}[lazy]: /{_ANY_TEXT}{_escaped(tag)}/\n"


def _tag(tag: str, special: Mapping[str, int]) -> str:
    return f"<[{special[tag]}]>" if tag in special else _text(tag)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """The text as a regular expression between slashes."""
    return "".join(char if char.isalnum() or ord(char) > 127 else f"\\x{ord(char):02x}" for char in text)


def _read_json(value: str) -> object:
    try:
        return json.loads(value)
    except RecursionError as error:
        raise InvalidGrammar("is nested too deeply") from error
    except ValueError as error:
        raise InvalidGrammar(f"is not JSON: {error}") from error

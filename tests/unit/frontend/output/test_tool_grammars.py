"""What a grammar of calls lets through, its parser reads as calls that follow their schemas; nothing else passes."""

import json
import random
from collections.abc import Iterable
from typing import Any

import jsonschema
import llguidance
import pytest

from services.frontend.output.tools.grammar import CallableFunction, Marks, calls_grammar, free_grammar
from services.frontend.output.tools.registry import PARSERS
from tests.unit.frontend.output.tool_transcripts import run

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "hot": {"type": "boolean"},
            "unit": {"enum": ["C", "F", None]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "search.web": {
        "type": "object",
        "properties": {
            "filters": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/filter"}},
            "deep": {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
        },
        "additionalProperties": False,
        "$defs": {
            "filter": {
                "type": "object",
                "properties": {"key": {"type": "string", "maxLength": 3}, "on": {"type": "boolean"}},
                "required": ["key", "on"],
                "additionalProperties": False,
            }
        },
    },
    "noop": {"type": "object", "properties": {}, "additionalProperties": False},
}
FUNCTIONS = [CallableFunction(name, schema) for name, schema in SCHEMAS.items()]

# What is tried first where a random choice would make an output long.
CLOSING = [ord(char) for char in '"}])>']


class Bytes:
    """A vocabulary of bytes, some marks as special tokens, and an end, as llguidance takes it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, special: Iterable[str] = ()) -> None:
        self.special = {mark: 256 + number for number, mark in enumerate(special)}
        self.eos_token_id = 256 + len(self.special)
        self.tokens = [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in self.special] + [b"<eos>"]
        self.special_token_ids = [*self.special.values(), self.eos_token_id]
        self.table = llguidance.LLTokenizer(self, eos_token=self.eos_token_id)  # type: ignore[arg-type]

    def __call__(self, text: object) -> list[int]:
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            mark = next((mark for mark in self.special if text.startswith(mark)), None)
            ids += [self.special[mark]] if mark else text[0].encode()
            text = text[len(mark) if mark else 1 :]
        return ids

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.tokens[token_id] for token_id in ids).decode("utf-8", "replace")

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        grammars = [
            {"name": "main", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: @answer\n'},
            {"name": "answer", "lark_grammar": grammar},
        ]
        matcher = llguidance.LLMatcher(self.table, json.dumps({"grammars": grammars}))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def takes(self, grammar: str, text: str) -> bool:
        """Whether the text is a whole output."""
        matcher = self.matcher(grammar)
        ids = self.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def sample(self, grammar: str, draw: random.Random, begin: str = "") -> str:
        """A random output: anything at first, then what ends it soonest."""
        matcher = self.matcher(grammar)
        ids = self.encode(begin)
        assert matcher.consume_tokens(ids)
        while not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            allowed = [token_id for token_id in range(len(self.tokens)) if mask[token_id // 8] >> token_id % 8 & 1]
            if self.eos_token_id in allowed and (draw.random() < 0.5 or len(ids) > 200):
                break
            allowed = [token_id for token_id in allowed if token_id != self.eos_token_id]
            closing = [token_id for token_id in CLOSING if token_id in allowed]
            plain = [token_id for token_id in allowed if 32 <= token_id < 127 or token_id > 255] or allowed
            chosen = closing[0] if closing and (draw.random() < 0.4 or len(ids) > 300) else draw.choice(plain)
            assert matcher.consume_token(chosen)
            ids.append(chosen)
            assert len(ids) < 3000
        return self.decode(ids)


DEEPSEEK_BLOCKS = "<｜tool▁sep｜>name\n```json\n{}\n```"
# Each way of writing calls: the parser, the marks that are special tokens, and the model's template.
FORMATS = {
    "hermes": ("hermes", PARSERS["hermes"].markers, ""),
    "hermes, marks as text": ("hermes", (), ""),
    "llama3_json": ("llama3_json", (), ""),
    "mistral": ("mistral", ("[TOOL_CALLS]",), ""),
    "mistral, with arguments marked": ("mistral", ("[TOOL_CALLS]", "[ARGS]"), ""),
    "mistral, marks as text": ("mistral", (), "[ARGS]"),
    "deepseek_v3": ("deepseek_v3", PARSERS["deepseek_v3"].markers, DEEPSEEK_BLOCKS),
    "deepseek_v3, marks as text": ("deepseek_v3", (), DEEPSEEK_BLOCKS),
    "deepseek_v3, without blocks": ("deepseek_v3", PARSERS["deepseek_v3"].markers, ""),
    "pythonic": ("pythonic", (), ""),
}
formats = pytest.mark.parametrize("name", FORMATS)


def prepare(name: str) -> tuple[str, Bytes, Marks]:
    parser, special, template = FORMATS[name]
    vocabulary = Bytes(special)
    return parser, vocabulary, Marks(vocabulary.special, template)


def said_by(parser: str, text: str) -> Any:
    whole = run(PARSERS[parser](list(SCHEMAS)), [text])
    assert whole == run(PARSERS[parser](list(SCHEMAS)), list(text))
    return whole


@formats
def test_required_calls_follow_their_schemas(name: str) -> None:
    parser, vocabulary, marks = prepare(name)
    called: set[str] = set()
    for parallel in (True, False):
        grammar = calls_grammar(parser, FUNCTIONS, marks, parallel=parallel)
        for seed in range(12):
            text = vocabulary.sample(grammar, random.Random(seed))
            said = said_by(parser, text)
            assert (said.content, said.called) == ("", True), text
            for function, arguments in said.values:
                called.add(function)
                jsonschema.validate(arguments, SCHEMAS[function])
            assert parallel or len(said.calls) == 1
    assert called == set(SCHEMAS)


@formats
def test_a_named_function_is_the_only_one(name: str) -> None:
    parser, vocabulary, marks = prepare(name)
    grammar = calls_grammar(parser, FUNCTIONS[1:2], marks)
    for seed in range(6):
        said = said_by(parser, vocabulary.sample(grammar, random.Random(seed)))
        assert {function for function, _ in said.calls} == {"search.web"}


@formats
def test_text_is_free_until_a_strict_function_is_called(name: str) -> None:
    parser, vocabulary, marks = prepare(name)
    functions = [FUNCTIONS[0], CallableFunction("noop")]
    grammar = free_grammar(parser, functions, marks)
    for text in ("", "Hello, {x} [y](z): <b> weather(1)\n\n", '{"name": "Bob"}', "[1, 2]"):
        assert vocabulary.takes(grammar, text)
    call = calls_grammar(parser, FUNCTIONS[:1], marks, parallel=False)
    good = vocabulary.sample(call, random.Random(1))
    assert vocabulary.takes(grammar, f"Let me see. {good}\nDone.")
    assert not vocabulary.takes(grammar, f"Let me see. {good.replace('city', 'town')}")
    begin = good[: good.index("city")]
    for seed in range(6):
        text = vocabulary.sample(grammar, random.Random(seed), f"So: {begin}")
        said = said_by(parser, text)
        assert said.calls, text
        function, arguments = said.calls[0]
        assert function == "weather"
        jsonschema.validate(json.loads(arguments), SCHEMAS["weather"])


@formats
def test_an_answer_with_a_schema_is_calls_or_json(name: str) -> None:
    parser, vocabulary, marks = prepare(name)
    grammar = free_grammar(parser, [*FUNCTIONS[:1], CallableFunction("noop")], marks, answer={"type": "array"})
    assert vocabulary.takes(grammar, "[1, 2]")
    assert not vocabulary.takes(grammar, "Hello")
    assert vocabulary.takes(grammar, vocabulary.sample(calls_grammar(parser, FUNCTIONS[:1], marks), random.Random(3)))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "properties": {"a b": {}}}, "name of a Python argument"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "none of its properties"),
        ({"type": "object", "anyOf": [{}]}, "anyOf"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {"a": 5}}, "no object"),
    ],
)
def test_what_python_calls_cannot_be_held_to(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        calls_grammar("pythonic", [CallableFunction("f", schema)], Marks({}, ""))

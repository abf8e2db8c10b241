"""Tool calls are told from content the same way however the text is cut, and nothing that is broken does harm."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.frontend.output.tools import TOOL_PARSERS, find_tool_parser, make_tool_parser
from services.frontend.output.tools.registry import PARSERS
from services.frontend.tokenizer import Tokenizer
from tests.unit.frontend.output.strategies import cut
from tests.unit.frontend.output.tool_transcripts import FORMATS, NAMES, Call, Said, hermes, mistral, parse

Write = Callable[[Sequence[Call]], str]

CALLS: list[Call] = [
    ("weather", {"city": "Paris", "days": 3, "units": ["C", "F"], "at": {"lat": -48.85, "lon": 2.3e1}}),
    ("noop", {}),
    ("search.web", {"query": 'say "hi"\n\\d+ <tool_call> </tool_call> [TOOL_CALLS] ```', "safe": True, "page": None}),
    ("get_time", {"zone": "北京 👩‍👩‍👧‍👦 é", "offset": 0, "nested": [[], [{}], {"a": [False]}]}),
]
formats = pytest.mark.parametrize(("name", "write"), FORMATS, ids=lambda value: getattr(value, "__name__", value))


@formats
def test_a_transcript_cut_at_every_position(name: str, write: Write) -> None:
    text = write(CALLS)
    whole = parse(name, [text])
    assert (whole.content, whole.values, whole.called) == ("", CALLS, True)
    assert parse(name, list(text)) == whole
    for position in range(len(text)):
        assert parse(name, [text[:position], text[position:]]) == whole


@formats
def test_text_around_calls_is_content(name: str, write: Write) -> None:
    one, two = write(CALLS[:1]), write(CALLS[2:])
    text = f"Let me look: a < b, [1], {{x}}.\n\n{one} and then {two} done.\n"
    for parts in ([text], list(text)):
        said = parse(name, parts)
        assert said.content == "Let me look: a < b, [1], {x}.\n\n and then  done.\n"
        assert said.values == [CALLS[0], *CALLS[2:]]
        assert said.called
    for parts in ([f" \n{one}\n \n{two}\n"], list(f" \n{one}\n \n{two}\n")):
        assert parse(name, parts).content == ""  # blanks that only set calls apart


@formats
def test_an_output_that_ends_anywhere(name: str, write: Write) -> None:
    """Cut off by its length: no more calls than had begun, their arguments a beginning of the whole's."""
    text = f"So: {write(CALLS)}"
    whole = parse(name, [text])
    for end in range(len(text)):
        said = parse(name, [text[:end]])
        assert said == parse(name, list(text[:end]))
        assert [call for call, _ in said.calls] == [call for call, _ in whole.calls[: len(said.calls)]]
        for number, (_, arguments) in enumerate(said.calls):
            assert whole.calls[number][1].startswith(arguments)
            if number < len(said.calls) - 1:
                assert arguments == whole.calls[number][1]
        if said.calls and not said.called:
            assert said.content == "So: "  # what breaks off inside of the arguments belongs to them
        if len(said.calls) == len(CALLS) and said.called:
            assert said.content in ("So: ", "So: ]", "So: }]")  # of an end mark that is cut off nothing is left
        assert said.called == (bool(said.calls) and said.calls[-1] == whole.calls[len(said.calls) - 1])


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    | st.sampled_from(["</tool_call>", '"', "\\", "\n", "]", "}", "'", "\\u", "```", "é", "'''"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab_\"'é", max_size=3), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.sampled_from(["a", "b_1", "city", "é"]), values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)


@formats
@given(calls=calls, data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_arguments_in_any_pieces(name: str, write: Write, calls: list[Call], data: st.DataObject) -> None:
    text = write(calls)
    said = parse(name, cut(data.draw, text))
    assert said == parse(name, [text])
    assert (said.content, said.values, said.called) == ("", calls, True)


FRAGMENTS = [
    *["<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "[", "]", "("],
    *[
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    *[
        '"',
        "\\",
        "{",
        "}",
        ")",
        ",",
        ":",
        "=",
        ";",
        " ",
        "\n",
        "a",
        "1",
        "-",
        "'",
        "null",
        "True",
        "function",
        "\ud800",
    ],
    *[
        "```json\n",
        "\n```",
        '{"name": "weather", "arguments": {',
        '{"name": "noop"',
        '"parameters":',
        '{"arguments": {',
    ],
    *["weather", "[weather(", "city=", "weather{", "<|python_start|>", "<|python_end|>", '"\\ud800"', '"name": "noop"'],
]


@pytest.mark.parametrize("name", TOOL_PARSERS)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=16), single=st.booleans(), data=st.data())
@settings(max_examples=500, deadline=None)
@example(fragments=['{"arguments": {'] * 10, single=False, data=None)
def test_whatever_a_model_writes(name: str, fragments: list[str], single: bool, data: st.DataObject | None) -> None:
    text = "".join(fragments)
    said = parse(name, [text], single=single)
    assert said == parse(name, list(text), single=single)
    if data is not None:
        assert said == parse(name, cut(data.draw, text), single=single)
    if said.called:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in said.calls)
    if not said.calls:
        assert said.content == text
    if single:
        assert len(said.calls) <= 1


OK = ('{"city": "Paris"}', True)
BROKEN = [
    ("hermes", "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    ("hermes", "<tool_call>", "<tool_call>", []),
    ("hermes", "a <tool_call> b <tool_call>{}", "a <tool_call> b <tool_call>{}", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "a b", "arguments": {}}', '<tool_call>{"name": "a b", "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": "noop", "arguments": [1]}', '<tool_call>{"name": "noop", "arguments": [1]}', []),
    ("hermes", '<tool_call>x<tool_call>{"name": "noop"}</tool_call>', "<tool_call>x", ["{}"]),
    ("hermes", '<tool_call>{"name": "noop", "arguments": null}</tool_call>', "", ["{}"]),
    ("hermes", '<tool_call>{"name": "noop", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ['{"a": 1}']),
    # Without its outer brace, or without its tag, a call is still whole.
    ("hermes", '<tool_call>{"name": "noop", "arguments": {"a": 1}\n</tool_call>.', ".", ['{"a": 1}']),
    ("hermes", '<tool_call>{"name": "noop", "arguments": {"a": 1}} yes', " yes", ['{"a": 1}']),
    # What breaks inside of the arguments ends them there.
    ("hermes", '<tool_call>{"name": "noop", "arguments": {"a": 1, b}}</tool_call>', "b}}</tool_call>", ['{"a": 1, ']),
    ("hermes", '<tool_call>{"name": "noop", "arguments": {"a": 01}}', "01}}", ['{"a": ']),
    # Control characters and unknown escapes inside of strings were meant.
    ("hermes", '<tool_call>{"name": "noop", "arguments": {"a": "1\n2\\d\\\'"}}', "", ['{"a": "1\\n2\\\\d\'"}']),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3_json", '{"name": "weather"}', '{"name": "weather"}', []),
    ("llama3_json", '{"name": "weather", "x": 1}', '{"name": "weather", "x": 1}', []),
    ("llama3_json", '{"x": {"name": "noop", "parameters": {}}}', '{"x": }', ["{}"]),
    ("llama3_json", '{"name": "noop", "parameters": {}}; and', "; and", ["{}"]),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ("mistral", "[TOOL_CALLS] " + "x" * 600, "[TOOL_CALLS] " + "x" * 600, []),
    ("mistral", "[TOOL_CALLS]weather[ARGS]", "[TOOL_CALLS]weather[ARGS]", []),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", []),
    ("deepseek_v3", "<｜tool▁call▁begin｜>noop<｜tool▁sep｜>{}", "", ["{}"]),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>noop\n{}", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>noop\n{}", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[unknown(a=1)]", "[unknown(a=1)]", []),
    ("pythonic", "[noop(1)]", "[noop(1)]", []),
    ("pythonic", "[noop()", "", ["{}"]),
    ("pythonic", "[noop(a=1, 2)]", ", 2)]", ['{"a": 1']),
    ("pythonic", "[noop(a={1, 2})]", "1, 2})]", ['{"a": {']),
    ("pythonic", "see [noop](url) and a[noop]", "see [noop](url) and a[noop]", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), BROKEN)
def test_broken_output_is_content(name: str, text: str, content: str, calls: list[str]) -> None:
    for parts in ([text], list(text)):
        said = parse(name, parts)
        assert (said.content, [arguments for _, arguments in said.calls]) == (content, calls)
        if len(said.calls) == len(CALLS) and said.called:
            assert said.content in ("So: ", "So: ]", "So: }]")  # of an end mark that is cut off nothing is left
        assert said.called == (bool(calls) and all(valid(arguments) for arguments in calls))


def valid(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"""three "quotes" here"""', 'three "quotes" here'),
        ("''", ""),
        ("'\\x41\\u00e9\\U0001F600\\101\\0\\q\\\n'", "Aé😀A\0\\q"),
        ("'\\ud83d\\ude00'", "😀"),
        ("'a\nb'", "a\nb"),
        ("(1, 2,)", [1, 2]),
        ("[1, [2,], ]", [1, [2]]),
        ("{'a': (), \"b\": {},}", {"a": [], "b": {}}),
        ("+5", 5),
        ("-0x1F", -31),
        ("1_000", 1000),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1e-3", -0.001),
        ("true", True),
        ("null", None),
    ],
)
def test_python_literals_become_json(literal: str, value: Any) -> None:
    text = f"[noop(a= {literal} , b=None)]"
    for parts in ([text], list(text)):
        assert parse("pythonic", parts) == Said("", [("noop", json.dumps({"a": value, "b": None}))], True) or (
            parse("pythonic", parts).values == [("noop", {"a": value, "b": None})]
        )


@pytest.mark.parametrize("literal", ["nan", "f'x'", "1+2j", "g(1)", "1 2", "{1: 2}", "lambda: 0", "-", "0x", "1__0"])
def test_what_is_no_literal_ends_the_arguments(literal: str) -> None:
    said = parse("pythonic", [f"[noop(a={literal})]"])
    assert not said.called
    assert said == parse("pythonic", list(f"[noop(a={literal})]"))


@formats
def test_arguments_leave_as_they_come(name: str, write: Write) -> None:
    """No more is held back than what may still be something else."""
    if write.__name__ == "hermes_arguments_first":
        return
    parser = PARSERS[name](NAMES)
    text = write([("weather", {"text": "x" * 200})])
    start = text.index("xxx")
    parser.push(text[:start])
    parser.push("x")
    for _ in range(199):
        _, deltas = parser.push("x")
        assert [delta.arguments for delta in deltas] == ["x"]


def test_plain_text_is_not_held() -> None:
    for name in TOOL_PARSERS:
        parser = PARSERS[name](NAMES)
        assert parser.push("Hello, ") == ("Hello, ", [])
        assert parser.push("<b>, {x} and [y]") == ("<b>, {x} and [y]", [])
    parser = PARSERS["hermes"](NAMES)
    assert parser.push("a <tool_") == ("a ", [])
    assert parser.push("box>") == ("<tool_box>", [])
    parser = PARSERS["llama3_json"](NAMES)
    assert parser.push('{"na') == ("", [])
    assert parser.push('tion": ') == ('{"nation": ', [])


def test_with_one_call_allowed_everything_ends_there() -> None:
    parser = PARSERS["hermes"](NAMES, single=True)
    text = f"ok {hermes(CALLS)} end"
    content, deltas = parser.push(text)
    assert (content, [delta.name for delta in deltas]) == ("ok ", ["weather"])
    assert json.loads(deltas[0].arguments) == CALLS[0][1]
    assert parser.done
    assert parser.called
    assert parser.push("more") == ("", [])
    assert parser.finish() == ("", [])


def test_blanks_without_end_are_neither_kept_nor_slow() -> None:
    parser = PARSERS["hermes"](NAMES)
    for _ in range(20_000):
        parser.push(" ")
    assert parser.push("a") == ("a", [])


def test_long_broken_output_takes_no_longer_than_its_length() -> None:
    for name, text in [
        ("hermes", "<tool_call>" * 5_000),
        ("hermes", '<tool_call>{"arguments": {' * 2_000),
        ("llama3_json", '{"arguments": {"name": ' * 5_000),
        ("llama3_json", "{" * 50_000),
        ("llama3_json", '{"name": "noop", "parameters": {"a": ' + "[" * 30_000),
        ("pythonic", "[noop(a=" + "[" * 30_000),
        ("mistral", "[TOOL_CALLS]x" * 3_000),
        ("deepseek_v3", "<｜tool▁call▁begin｜>" * 3_000),
    ]:
        for parts in ([text], [text[at : at + 7] for at in range(0, len(text), 7)]):
            parse(name, parts)


def test_mistral_ids_are_what_its_templates_take() -> None:
    _, deltas = PARSERS["mistral"](NAMES).push(mistral(CALLS))
    for delta in deltas:
        assert delta.id
        assert len(delta.id) == 9
        assert delta.id.isalnum()


def test_markers_that_are_special_tokens_are_kept(deepseek: Tokenizer) -> None:
    parser = make_tool_parser("deepseek_v3", deepseek, NAMES)
    assert parser.marker_token_ids == {deepseek.token_id(marker) for marker in type(parser).markers}
    assert None not in parser.marker_token_ids
    with pytest.raises(ValueError, match="hermes, llama3_json, mistral, deepseek_v3, pythonic"):
        make_tool_parser("telepathy", deepseek, NAMES)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{% if tools %}return <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>{% endif %}', "hermes"),
        ("{{ '[TOOL_CALLS] [' }}{{ tools }}", "mistral"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}", "deepseek_v3"),
        ('Environment: ipython {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]", "pythonic"),
        ("<tool_call>\n<function=example>\n</tool_call>", None),
        ("<tool_call>{name}<arg_key>k</arg_key></tool_call>", None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
    ],
)
def test_the_parser_that_a_template_speaks_of(template: str, name: str | None) -> None:
    assert find_tool_parser(template) == name

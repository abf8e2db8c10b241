"""Grammars are judged in processes that may be killed: hostile ones are refused, and others go on beside them."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.frontend.structured import GrammarChecker, GrammarRefused, queue_by_size
from shared.structured_output import StructuredOutput

MAX_BYTES = 128 * 1024


def run(test: Callable[[GrammarChecker], Awaitable[Any]], cpu_seconds: float = 0.5) -> Any:
    async def with_checker() -> Any:
        checker = GrammarChecker(MAX_BYTES, cpu_seconds)
        try:
            return await test(checker)
        finally:
            await checker.close()

    return asyncio.run(with_checker())


def schema(value: Any) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", value=json.dumps(value))


async def refusal(checker: GrammarChecker, structured: StructuredOutput) -> GrammarRefused:
    with pytest.raises(GrammarRefused) as refused:
        await checker.check(structured)
    return refused.value


def test_what_can_be_served_is_passed_on() -> None:
    async def check(checker: GrammarChecker) -> None:
        tags = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
        for structured in (
            schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
            StructuredOutput(kind="json_object"),
            StructuredOutput(kind="regex", value=r"^\d+(\.\d+)?/x$"),
            StructuredOutput(kind="choice", value='["a", "b"]'),
            StructuredOutput(kind="grammar", value='start: "a"+'),
            StructuredOutput(kind="structural_tag", value=json.dumps(tags)),
        ):
            tagged = StructuredOutput(kind=structured.kind, value=structured.value, reasoning_end="</think>")
            assert await checker.check(structured) == structured
            assert await checker.check(tagged) == tagged
        gbnf = await checker.check(StructuredOutput(kind="grammar", value='root ::= "a" | "b"'))
        assert gbnf.value.startswith("%llguidance") or "start:" in gbnf.value

    run(check)


def test_the_place_of_what_cannot_be_compiled() -> None:
    async def check(checker: GrammarChecker) -> None:
        for value, place in (
            ({"properties": {"a": {"items": {"pattern": "("}}}}, ".properties.a.items"),
            ({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}, ".properties.a"),
            ({"anyOf": [{"type": "string"}, {"type": "strnig"}]}, ".anyOf[1]"),
            ({"$defs": {"n": {"minimum": 5, "maximum": 1, "type": "integer"}}, "$ref": "#/$defs/n"}, ".$defs.n"),
            ({"items": {"$ref": "#/$defs/none"}}, ".items"),
            ({"items": {"uniqueItems": True}}, ".items.uniqueItems"),
            ({"oneOf": [{"minLength": 1}, {"maxLength": 5}]}, ""),
        ):
            assert (await refusal(checker, schema(value))).place == place
        tags = {"structures": [{"begin": "<a>", "schema": {"not": {}}}], "triggers": ["<a"]}
        fault = await refusal(checker, StructuredOutput(kind="structural_tag", value=json.dumps(tags)))
        assert fault.place == ".structures[0].schema.not"

    run(check)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("root :== 'a'", "Expected ::= at line 1"),
        ('first ::= "a"', "No 'root' rule"),
        ('root ::= "a', "Unexpected end of input"),
        ('root ::= [^"\\', "ends too early"),
        ("", "No 'root' rule"),
    ],
)
def test_a_grammar_that_cannot_be_read_is_told_why(
    grammar: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def check(checker: GrammarChecker) -> None:
        refused = await refusal(checker, StructuredOutput(kind="grammar", value=grammar))
        assert refused.message.startswith("cannot be read: ")
        assert reason in refused.message
        assert refused.status == 400

    run(check)
    assert "Traceback" not in capfd.readouterr().err


def nested(depth: int) -> dict[str, Any]:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        deep = {"type": "object", "properties": {"a": deep}}
    return deep


HOSTILE = {
    "deep": schema(nested(400)),
    "deeper than Python reads": StructuredOutput(kind="json_schema", value='{"items":' * 10_000 + "{}" + "}" * 10_000),
    "a million bytes": schema({"enum": ["x" * 1_000_000]}),
    "many properties": schema({"properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}),
    "a remainder automaton": schema({"type": "integer", "multipleOf": 999_983}),
    "crossed alternatives": schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(10)]} for i in range(8)]}
    ),
    "crossed patterns": schema(
        {"allOf": [{"type": "string", "pattern": f"^.*{c}.*$"} for c in "abcdefghijklmnopqrst"]}
    ),
    "a schema within itself": schema({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}}}),
    "brackets": StructuredOutput(kind="regex", value="(" * 30_000 + ")" * 30_000),
    "brackets in a grammar": StructuredOutput(kind="grammar", value="start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "rules in rules": StructuredOutput(
        kind="grammar", value="start: A0\n" + "".join(f'A{i}: A{i + 1} "x"\n' for i in range(2500)) + 'A2500: "a"\n'
    ),
    "thousands of alternatives": StructuredOutput(
        kind="grammar", value="start: " + " | ".join(f'"{i}"' for i in range(2500))
    ),
    "look-around": StructuredOutput(kind="regex", value="(?=a)b"),
    "a lone surrogate": StructuredOutput(kind="regex", value="\ud800"),
    "a choice of numbers": StructuredOutput(kind="choice", value="[1]"),
}


def test_hostile_grammars_are_refused_soon_and_harm_no_other() -> None:
    async def check(checker: GrammarChecker) -> None:
        await checker.check(schema({}))
        for name, structured in HOSTILE.items():
            began = time.monotonic()
            refused = await refusal(checker, structured)
            assert refused.status == 400, name
            assert refused.message, name
            assert time.monotonic() - began < 10, name  # far under it where the machine is not busy
        assert await checker.check(schema({"type": "null"}))

    run(check)


def test_a_flood_of_hostile_grammars_keeps_nobody_elses_waiting_for_them_all() -> None:
    async def check(checker: GrammarChecker) -> None:
        bombs = [
            asyncio.create_task(refusal(checker, schema({"type": "integer", "multipleOf": 999_983 + 2 * number})))
            for number in range(40)
        ]
        await asyncio.sleep(0)  # all of them have asked
        assert await checker.check(schema({"const": "somebody else's"}))
        waiting = [bomb for bomb in bombs if not bomb.done()]
        # One after the other, each with all of its time, nearly none would be left.
        assert len(waiting) > 20
        assert "too complex" in (await bombs[0]).message
        for bomb in bombs:
            bomb.cancel()

    run(check)


def test_what_takes_long_is_not_refused_for_it() -> None:
    """It is only checked a second time, beside others of its kind."""

    async def check(checker: GrammarChecker) -> None:
        slow = schema(
            {"properties": {f"p{i}": {"type": "string", "pattern": f"^[a-f]{{1,{i}}}$"} for i in range(1, 200)}}
        )
        assert await checker.check(slow) == slow

    run(check, cpu_seconds=60)


def test_a_crash_is_the_grammars_alone() -> None:
    async def check(checker: GrammarChecker) -> None:
        await checker.check(schema({}))
        (process,) = checker._lanes[0]._idle
        for name in ("deep", "crossed patterns", "rules in rules"):
            await refusal(checker, HOSTILE[name])
        assert await checker.check(schema({"const": 1}))
        assert checker._lanes[0]._idle == [process]  # it was not started again

    run(check)


def test_a_grammar_is_judged_once() -> None:
    async def check(checker: GrammarChecker) -> None:
        asked = 0
        judge = checker._judge

        async def count(structured: StructuredOutput) -> Any:
            nonlocal asked
            asked += 1
            return await judge(structured)

        checker._judge = count  # type: ignore[method-assign]
        for _ in range(3):
            await checker.check(schema({"type": "integer"}))
            await refusal(checker, schema({"type": "integer", "multipleOf": 999_983}))
            await refusal(checker, schema({"not": {}}))
        assert asked == 3

    run(check)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_by_size, "MAX_WAITING", 2)

    async def check(checker: GrammarChecker) -> None:
        answers = await asyncio.gather(
            *(checker.check(schema({"const": number})) for number in range(5)), return_exceptions=True
        )
        refused = [answer for answer in answers if isinstance(answer, GrammarRefused)]
        assert [refusal.status for refusal in refused] == [503] * 2  # one is being checked, and two wait
        assert sum(isinstance(answer, StructuredOutput) for answer in answers) == 3

    run(check)


def test_a_client_that_leaves_leaves_no_process_in_an_odd_state() -> None:
    async def check(checker: GrammarChecker) -> None:
        for _ in range(3):
            task = asyncio.create_task(checker.check(schema({"type": "integer", "multipleOf": 99_991})))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        for number in range(4):
            assert json.loads((await checker.check(schema({"const": number}))).value) == {"const": number}

    run(check)


def test_many_are_judged_side_by_side_and_none_gets_anothers_verdict() -> None:
    async def check(checker: GrammarChecker) -> None:
        async def one(number: int) -> None:
            if number % 3 == 0:
                assert (await refusal(checker, schema({f"k{number}": 1}))).place == f".k{number}"
            else:
                assert json.loads((await checker.check(schema({"const": number}))).value) == {"const": number}

        await asyncio.gather(*map(one, range(40)))

    run(check)


def test_brackets_in_texts_are_not_nested() -> None:
    async def check(checker: GrammarChecker) -> None:
        opening = StructuredOutput(kind="grammar", value="start: " + '"(" ' * 300)
        assert await checker.check(opening) == opening

    run(check)


def test_a_choice_of_thousands() -> None:
    """llguidance takes 2000 alternatives of a rule, and tells only where an output comes to where they part."""

    async def check(checker: GrammarChecker) -> None:
        choice = StructuredOutput(kind="choice", value=json.dumps([f"article {i}" for i in range(5000)]))
        assert await checker.check(choice) == choice

    run(check)


def test_all_who_send_the_same_new_grammar_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_by_size, "MAX_WAITING", 2)

    async def check(checker: GrammarChecker) -> None:
        same = schema({"const": "the same"})
        answers = [asyncio.create_task(checker.check(same)) for _ in range(20)]
        await asyncio.sleep(0)
        answers.pop(0).cancel()  # it was the first to ask
        assert await asyncio.gather(*answers) == [same] * 19

    run(check)

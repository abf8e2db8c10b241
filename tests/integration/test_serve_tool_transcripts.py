"""Transcripts of tool calls in every format, through real processes with the simulated executor's echo: streamed equals
whole, cut at every token, and when the engine is killed in the middle of a call."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import openai
import pytest
import said_chat
from process_fleet import ProcessFleet, wait_until

from services.frontend.output.tools import TOOL_PARSERS
from services.frontend.tokenizer import Tokenizer
from tests import tokenizers_at_hand
from tests.unit.frontend.output.tool_transcripts import FORMATS, NAMES

THINKING = "hermes-thinking"
# Names, and the parsers of tools and of reasoning behind them.
SERVED = [*((name, name, None) for name in TOOL_PARSERS), (THINKING, "hermes", "qwen3")]
TURN = "<｜begin▁of▁sentence｜>"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in NAMES]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": "北京 👩‍👩‍👧‍👦", "days": 3, "at": {"lat": -48.85, "all": [True, None, []]}}),
    ("noop", {}),
    ("search.web", {"query": 'say "hi"\n\\d </tool_call> [TOOL_CALLS]', "page": 1}),
]
formats = pytest.mark.parametrize(("name", "write"), FORMATS, ids=lambda value: getattr(value, "__name__", value))
Write = Callable[..., str]
whole, streamed = partial(said_chat.whole, tools=TOOLS), partial(said_chat.streamed, tools=TOOLS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizers_at_hand.deepseek()


@pytest.fixture(scope="module")
def fleet(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    """One frontend that serves the same engines under a name for each parser."""
    scratch = tmp_path_factory.mktemp("tools")
    folder = tokenizers_at_hand.write_model_folder(tokenizer, scratch / "model")
    template = scratch / "template.jinja"
    template.write_text("{{ messages[-1].content }}" + TURN + "{% if tools %}{% endif %}{{ opened }}", encoding="utf-8")
    engine = {"simulated_tokens": "echo", "simulated_step_ms": 2, "heartbeat_timeout": 10}
    fleet = ProcessFleet(scratch, folder, num_frontends=1, num_engines=2, engine=engine)
    for frontend in fleet.frontends:
        addresses = frontend.settings.pop("engine_addresses")
        del frontend.settings["model"], frontend.settings["served_model_name"]
        frontend.settings["heartbeat_timeout"] = 10
        frontend.settings["models"] = [
            {
                "model": str(folder),
                "served_model_name": [name],
                "engine_addresses": addresses,
                "chat_template": str(template),
                "tool_call_parser": parser,
                "reasoning_parser": reasoning,
            }
            for name, parser, reasoning in SERVED
        ]
    try:
        for member in fleet.members:
            member.start()
        for member in fleet.members:
            wait_until(lambda member=member: member.is_up, "a process serves", timeout=120)
        wait_connected(fleet)
        yield fleet
        fleet.assert_nothing_left()
    finally:
        fleet.close()


def wait_connected(fleet: ProcessFleet) -> None:
    running = sum(engine.is_running for engine in fleet.engines)
    wait_until(lambda: fleet.frontend_metric("engines_ready") == len(SERVED) * running, "every pool has its engines")


def run(fleet: ProcessFleet, ask: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        url = f"http://127.0.0.1:{fleet.frontends[0].port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            await ask(client)

    asyncio.run(main())


@formats
def test_transcripts_whole_and_streamed(fleet: ProcessFleet, name: str, write: Write) -> None:
    one, two = write(CALLS[:1]), write(CALLS[1:])

    async def ask(client: openai.AsyncOpenAI) -> None:
        said = await whole(client, name, write(CALLS))
        assert (said.content, said.values, said.finish_reason) == ("", CALLS, "tool_calls")
        assert await streamed(client, name, write(CALLS)) == said

        said = await whole(client, name, f"Let me see:\n{one} and {two} done.")
        assert (said.content, said.values) == ("Let me see:\n and  done.", CALLS)
        assert await streamed(client, name, f"Let me see:\n{one} and {two} done.") == said

        # A stop string comes first, in the middle of arguments too.
        said = await whole(client, name, write(CALLS), stop=["8.85"])
        assert said.finish_reason == "stop"
        assert not said.calls or not said.content
        assert all('"days": 3' in arguments and "8.85" not in arguments for _, arguments in said.calls)
        assert await streamed(client, name, write(CALLS), stop=["8.85"]) == said

    run(fleet, ask)


def test_what_is_only_thought_is_not_called(fleet: ProcessFleet) -> None:
    write = FORMATS[0][1]
    text = f"<think>Should I write {write(CALLS[:1])}?</think>\n\nYes.{write(CALLS[1:])}"

    async def ask(client: openai.AsyncOpenAI) -> None:
        said = await whole(client, THINKING, text)
        assert (said.reasoning, said.content) == (f"Should I write {write(CALLS[:1])}?", "Yes.")
        assert (said.values, said.finish_reason) == (CALLS[1:], "tool_calls")
        assert await streamed(client, THINKING, text) == said

    run(fleet, ask)


@formats
def test_transcripts_cut_at_every_token(fleet: ProcessFleet, tokenizer: Tokenizer, name: str, write: Write) -> None:
    text = f"So: {write(CALLS)}"
    length = len(tokenizer.encode(text, add_special_tokens=False))

    async def ask(client: openai.AsyncOpenAI) -> None:
        full = await whole(client, name, text)

        async def cut(max_tokens: int) -> None:
            said = await whole(client, name, text, max_tokens=max_tokens)
            assert await streamed(client, name, text, max_tokens=max_tokens) == said
            assert said.finish_reason == "length"
            assert said.content.startswith("So: "[:max_tokens])
            for number, (function, arguments) in enumerate(said.calls):
                assert function == full.calls[number][0]
                assert full.calls[number][1].startswith(arguments.rstrip("\ufffd"))  # half a character

        for begin in range(1, length + 1, 16):
            await asyncio.gather(*(cut(max_tokens) for max_tokens in range(begin, min(begin + 16, length + 1))))

    run(fleet, ask)


def test_calls_go_on_when_their_engine_is_killed(fleet: ProcessFleet) -> None:
    """What was parsed stays with the frontend, so that another engine's tokens go on in the middle of a call."""
    transcripts = [(name, f"So: {write(CALLS * 12)}") for name, write in FORMATS]
    engine = fleet.engines[0]

    async def ask(client: openai.AsyncOpenAI) -> None:
        undisturbed = await asyncio.gather(*(streamed(client, name, text) for name, text in transcripts))
        before = engine.metric("generated_tokens_total")
        answers = asyncio.gather(*(streamed(client, name, text) for name, text in transcripts))
        await asyncio.to_thread(
            wait_until,
            lambda: engine.metric("generated_tokens_total") > before + 200 and engine.metric("requests_running") > 0,
            "it is in the middle of its calls",
        )
        engine.kill()
        assert await answers == undisturbed
        assert all(said.values == CALLS * 12 for said in undisturbed)

    failovers = fleet.frontend_metric("failovers_total")
    run(fleet, ask)
    assert fleet.frontend_metric("failovers_total") > failovers
    engine.start()
    wait_until(lambda: engine.is_up, "the engine is back")
    wait_connected(fleet)

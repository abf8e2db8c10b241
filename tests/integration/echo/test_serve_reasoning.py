"""Reasoning transcripts sent through the echo are split as the definition says, streamed and whole."""

from typing import Any

import openai
import pytest

from tests.integration.echo.echo_server import Echo, each, named
from tests.integration.echo_texts import FAMILY

THOUGHTS = [
    "Let me see.\n\nFirst: 北京, then naïve.\n",
    f"{FAMILY} 👍🏽 एक दो",
    "a < b, </ and </thin ice, [/TH, <think",
    " ",
]


ANSWERS = [
    "\n\nIt is 42.",
    "    indented()\n",
    f"{FAMILY} 首都",
    "\n \n\n  two spaces",
    "no blank before it; a < b </b>",
]


def without_blank_lines(text: str) -> str:
    blanks = text[: len(text) - len(text.lstrip())]
    return "" if blanks == text else text[blanks.rfind("\n") + 1 :]


def split(text: str, tags: tuple[str, str], opened: bool) -> tuple[str, str]:
    """Reasoning and answer, from the definition, with the whole text at hand."""
    before = ""
    if text.lstrip().startswith(tags[0]):
        before, _, text = text.partition(tags[0])
        before = before if opened else ""
    elif not opened:
        return "", without_blank_lines(text)
    reasoning, _, answer = text.partition(tags[1])
    return before + reasoning, without_blank_lines(answer)


def read_message(message: Any) -> tuple[str, str]:
    """The reasoning and the answer of a message; both fields of the reasoning are the same."""
    extra = message.model_extra
    assert extra["reasoning"] == extra["reasoning_content"]
    return extra["reasoning"] or "", message.content or ""


async def ask_both_ways(client: openai.AsyncOpenAI, text: str, **fields: Any) -> tuple[str, str, str, Any]:
    """Reasoning, answer, finish reason and usage: the same streamed as whole."""
    body = {"model": "echo", "messages": [{"role": "user", "content": text}], **fields}
    whole = await client.chat.completions.create(**body)
    (choice,) = whole.choices
    reasoning, answer = read_message(choice.message)
    streamed = {"content": "", "reasoning": "", "reasoning_content": ""}
    reasons, usage = [], None
    async for chunk in await client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **body
    ):
        usage = chunk.usage or usage
        for piece in chunk.choices:
            delta = piece.delta.model_dump()
            for name in streamed:
                streamed[name] += delta.get(name) or ""
            reasons += [piece.finish_reason] if piece.finish_reason else []
    assert streamed == {"content": answer, "reasoning": reasoning, "reasoning_content": reasoning}
    assert reasons == [choice.finish_reason]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens_details == whole.usage.completion_tokens_details
    return reasoning, answer, str(choice.finish_reason), whole.usage


def transcripts(tags: tuple[str, str]) -> list[str]:
    opening, closing = tags
    both = [f"{opening}{thought}{closing}{answer}" for thought in THOUGHTS for answer in ANSWERS]
    return [
        *both,
        f"\n {opening}blanks before it{closing}\n\nyes",
        f"{opening}{closing}only an answer",
        f"{opening}only thoughts{closing}",
        f"{opening}only thoughts{closing} \n\n ",
        f"{opening}never closed {closing[:-1]}",
        f"{opening}twice {opening} opened{closing}twice{closing} closed",
        f"{opening[:-1]} no tag at all",
        f"an answer first {opening}then no thought{closing}",
        f"nothing opened{closing}\n\nbut closed",
        opening[:4],
    ]


@pytest.mark.parametrize("opened", [False, True], ids=["output-opens", "prompt-opens"])
def test_reasoning_transcripts(echo: Echo, opened: bool) -> None:
    """Split as the definition says, wherever the tokenizer cuts the tags."""
    kind = echo.kind

    async def ask(client: openai.AsyncOpenAI) -> None:
        async def one(text: str) -> None:
            expected = split(echo.expected(text), kind.tags, opened or kind.parser == "deepseek_r1")
            fields: dict[str, Any] = {}
            if opened:
                # The echo would go on into the prompt's own tag.
                fields["max_tokens"] = len(echo.tokenizer.encode(text, add_special_tokens=False))
                fields["extra_body"] = {"chat_template_kwargs": {"opened": f"{kind.tags[0]}\n"}}
            async with named(text):
                reasoning, answer, reason, usage = await ask_both_ways(client, text, **fields)
                assert (reasoning, answer) == expected
                assert reason == ("length" if opened else "stop")
                count = usage.completion_tokens_details.reasoning_tokens
                assert bool(count) == bool(reasoning)
                assert count <= usage.completion_tokens
                if kind.tags_are_tokens:
                    # The turn's end and eos, which have no text, belong to the thinking that is not over.
                    silent = 0 if opened or kind.tags[1] in text or not reasoning else 2
                    starts_open = opened or kind.parser == "deepseek_r1"
                    assert count == echo.reasoning_tokens(text, starts_open) + silent

        await each(transcripts(kind.tags), one)

    echo.run(ask)


def test_thinking_switched_off_closed_or_left_out(echo: Echo) -> None:
    opening, closing = echo.kind.tags
    thought = "thought after thought after thought"
    text = f"{opening}{thought}{closing}\n\nanswer"
    length = len(echo.tokenizer.encode(text, add_special_tokens=False))

    async def ask(client: openai.AsyncOpenAI) -> None:
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        shown = without_blank_lines(echo.expected(text))
        reasoning, answer, _, usage = await ask_both_ways(client, text, extra_body=off)
        assert reasoning == ""
        if not echo.tokenizer.special_token_ids & {echo.tokenizer.token_id(opening)}:
            assert answer == shown  # tags that are special tokens are skipped like others
        assert usage.completion_tokens_details.reasoning_tokens == 0

        closed = {"chat_template_kwargs": {"opened": f"{opening}\n\n{closing}\n\n"}}
        reasoning, answer, reason, _ = await ask_both_ways(client, text, max_tokens=length, extra_body=closed)
        assert (reasoning, answer, reason) == ("", shown, "length")

        # Cut off inside the thinking: some reasoning and no answer.
        cut = len(echo.tokenizer.encode(f"{opening}thought after", add_special_tokens=False))
        body = {"model": "echo", "messages": [{"role": "user", "content": text}]}
        whole = await client.chat.completions.create(max_tokens=cut, **body)  # type: ignore[call-overload]
        assert whole.choices[0].finish_reason == "length"
        assert whole.choices[0].message.content is None
        reasoning, _ = read_message(whole.choices[0].message)
        assert reasoning
        assert thought.startswith(reasoning.lstrip())

        # A stop string in the thinking ends it there.
        reasoning, answer, reason, _ = await ask_both_ways(client, text, stop=["ought"])
        assert (reasoning.lstrip(), answer, reason) == ("th", "", "stop")

        hidden = {"extra_body": {"include_reasoning": False}, "logprobs": True, "max_tokens": length}
        whole = await client.chat.completions.create(**hidden, **body)  # type: ignore[call-overload]
        entries = whole.choices[0].logprobs.content
        assert "".join(entry.token for entry in entries).endswith("answer")
        assert not any("thought" in entry.token or "after" in entry.token for entry in entries)
        assert whole.choices[0].message.content == "answer"
        assert not {"reasoning", "reasoning_content"} & set(whole.choices[0].message.model_extra or {})
        assert whole.usage.completion_tokens_details.reasoning_tokens > 0

    echo.run(ask)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_what_reaches_the_chat_template(echo: Echo, name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "北京"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "name": "Ada", "content": "hi"},
        {"role": "assistant", "content": None, name: "because", "tool_calls": [call]},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    options = {
        "chat_template_kwargs": {"show": True, "enable_thinking": False},
        "documents": [{"title": "t", "text": "a document"}],
    }

    async def ask(client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(
            model="echo",
            messages=messages,  # type: ignore[arg-type]
            reasoning_effort="low",
            extra_body=options,
        )
        expected = "low, a document, Ada, because, because, 北京: one\ntwo"
        assert answer.choices[0].message.content == echo.kind.lead + expected

    echo.run(ask)

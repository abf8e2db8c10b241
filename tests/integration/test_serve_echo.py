"""What goes in as a prompt comes out of the simulated executor's echo exactly, through real processes: texts, stop
strings and reasoning transcripts, streamed and whole, with tokenizers of each kind."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from loadtest.server_process import ServerProcess, tandem_serve
from services.frontend.tokenizer import Tokenizer
from tests import tokenizers_at_hand
from tests.integration.echo_texts import FAMILY, TEXTS, random_texts

AT_ONCE = 24

# What of a request reaches the chat template, shown where the request asks for it.
VARIABLES = (
    "{% if show %}{{ reasoning_effort }}, {{ documents[0].text }}, {{ messages[0].name }}, "
    "{{ messages[1].reasoning }}, {{ messages[1].reasoning_content }}, "
    "{{ messages[1].tool_calls[0].function.arguments.city }}: {% endif %}"
)


@dataclass(frozen=True)
class Kind:
    """A tokenizer, what ends a prompt's turn with it, and how the server that has it splits reasoning.

    `lead` is what every text gains: a text continues its prompt, so the space that sentencepiece puts before every
    text is kept where it comes out again.
    """

    name: str
    turn: str
    parser: str
    tags: tuple[str, str] = ("<think>", "</think>")
    tags_are_tokens: bool = True
    lead: str = ""


KINDS = [
    # Tags of ordinary text, which the tokenizer cuts anywhere.
    Kind("smollm2", "<|im_start|>", "tagged", ("[THINKING]", "[/THINKING]"), tags_are_tokens=False),
    Kind("deepseek", "<｜begin▁of▁sentence｜>", "deepseek_r1"),
    Kind("sentencepiece", "<|turn|>", "qwen3", lead=" "),
]


@dataclass
class Echo:
    kind: Kind
    tokenizer: Tokenizer
    server: ServerProcess

    def run(self, ask: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> None:
        async def main() -> None:
            url = f"{self.server.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
                await ask(client)

        asyncio.run(main())

    def expected(self, text: str) -> str:
        """What the text's tokens stand for, one after another: the text itself, where its bytes have tokens."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return b"".join(map(self.tokenizer.token_bytes, token_ids)).decode("utf-8", "replace")

    def reasoning_tokens(self, text: str, opened: bool) -> int:
        """Those between the tags, where each tag is one token."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        opening, closing = (self.tokenizer.token_id(tag) for tag in self.kind.tags)
        first = next((i for i, one in enumerate(token_ids) if self.tokenizer.token_text(one).strip()), 0)
        if token_ids[first] == opening:
            inside = token_ids[first + 1 :]
            ahead = first if opened else 0
        elif opened:
            inside, ahead = token_ids, 0
        else:
            return 0
        return ahead + (inside.index(closing) if closing in inside else len(inside))

    def texts(self, texts: list[str]) -> list[str]:
        """Without the characters that sentencepiece cannot tell from its own signs."""
        return [text.replace("▁", "_") for text in texts] if self.kind.lead else texts


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def echo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Echo]:
    kind: Kind = request.param
    scratch = tmp_path_factory.mktemp(kind.name)
    if kind.name == "smollm2":
        folder: Path = request.getfixturevalue("smollm2")
        tokenizer = tokenizers_at_hand.load(folder)
    else:
        make = {
            "deepseek": tokenizers_at_hand.deepseek,
            "sentencepiece": tokenizers_at_hand.sentencepiece_like,
        }
        tokenizer = make[kind.name]()
        folder = tokenizers_at_hand.write_model_folder(tokenizer, scratch / "model")
    # The output is the message; what the turn's end hides from the parser is the prompt before it.
    template = scratch / "template.jinja"
    template.write_text(VARIABLES + "{{ messages[-1].content }}" + kind.turn + "{{ opened }}", encoding="utf-8")
    flags = ["--model", str(folder), "--executor", "simulated", "--simulated-tokens", "echo"]
    flags += ["--chat-template", str(template), "--reasoning-parser", kind.parser, "--served-model-name", "echo"]
    flags += ["--reasoning-tags", json.dumps(kind.tags)]
    with tandem_serve(scratch / "server", *flags) as server:
        yield Echo(kind, tokenizer, server)


async def each(texts: list[Any], ask: Callable[[Any], Awaitable[None]]) -> None:
    """`ask` with each of them, some at once."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(text: Any) -> None:
        async with free:
            await ask(text)

    async with asyncio.TaskGroup() as tasks:
        for text in texts:
            tasks.create_task(one(text))


COMPLETION = {"model": "echo", "max_tokens": 8000}


def test_texts_of_many_scripts_come_out_exactly(echo: Echo) -> None:
    texts = echo.texts([*TEXTS, *random_texts(150, seed=3)])
    if echo.kind.name == "smollm2":
        # Its vocabulary lacks a few rare bytes; what has those is lost when it is encoded, and nothing else is.
        lost = [
            text
            for text in texts
            if echo.tokenizer.decode(echo.tokenizer.encode(text, add_special_tokens=False)) != text
        ]
        assert len(lost) < len(texts) / 10
        assert not set(lost) & set(TEXTS)
    else:
        assert [echo.expected(text) for text in texts] == [echo.kind.lead + text for text in texts]

    async def ask(client: openai.AsyncOpenAI) -> None:
        async def one(text: str) -> None:
            whole = await client.completions.create(prompt=text, **COMPLETION)
            assert whole.choices[0].text == echo.expected(text)
            assert whole.choices[0].finish_reason == "stop"
            chunks = []
            async for chunk in await client.completions.create(prompt=text, stream=True, **COMPLETION):
                chunks += [choice.text for choice in chunk.choices]
            assert "".join(chunks) == echo.expected(text)
            # No half character leaves, to be put right later.
            assert "".join(chunks).count("\ufffd") == text.count("\ufffd") or text not in TEXTS

        await each(texts, one)

    echo.run(ask)


def test_several_prompts_and_choices_keep_apart(echo: Echo) -> None:
    prompts = echo.texts(TEXTS[:12])
    body = {**COMPLETION, "prompt": prompts, "n": 2, "echo": True}
    expected = [prompt + echo.expected(prompt) for prompt in prompts for _ in range(2)]

    async def ask(client: openai.AsyncOpenAI) -> None:
        whole = await client.completions.create(**body)
        assert [choice.text for choice in whole.choices] == expected
        streamed = [""] * len(expected)
        async for chunk in await client.completions.create(stream=True, **body):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == expected

    echo.run(ask)


def until_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """From the definition: the match that is complete first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


STOPS = [
    (TEXTS[0], ["lazy"]),
    (TEXTS[0], ["quick brown fox", "own", "zebra"]),
    (TEXTS[0], ["The quick brown fox jumps over the lazy dog.."]),  # almost the whole text, and then not
    (TEXTS[0], ["T"]),
    (TEXTS[0], ["."]),
    ("aaaaaaab", ["aab", "aaac"]),
    (f"before {FAMILY} after", ["\u200d"]),
    (f"before {FAMILY} after", [FAMILY, " after"]),
    ("北京是中国的首都，也是", ["首都", "的首"]),
    ("line\n\nUser: hi", ["\nUser:", "\n\nUser"]),
    ("é e\u0301 é", ["\u0301"]),
    ("\n\n\n\n", ["\n\n\n"]),
    ("STOP is a word, and STO is none, STOP", ["STOP!", "STOP,", ", STOP"]),
]


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_sent_as_prompts(echo: Echo, include: bool) -> None:
    """Inside the prompt they do nothing; in the output the first to be complete ends it, and never leaves in part."""

    async def ask(client: openai.AsyncOpenAI) -> None:
        async def one(case: tuple[str, list[str]]) -> None:
            text, stops = case
            expected, stop = until_stop(echo.expected(text), stops, include)
            body = {**COMPLETION, "prompt": text, "stop": stops, "extra_body": {"include_stop_str_in_output": include}}
            whole = await client.completions.create(**body)
            assert whole.choices[0].text == expected, case
            assert whole.choices[0].finish_reason == "stop"
            assert whole.choices[0].model_extra["stop_reason"] == stop
            sent, reasons = "", []
            async for chunk in await client.completions.create(stream=True, **body):
                for choice in chunk.choices:
                    sent += choice.text
                    assert expected.startswith(sent), case
                    reasons += [choice.model_extra["stop_reason"]] if choice.finish_reason else []
            assert (sent, reasons) == (expected, [stop])
            echoed = await client.completions.create(echo=True, **body)
            assert echoed.choices[0].text == text + expected
            # Without any stop string they are text like any other.
            plain = await client.completions.create(prompt=text, **COMPLETION)
            assert plain.choices[0].text == echo.expected(text)

        await each([(text, stops) for text, stops in STOPS], one)

    echo.run(ask)


def test_offsets_of_an_echoed_prompt(echo: Echo) -> None:
    """Each token stands where its offset says, in the text as it was sent: spaces and special tokens included."""
    texts = echo.texts([text for text in TEXTS if echo.expected(text) == echo.kind.lead + text])
    if echo.kind.lead:
        # Where a text begins with a space itself, nothing tells the one that was added from it.
        texts = [text for text in texts if not text.startswith(" ")]
    else:
        texts += [f"{echo.kind.turn}user: {TEXTS[0]}{echo.kind.turn}", f"a{echo.kind.turn}b"]

    async def ask(client: openai.AsyncOpenAI) -> None:
        async def one(text: str) -> None:
            answer = await client.completions.create(model="echo", prompt=text, max_tokens=0, echo=True, logprobs=0)
            logprobs = answer.choices[0].logprobs
            assert answer.choices[0].text == text
            assert logprobs is not None
            async with named(text):
                for number, (name, offset) in enumerate(zip(logprobs.tokens, logprobs.text_offset, strict=True)):
                    if not name.startswith("bytes:"):
                        shown = name if number or text.startswith(name) else name.removeprefix(echo.kind.lead)
                        assert text.startswith(shown, offset), (name, offset)

        await each(texts, one)

    echo.run(ask)


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


@asynccontextmanager
async def named(case: Any) -> AsyncIterator[None]:
    """Says which case of several at once has failed."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"in the case {case!r}")
        raise


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

        whole = await client.chat.completions.create(extra_body={"include_reasoning": False}, **body)  # type: ignore[call-overload]
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

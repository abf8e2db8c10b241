"""What goes in as a prompt comes out of the simulated executor's echo exactly, through real processes: texts and stop
strings, streamed and whole, with tokenizers of each kind."""

import openai
import pytest

from tests.integration.echo.echo_server import Echo, each, named
from tests.integration.echo_texts import FAMILY, TEXTS, random_texts

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

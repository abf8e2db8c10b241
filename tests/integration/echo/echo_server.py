"""Servers whose simulated engine sends each prompt back, with tokenizers of each kind."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai

from loadtest.server_process import ServerProcess
from services.frontend.tokenizer import Tokenizer

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


async def each(texts: list[Any], ask: Callable[[Any], Awaitable[None]]) -> None:
    """`ask` with each of them, some at once."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(text: Any) -> None:
        async with free:
            await ask(text)

    async with asyncio.TaskGroup() as tasks:
        for text in texts:
            tasks.create_task(one(text))


@asynccontextmanager
async def named(case: Any) -> AsyncIterator[None]:
    """Says which case of several at once has failed."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"in the case {case!r}")
        raise

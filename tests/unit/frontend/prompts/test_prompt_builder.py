"""Short prompts are made on the event loop, long ones beside it, with the same result."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from services.frontend.prompts.build import INLINE_CHARACTERS, PromptBuilder
from services.frontend.prompts.chat_template import ChatTemplate
from services.frontend.prompts.messages import ChatMessage
from services.frontend.tokenizer import Tokenizer


class LetterTokenizer:
    """A token is a character; remembers which thread it was called on."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return [0] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, token_ids))


class PlainTemplate:
    def render(self, messages: list[ChatMessage], **options: Any) -> str:
        return "|".join(message.content or "" for message in messages)


def test_long_prompts_leave_the_event_loop():
    tokenizer = LetterTokenizer()

    async def build() -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="prompt") as executor:
            builder = PromptBuilder(cast(Tokenizer, tokenizer), cast(ChatTemplate, PlainTemplate()), executor)
            assert await builder.encode(["ab", "c"], add_special_tokens=True) == [[0, 97, 98], [0, 99]]
            long = "a" * (INLINE_CHARACTERS + 1)
            assert await builder.encode([long], add_special_tokens=False) == [[97] * len(long)]
            message = ChatMessage(role="user", content=long)
            options = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False}
            options["size"] = len(long)
            assert await builder.encode_chat([message], **options) == [97] * len(long)
            assert await builder.decode([97, 98], skip_special_tokens=False) == "ab"

    asyncio.run(build())
    assert tokenizer.threads[:2] == ["MainThread", "MainThread"]
    assert [name.startswith("prompt") for name in tokenizer.threads[2:]] == [True, True]


def test_all_that_a_template_is_given_counts_as_long():
    """Not only the messages' content: their reasoning, tool calls and the template's variables are rendered too."""
    tokenizer = LetterTokenizer()

    async def build() -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="prompt") as executor:
            builder = PromptBuilder(cast(Tokenizer, tokenizer), cast(ChatTemplate, PlainTemplate()), executor)
            await builder.encode_chat(
                [ChatMessage(role="user", content="a")],
                add_generation_prompt=True,
                continue_final_message=False,
                add_special_tokens=False,
                size=INLINE_CHARACTERS + 1,
                variables={"long": "a" * INLINE_CHARACTERS},
            )

    asyncio.run(build())
    assert tokenizer.threads[0].startswith("prompt")

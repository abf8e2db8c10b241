"""From a request's messages or text to prompt token ids, beside the event loop where that takes long."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from services.frontend.prompts.chat_template import ChatTemplate
from services.frontend.prompts.messages import ChatMessage
from services.frontend.tokenizer import Tokenizer

# Below this a prompt takes less than about a millisecond, which costs the other streams less than the hop to
# a thread and back would.
INLINE_CHARACTERS = 4096

Result = TypeVar("Result")


class PromptBuilder:
    """Builds one model's prompts. `executor` runs the long ones and belongs to the caller."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, executor: Executor) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._executor = executor

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        return await self._run(
            sum(map(len, texts)) + 64 * len(texts),
            lambda: [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts],
        )

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        add_special_tokens: bool,
        documents: list[dict[str, str]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Raises InvalidPrompt where the template refuses it."""

        def build() -> list[int]:
            text = self._template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                documents=documents,
                variables=variables,
            )
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

        size = sum(64 + len(message.content or "") for message in messages)
        return await self._run(size + 64 * len(documents or ()), build)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return await self._run(4 * len(token_ids), lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False))

    async def _run(self, num_characters: int, work: Callable[[], Result]) -> Result:
        if num_characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

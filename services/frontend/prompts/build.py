"""From a request's messages or text to prompt token ids, beside the event loop where that takes long."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from services.frontend.metrics.catalogue import TEMPLATE_SECONDS, TOKENIZE_SECONDS
from services.frontend.prompts.chat_template import ChatTemplate
from services.frontend.prompts.errors import InvalidPrompt
from services.frontend.prompts.limits import refuse_long_text
from services.frontend.prompts.messages import ChatMessage
from services.frontend.tokenizer import Tokenizer
from services.frontend.tracing import current_trace

# Below this a prompt takes about a millisecond at most, which costs the other streams no more than the hop to a
# thread and back would.
INLINE_CHARACTERS = 1024

# Far more characters to a token than any text has, but for the likes of long runs of blanks.
_MANY_CHARACTERS_PER_TOKEN = 16

Result = TypeVar("Result")


class PromptBuilder:
    """Builds one model's prompts. `executor` runs the long ones and belongs to the caller."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, executor: Executor) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._executor = executor
        self.template_seconds = TEMPLATE_SECONDS.distribution()
        self.tokenize_seconds = TOKENIZE_SECONDS.distribution()

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, max_model_len: int | None = None
    ) -> list[list[int]]:
        """Token ids of each text. Raises InvalidPrompt where one is far over `max_model_len`, soon and not after all
        of it was tokenized."""

        trace = current_trace()

        def build() -> tuple[list[list[int]], float]:
            began = time.perf_counter()
            with trace.stage("tokenize"):
                encoded = [self._encode(text, add_special_tokens, max_model_len, "prompt") for text in texts]
            return encoded, time.perf_counter() - began

        encoded, seconds = await self.run(sum(map(len, texts)) + 64 * len(texts), build)
        self.tokenize_seconds.observe(seconds)
        return encoded

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        add_special_tokens: bool,
        size: int,
        documents: list[dict[str, str]] | None = None,
        variables: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
        max_model_len: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation. `size`: no more characters than that are in all that the template is given.

        Raises InvalidPrompt where the template refuses it, or the text is far over `max_model_len`.
        """

        trace = current_trace()

        def build() -> tuple[list[int], float, float]:
            began = time.perf_counter()
            with trace.stage("template"):
                text = self._template.render(
                    messages,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    documents=documents,
                    variables=variables,
                    tools=tools,
                )
            rendered = time.perf_counter()
            with trace.stage("tokenize"):
                token_ids = self._encode(text, add_special_tokens, max_model_len, "messages")
            return token_ids, rendered - began, time.perf_counter() - rendered

        token_ids, template_seconds, tokenize_seconds = await self.run(size, build)
        self.template_seconds.observe(template_seconds)
        self.tokenize_seconds.observe(tokenize_seconds)
        return token_ids

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""
        return await self.run(
            4 * len(token_ids), lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def _encode(self, text: str, add_special_tokens: bool, max_model_len: int | None, param: str) -> list[int]:
        if max_model_len is not None:
            length = _MANY_CHARACTERS_PER_TOKEN * max_model_len
            if len(text) > 2 * length:
                head = self._tokenizer.encode(text[:length], add_special_tokens=False)
                refuse_long_text(len(head), max_model_len=max_model_len, param=param)
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            # No body holds one, but templates may make it of what clients write as escapes.
            raise InvalidPrompt(str(error), param) from error

    async def run(self, num_characters: int, work: Callable[[], Result]) -> Result:
        """What `work` returns: done at once where there is little of it, else in a thread."""
        if num_characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

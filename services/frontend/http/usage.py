"""Counts the tokens of one answer, as OpenAI's usage shows them."""

from collections.abc import Sequence
from typing import Any

from services.frontend.output.collector import Delta


class Usage:
    """`prompt_lengths` has one entry for each prompt; choice i belongs to prompt i // choices_per_prompt."""

    def __init__(self, prompt_lengths: list[int], choices_per_prompt: int, *, with_reasoning: bool) -> None:
        num_choices = len(prompt_lengths) * choices_per_prompt
        self._prompt_tokens = sum(prompt_lengths)
        self._choices_per_prompt = choices_per_prompt
        self._with_reasoning = with_reasoning
        self._completion = [0] * num_choices
        self._reasoning = [0] * num_choices
        self._cached = [0] * len(prompt_lengths)

    def add(self, index: int, delta: Delta) -> None:
        # An error's delta may carry no counts; what was counted stays.
        if delta.completion_tokens > self._completion[index]:
            self._completion[index] = delta.completion_tokens
        if delta.reasoning_tokens > self._reasoning[index]:
            self._reasoning[index] = delta.reasoning_tokens
        # A prompt counts once however many choices it has, as it was for the first of them.
        if delta.cached_tokens is not None and index % self._choices_per_prompt == 0:
            self._cached[index // self._choices_per_prompt] = delta.cached_tokens

    @property
    def prompt_tokens(self) -> int:
        return self._prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    @property
    def reasoning_tokens(self) -> int:
        return sum(self._reasoning)

    @property
    def by_choice(self) -> Sequence[int]:
        """Completion tokens of each choice."""
        return self._completion

    def as_json(self) -> dict[str, Any]:
        completion_tokens = sum(self._completion)
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
        if self._with_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(self._reasoning)}
        return usage

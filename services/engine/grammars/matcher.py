"""How far one request's output has come in its grammar. It advances with each token that the engine accepts.

llguidance does the matching, on bytes; `compiler` makes matchers, `masks` asks them which tokens may come next.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_ERROR_LENGTH = 300


class GrammarMatcher:
    """`error` is set once the output cannot be brought to an end within the grammar: the request fails, alone.

    `matcher` must not be touched while a mask is filled for it (see masks.py).
    """

    __slots__ = ("_eos_ids", "error", "keeps_eos_out", "matcher", "num_tokens")

    def __init__(self, matcher: "LLMatcher", eos_ids: frozenset[int], keeps_eos_out: bool = False) -> None:
        """`keeps_eos_out`: the request ignores eos, so it gets one only where nothing else may come."""
        self.matcher = matcher
        self.keeps_eos_out = keeps_eos_out
        self.num_tokens = 0
        self.error: str | None = None
        self._eos_ids = eos_ids

    @property
    def done(self) -> bool:
        """The output is complete and nothing can follow it."""
        return self.error is None and self.matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        """The output goes on with this token."""
        if self.error is None and not self.matcher.consume_token(token_id):
            self._leave()
        self.num_tokens += 1

    def replay(self, token_ids: Sequence[int]) -> None:
        """The output so far, of a request that another engine began."""
        if self.error is None and not self.matcher.consume_tokens(list(token_ids)):
            self._leave()
        self.num_tokens += len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back. Raises ValueError where there are not so many."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"{num_tokens} tokens cannot be taken back of {self.num_tokens}")
        self.num_tokens -= num_tokens
        if self.error is None and not self.matcher.rollback(num_tokens):
            self.error = f"the grammar could not be rolled back: {self._reason()}"

    def check_mask(self) -> None:
        """To be called when its mask is filled: llguidance reports a fault by allowing eos alone."""
        if self.error is not None:
            return
        if self.matcher.is_error():
            self.error = f"the grammar could not go on: {self._reason()}"
        elif self.matcher.stop_reason() == "NoExtensionBias":
            self.error = (
                "no token can follow what the model has written so far: the grammar or the schema cannot be "
                "fulfilled (contradicting constraints?)"
            )

    def is_eos(self, token_id: int) -> bool:
        return token_id in self._eos_ids

    def _leave(self) -> None:
        self.error = f"the output so far does not follow the grammar: {self._reason()}"

    def _reason(self) -> str:
        # What follows the first line is the parser's state, for those who work on llguidance.
        return self.matcher.get_error().strip().split("\n<state>")[0][:MAX_ERROR_LENGTH]

"""A choice's ids and logprobs without those of hidden reasoning. `processor` asks where the client wants none of it."""

from services.frontend.output.reasoning import ReasoningParser
from shared.protocol import TokenLogprobs


class AnswerTokens:
    """Keeps tokens back until the parser has told which of them stand before the answer, and drops those."""

    def __init__(self, parser: ReasoningParser) -> None:
        self._parser = parser
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._num_passed = 0  # tokens that were given out or dropped

    @property
    def done(self) -> bool:
        """Every token that follows is the answer's."""
        return self._parser.done and not self._token_ids

    def push(
        self, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> tuple[list[int], list[TokenLogprobs] | None]:
        """A step's tokens, which the parser has seen. Returns those that are now known to be the answer's."""
        self._token_ids += token_ids
        self._logprobs += logprobs or ()
        parser = self._parser
        num_known = len(self._token_ids) if parser.done else parser.num_known - self._num_passed
        first = min(max(parser.num_before_answer - self._num_passed, 0), num_known)
        shown = self._token_ids[first:num_known]
        # What was kept back may come out in a step without any.
        shown_logprobs = self._logprobs[first:num_known] or (None if logprobs is None else [])
        del self._token_ids[:num_known], self._logprobs[:num_known]
        self._num_passed += num_known
        return shown, shown_logprobs

"""How busy one engine is: what it last said, and what was sent to it since.

`connection` keeps it, `routing` weighs it.
"""

from shared.protocol import Load


class EngineLoad:
    """Prompt tokens and requests at one engine, as far as this process can know."""

    __slots__ = ("_requests_perhaps", "_requests_since", "_tokens_perhaps", "_tokens_since", "reported")

    def __init__(self) -> None:
        self.reported = Load()
        # What was sent since the last report, and between the two last: a report was taken a moment
        # before it arrived, and may not count those either.
        self._tokens_since = self._requests_since = 0
        self._tokens_perhaps = self._requests_perhaps = 0

    def sent(self, num_tokens: int) -> None:
        """A request of so many tokens goes to the engine."""
        self._tokens_since += num_tokens
        self._requests_since += 1

    def update(self, load: Load) -> None:
        """The engine reports."""
        self.reported = load
        self._tokens_perhaps, self._tokens_since = self._tokens_since, 0
        self._requests_perhaps, self._requests_since = self._requests_since, 0

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that no step has computed yet."""
        return self.reported.waiting_tokens + self._tokens_since + self._tokens_perhaps

    @property
    def queued_requests(self) -> int:
        """Requests that run or wait."""
        reported = self.reported
        return reported.running_requests + reported.waiting_requests + self._requests_since + self._requests_perhaps

"""Prompts under which engines died again and again, by fingerprint, each for a while.

Frontends judge and engines remember, so that a prompt which one frontend has found is refused to all of them.
"""

import time
from collections.abc import Callable
from hashlib import blake2b

from shared.protocol import MAX_QUARANTINED, Quarantined


def prompt_fingerprint(packed_token_ids: bytes) -> int:
    """64 bits that stand for a prompt, as `pack_token_ids` packs it. Some 50 µs for 10,000 tokens."""
    return int.from_bytes(blake2b(packed_token_ids, digest_size=8).digest(), "big")


class Quarantine:
    """At most MAX_QUARANTINED prompts: the one that would leave first makes room. False where it is empty."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def set(self, fingerprint: int, seconds: float) -> None:
        """Refuse this prompt for so long from now on; 0 lets it go."""
        self._until.pop(fingerprint, None)
        if seconds > 0:
            self._until[fingerprint] = self._clock() + seconds
            while len(self._until) > MAX_QUARANTINED:
                del self._until[min(self._until, key=self._until.__getitem__)]

    def seconds_left(self, fingerprint: int) -> float:
        """For how long this prompt is still refused; 0 where it is not."""
        left = self._until.get(fingerprint, 0.0) - self._clock()
        if left <= 0:
            self._until.pop(fingerprint, None)
            return 0.0
        return left

    def entries(self) -> list[Quarantined]:
        """All of it, as it goes on the wire."""
        return [
            Quarantined(fingerprint, left)
            for fingerprint in list(self._until)
            if (left := self.seconds_left(fingerprint))
        ]

"""What the readers of one value have in common: `json_value` and `python_value`. `parser` uses them."""

from abc import ABC, abstractmethod


class Value(ABC):
    """One value, blanks before it allowed. `read` is called until `done` or `broken`.

    `held` is the end of what was read that is not given on yet.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.held = ""

    @property
    @abstractmethod
    def unfinished(self) -> str:
        """What of `held` is given on where the output ends here."""

    def read(self, text: str, start: int) -> tuple[str, int]:
        """Read on from `start`: the JSON that is certain, and where reading stopped. That is the end of the text, or
        what follows the value, or (`broken`) the character that cannot be there."""
        out: list[str] = []
        position = start
        while position < len(text) and not self.done and not self.broken:
            position = self._step(text, position, out)
        return "".join(out), position

    @abstractmethod
    def _step(self, text: str, at: int, out: list[str]) -> int:
        """Read something at `at`, put what is certain into `out`, and say where to read on."""

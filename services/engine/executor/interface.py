"""What the engine's loop asks of whatever computes tokens: a real model, or a simulated one.

Implementations: `torch_executor` (a model on a CPU or a GPU) and `simulated` (a timing model).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.engine.request import Request, SampledToken, Step
from shared.protocol import ModelLimits


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What WELCOME tells of the model. `fingerprint` is equal for equal weights of equal type and rounding, and
    cheap to make. `folder` holds its files, for what is read later. `device` is where it runs, "cpu" or "cuda"."""

    name: str
    fingerprint: str
    limits: ModelLimits
    folder: Path | None = None
    device: str = "cuda"


class Executor(Protocol):
    """Owns the weights, the KV pool's memory and the sampler. Used by the engine's loop thread alone."""

    @property
    def description(self) -> ModelDescription: ...

    @property
    def num_blocks(self) -> int:
        """How many KV blocks of `block_size` tokens the pool has; block ids are 0 to num_blocks - 1."""
        ...

    def execute(self, step: Step) -> list[SampledToken]:
        """Run one step: write the KV of every scheduled token to its slot, and sample where the step reaches
        a request's last token, among the tokens of `step.token_masks` where those are set. Returns one entry for
        each of `step.scheduled`, in order (an entry that did not sample has neither token nor error). A fault that
        concerns one request comes back as its `error`; an exception means that the engine cannot go on."""
        ...

    def release(self, request: Request) -> None:
        """Forget what is kept for this request (finished, aborted or preempted). Unknown ones are ignored."""
        ...

    def take_memory(self) -> bool:
        """Take a piece of the memory that steps will need, where the system gives it only as it is written, which may
        hold a step up. Some milliseconds, for when there is nothing else to do. False: nothing is left to take."""
        ...

    def close(self) -> None:
        """Free what the process holds. Called once, after the last step."""
        ...

"""Logits processors: plug-ins that change the logits of the whole batch, before anything is drawn.

docs/logits-processors.md is the guide for those who write one; `sampler` calls them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from services.engine.request import Request, RequestKey

ENTRY_POINT_GROUP = "tandem.logits_processors"


class LogitsProcessorFault(RuntimeError):
    """A processor could not be loaded, raised, or broke its contract; the message names it."""


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """What a processor is made with. The logits have `vocab_size` columns."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True, slots=True)
class BatchChanges:
    """How this step's rows differ from those of the step before. All of it happens at once: `removed` and the
    first number of `moved` are rows of the old batch, `added` and the second number rows of the new one.

    A removed request may come back: it was preempted, or a step passed it by. Then it is added again, with its
    tokens so far. `fresh`: forget all rows, everything in this batch is in `added` (the first batch, and the
    one after a fault). `Request.token_ids` grows by each token that is sampled: read it, never change it.
    """

    removed: list[tuple[int, RequestKey]] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)
    added: list[tuple[int, Request]] = field(default_factory=list)
    fresh: bool = False

    def __bool__(self) -> bool:
        return bool(self.removed or self.moved or self.added or self.fresh)


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes the logits of the rows that it cares for."""

    def on_batch(self, changes: BatchChanges) -> None:
        """The rows have changed. Called before `apply`, only when there are changes."""
        ...

    def apply(self, logits: Tensor) -> Tensor:
        """float32 logits [rows, vocab] in, the same shape out: a new tensor, or this one changed in place."""
        ...


def load_logits_processors(context: ProcessorContext) -> list[LogitsProcessor]:
    """One processor of each entry point of the group "tandem.logits_processors", in the order of their names.

    An entry point names a class or function that takes a ProcessorContext. Raises LogitsProcessorFault.
    """
    points = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)
    return [_load(point, context) for point in points]


def _load(point: EntryPoint, context: ProcessorContext) -> LogitsProcessor:
    origin = f"logits processor {point.name!r} ({point.value}, of {point.dist.name if point.dist else 'no package'})"
    try:
        processor = point.load()(context)
    except Exception as error:
        raise LogitsProcessorFault(f"{origin} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(processor, LogitsProcessor):
        raise LogitsProcessorFault(f"{origin} made a {type(processor).__name__}, which lacks on_batch or apply")
    return processor


class ProcessorChain:
    """The processors of one sampler, one after the other, and the rows that they were last told of."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = list(processors)
        self._requests: list[Request] = []
        self._fresh = True

    def __bool__(self) -> bool:
        return bool(self._processors)

    def apply(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """Tell every processor of the changes, then pass the logits through. Raises LogitsProcessorFault; after
        that nothing is known of what a processor remembers, so the next batch starts it afresh."""
        changes = self._changes(requests)
        self._fresh = True
        for processor in self._processors:
            name = type(processor).__name__
            try:
                if changes:
                    processor.on_batch(changes)
                result = processor.apply(logits)
            except Exception as error:
                raise LogitsProcessorFault(
                    f"logits processor {name} failed: {type(error).__name__}: {error}"
                ) from error
            if not isinstance(result, Tensor):
                raise LogitsProcessorFault(f"logits processor {name} returned {type(result).__name__}, not a tensor")
            if (result.shape, result.dtype, result.device) != (logits.shape, logits.dtype, logits.device):
                raise LogitsProcessorFault(
                    f"logits processor {name} returned {result.dtype} {tuple(result.shape)} on {result.device} "
                    f"for {logits.dtype} {tuple(logits.shape)} on {logits.device}"
                )
            logits = result
        self._requests = list(requests)
        self._fresh = False
        return logits.contiguous()

    def _changes(self, requests: Sequence[Request]) -> BatchChanges:
        if self._fresh:
            return BatchChanges(added=list(enumerate(requests)), fresh=True)
        old = {id(request): row for row, request in enumerate(self._requests)}
        changes = BatchChanges()
        for row, request in enumerate(requests):
            before = old.pop(id(request), None)
            if before is None:
                changes.added.append((row, request))
            elif before != row:
                changes.moved.append((before, row))
        changes.removed.extend((row, self._requests[row].key) for row in sorted(old.values()))
        return changes

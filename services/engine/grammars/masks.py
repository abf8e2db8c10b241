"""Which tokens may come next, for all rows of a step at once: filled beside the forward pass, used by the sampler.

A mask depends on the token before it alone, so the work begins when the step is scheduled and is done by the time
that the model has its logits.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from services.engine.grammars.matcher import GrammarMatcher
from services.engine.model.cpu_threads import usable_threads

logger = logging.getLogger(__name__)

BITS = 32
MAX_THREADS = 8

Mask = NDArray[np.int32]


class TokenMasks:
    """The masks of one step. Row i of `bitmask` belongs to `rows[i]`, a place in `Step.scheduled`: int32 words, bit
    id % 32 of word id // 32 set where the token may come. Rows without a grammar are -1 throughout."""

    def __init__(self, rows: Sequence[int], bitmask: Mask, words: int, filled: Future[None]) -> None:
        self._rows = list(rows)
        self._bitmask = bitmask
        self._words = words
        self._filled = filled

    def wait(self) -> None:
        """Until then nobody else may touch the matchers."""
        self._filled.result()

    def bitmask(self, rows: Sequence[int]) -> Mask:
        """int32 [len(rows), ceil(vocab / 32)], of some or all of the rows, in the order asked for."""
        self.wait()
        bitmask = self._bitmask
        if list(rows) != self._rows:
            places = {row: place for place, row in enumerate(self._rows)}
            bitmask = bitmask[[places[row] for row in rows]]
        return np.ascontiguousarray(bitmask[:, : self._words])


class MaskFiller:
    """Fills masks in threads of its own; the loop only hands them the matchers. They start with the first grammar."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int], threads: int | None = None) -> None:
        """`threads`: as many as the model may use on a CPU; all usable ones where it is None."""
        self._threads = min(MAX_THREADS, threads or usable_threads())
        self._words = -(-vocab_size // BITS)
        # A model without eos gets one in llguidance's table, behind its own tokens.
        self._filled_words = -(-(vocab_size + (not eos_ids)) // BITS)
        self._thread: ThreadPoolExecutor | None = None
        self._no_eos = np.full(self._filled_words, -1, dtype=np.int32)
        for token_id in eos_ids:
            self._no_eos.view(np.uint32)[token_id // BITS] &= ~np.uint32(1 << token_id % BITS)
        self._eos_bits = [(int(word), ~self._no_eos[word]) for word in np.flatnonzero(self._no_eos != -1)]

    def start(self, rows: Sequence[int], matchers: Sequence[GrammarMatcher | None]) -> TokenMasks:
        """Begin to fill the masks of a step's rows that sample; None where a row has no grammar."""
        from llguidance import LLExecutor

        if self._thread is None:
            # As many as the model's on a CPU: a model's thread that is kept from its core for a moment keeps the
            # others waiting, so they are all better kept for a shorter one.
            self._executor = LLExecutor(self._threads)
            # One thread waits for the others, which are llguidance's.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        bitmask = np.empty((len(rows), self._filled_words), dtype=np.int32)
        work: list[tuple[GrammarMatcher, int]] = []
        for place, matcher in enumerate(matchers):
            if matcher is None or matcher.error is not None:
                bitmask[place] = -1
            else:
                work.append((matcher, place))
        return TokenMasks(rows, bitmask, self._words, self._thread.submit(self._fill, work, bitmask))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _fill(self, work: Sequence[tuple[GrammarMatcher, int]], bitmask: Mask) -> None:
        if not work:
            return
        try:
            self._executor.unsafe_compute_mask_ptr(
                [(matcher.matcher, place) for matcher, place in work],
                bitmask.ctypes.data,
                self._filled_words * bitmask.itemsize,
                len(bitmask),
            )
        except BaseException as error:  # a mistake in how it is called, or a panic: the engine goes on without these
            logger.exception("The token masks of %d requests could not be filled", len(work))
            for matcher, place in work:
                matcher.error = f"the token mask could not be filled: {error}"
                bitmask[place] = -1
            return
        for matcher, place in work:
            # Quick, for most: while Python runs here, the loop's thread waits for the interpreter.
            if matcher.matcher.is_stopped():
                matcher.check_mask()
                if matcher.error is not None:
                    # It fails when the step is over; until then its row must hold something to sample.
                    bitmask[place] = -1
                    continue
            if matcher.keeps_eos_out and any(bitmask[place, word] & bit for word, bit in self._eos_bits):
                without = bitmask[place] & self._no_eos
                if without.any():
                    bitmask[place] = without

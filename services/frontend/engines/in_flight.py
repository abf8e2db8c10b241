"""One generation on its way: what was asked, what came of it so far, and which engine has it now.

`dispatch` decides where it goes, `connection` carries it and delivers its output here.
"""

import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from services.frontend.generation import Generation, GenerationError
from shared.protocol import Add, RequestOutput, pack_token_ids

if TYPE_CHECKING:
    from services.frontend.engines.connection import EngineConnection

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class InFlight:
    """`wire_id` names this attempt on the link. Each attempt gets its own, so that whatever an engine still
    says of an earlier one finds nobody. `avoid` are engines that lost or refused it."""

    generation: Generation
    output_token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    connection: "EngineConnection | None" = None
    wire_id: int = 0
    fingerprint: str = ""  # of the weights that made the output so far
    losses: int = 0
    avoid: set["EngineConnection"] = field(default_factory=set)
    waiting_since: float | None = None
    tokens_when_waiting: int = 0
    has_cached_tokens: bool = False
    has_prompt_logprobs: bool = False
    on_progress: Callable[[], None] | None = None  # after each output, while somebody waits for it

    @property
    def request_id(self) -> int:
        return self.generation.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.generation.prompt_token_ids) + len(self.output_token_ids)

    def add_message(self) -> Add:
        """The ADD for this attempt, which goes on from the output so far."""
        generation = self.generation
        sampling = generation.sampling
        if self.has_prompt_logprobs:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Add(
            request_id=self.wire_id,
            prompt_token_ids=pack_token_ids(generation.prompt_token_ids),
            sampling=sampling,
            output_token_ids=pack_token_ids(self.output_token_ids),
            priority=generation.priority,
            arrival_time=generation.arrival_time,
            deadline=generation.deadline,
            cache_salt=generation.cache_salt,
            trace_context=generation.trace.next_attempt(),
        )

    def attempt_ended(self, outcome: str, error: str | None = None) -> None:
        """For the trace: whichever engine has it now, has it no longer."""
        self.generation.trace.ended(outcome, len(self.output_token_ids), error)

    def deliver(self, output: RequestOutput) -> bool:
        """Give the sink an output of the present attempt. True: the generation is over for the sink."""
        if output.cached_tokens is not None:
            self.generation.trace.first_output(output.cached_tokens)
            if self.has_cached_tokens:
                output.cached_tokens = None
            else:
                self.generation.first_output_at = time.perf_counter()
            self.has_cached_tokens = True
        if output.prompt_logprobs is not None:
            if self.has_prompt_logprobs:
                output.prompt_logprobs = None
            self.has_prompt_logprobs = True
        output.request_id = self.generation.request_id
        try:
            self.output_token_ids.fromlist(output.token_ids)
            if len(self.output_token_ids) > self.generation.sampling.max_tokens:
                # Nothing else would bound what an engine gone wrong makes this process hold.
                message = f"the engine made more than the {self.generation.sampling.max_tokens} tokens asked for"
                logger.error("request %d is ended: %s", self.request_id, message)
                self.fail(GenerationError(message, 500))
                return True
            over = self.generation.sink.accept(output)
        except Exception:
            # One request's trouble is that request's alone.
            logger.exception("request %d: its output could not be taken; it is ended", self.request_id)
            self.fail(GenerationError("the output of this request could not be processed", 500))
            return True
        if self.on_progress is not None:
            self.on_progress()
        return over

    def fail(self, error: GenerationError) -> None:
        """End the generation with an error; the sink's own failure harms nobody else."""
        try:
            self.generation.sink.fail(error)
        except Exception:
            logger.exception("request %d: its sink failed while it was told of: %s", self.request_id, error.message)

"""A request as the engine sees it: token ids, how many of them the KV cache holds, and where.

The scheduler owns these fields; the executor and the sampler read them, and keep what they need of their own
under `key`.
"""

import enum
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.protocol import FinishReason, TokenLogprobs
from shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from services.engine.grammars import GrammarMatcher, TokenMasks


class RequestStatus(enum.Enum):
    """PREPARING requests are unknown to the scheduler until their grammar is there. WAITING ones hold no blocks (a
    preempted one is WAITING again); FINISHED ones none any more."""

    PREPARING = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Unique in this engine: the frontend's ROUTER identity (its boot id) and the frontend's own counter."""

    peer: bytes
    request_id: int


@dataclass(slots=True, eq=False)
class Request:
    """`token_ids` is the prompt and then every output token. The KV cache holds the first
    `num_computed_tokens` of them, in the blocks of `block_table`. Chunked prefill, prefix hits, preemption
    and resumption are all this one number coming closer to, or falling behind, `len(token_ids)`."""

    key: RequestKey
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0
    arrival_time: float = 0.0  # Unix seconds
    deadline: float | None = None  # Unix seconds
    cache_salt: str = ""
    trace_context: list[str] = field(default_factory=list)

    status: RequestStatus = RequestStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)  # of the full blocks of token_ids, as far as known
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # prefix-cache hits at the first admission
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    # Set once when the request is made, so that a step need not look them up again.
    stop_ids: frozenset[int] = frozenset()  # eos (unless ignored) and stop_token_ids
    max_total_tokens: int = sys.maxsize  # len(token_ids) at which it ends: max_tokens or the model's context
    arrival_index: int = 0  # breaks ties between equal arrival times

    # How far its blocks are shared, and the last shared block's serial (see kv_cache/block_pool).
    num_stored_blocks: int = 0
    last_stored_serial: int = 0

    # The chunks' shares so far; None where none are asked for, or the first output has carried them.
    prompt_logprobs: list[TokenLogprobs] | None = None
    has_output: bool = False  # whether this engine has sent an output of it

    # When it was queued, and when first admitted, in seconds of time.perf_counter.
    queued_at: float = 0.0
    admitted_at: float = 0.0
    # Where its output must follow a grammar; it has read the output so far, whatever became of the KV blocks.
    grammar: "GrammarMatcher | None" = None

    @property
    def order(self) -> tuple[int, float, int]:
        """The lower runs first, and is preempted last."""
        return (self.priority, self.arrival_time, self.arrival_index)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output so far, those of earlier engines included: what min_tokens and max_tokens count."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: tokens `start` to `start + num_tokens` of its `token_ids`."""

    request: Request
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this step reaches the last known token, so that a next one is sampled."""
        return self.start + self.num_tokens == len(self.request.token_ids)


@dataclass(slots=True)
class Step:
    """What the scheduler chose for one run of the model. Every block that the step writes to is allocated.

    Decodes come first (`num_tokens` 1), then prefills, so that an executor can treat the two ends apart.
    """

    scheduled: list[ScheduledRequest]
    sample_seconds: float = 0.0  # of the executor's time, what went into choosing tokens; it fills this in
    # Of those that sample, where any of them has a grammar; still being filled when the step is run.
    token_masks: "TokenMasks | None" = None

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_tokens for scheduled in self.scheduled)


@dataclass(slots=True)
class SampledToken:
    """What one scheduled request got: a token id, or the error that ends this request and no other.

    `prompt_logprobs` belong to the prompt tokens after those that this step computed (a chunk's share).
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None

"""What one request asks of the sampler and when it ends, as it travels inside ADD.

The frontend makes one from the client's JSON and checks it against the model's limits; the engine checks
it again before it queues the request, since a wrong id would write into a neighbour's row of the batch.
"""

from collections.abc import Collection
from typing import Annotated

import msgspec

from shared.structured_output import StructuredOutput, structured_output_fault

MAX_LOGPROBS = 20
MAX_LIST_LENGTH = 4096
MAX_SEED = 2**63 - 1

TokenIds = Annotated[list[int], msgspec.Meta(max_length=MAX_LIST_LENGTH)]
BadWords = Annotated[list[TokenIds], msgspec.Meta(max_length=MAX_LIST_LENGTH)]
LogitBias = Annotated[dict[int, float], msgspec.Meta(max_length=MAX_LIST_LENGTH)]


class SamplingParams(msgspec.Struct, array_like=True, kw_only=True):
    """Positional on the wire: a new field goes to the end and has a default.

    `seed` is always set (the frontend draws one where the client gave none), so that every request is a
    pure function of its tokens and goes on identically on another engine. `top_k` 0 and `min_p` 0 are off.
    `logprobs` counts the alternatives beside the chosen token: None is off, 0 is the chosen token alone.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: TokenIds = []
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: LogitBias = {}
    allowed_token_ids: TokenIds | None = None
    bad_words_token_ids: BadWords = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None


class InvalidSamplingParams(ValueError):
    """One field is out of range; `field` is its name in SamplingParams."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


def check_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidSamplingParams for the first field that the sampler could not carry out.

    >>> check_sampling_params(SamplingParams(top_p=0.0), vocab_size=100)
    Traceback (most recent call last):
    shared.sampling_params.InvalidSamplingParams: top_p must be over 0 and at most 1, not 0.0
    """
    # max_tokens 0 is meant: a prompt is only scored (prompt_logprobs), nothing is generated.
    if params.max_tokens < 0:
        raise InvalidSamplingParams("max_tokens", f"must be at least 0, not {params.max_tokens}")
    _require_number("temperature", params.temperature, 0.0, 100.0)
    if not 0.0 < params.top_p <= 1.0:  # NaN too, here and below
        raise InvalidSamplingParams("top_p", f"must be over 0 and at most 1, not {params.top_p}")
    if params.top_k < 0:
        raise InvalidSamplingParams("top_k", f"must be 0 (off) or more, not {params.top_k}")
    _require_number("min_p", params.min_p, 0.0, 1.0)
    if not 0 <= params.seed <= MAX_SEED:
        raise InvalidSamplingParams("seed", f"must be from 0 to {MAX_SEED}, not {params.seed}")
    if not 0 <= params.min_tokens <= params.max_tokens:
        message = f"must be from 0 to max_tokens ({params.max_tokens}), not {params.min_tokens}"
        raise InvalidSamplingParams("min_tokens", message)
    # A logit divided by less would no longer be a number of float32.
    _require_number("repetition_penalty", params.repetition_penalty, 0.01, 100.0)
    _require_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _require_number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _require_count("logprobs", params.logprobs)
    _require_count("prompt_logprobs", params.prompt_logprobs)
    _require_in_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
    _require_in_vocabulary("logit_bias", params.logit_bias, vocab_size)
    for bias in params.logit_bias.values():
        _require_number("logit_bias", bias, -100.0, 100.0)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise InvalidSamplingParams("allowed_token_ids", "must not be empty")
        _require_in_vocabulary("allowed_token_ids", params.allowed_token_ids, vocab_size)
    for word in params.bad_words_token_ids:
        if not word:
            raise InvalidSamplingParams("bad_words", "must not hold an empty word")
        _require_in_vocabulary("bad_words", word, vocab_size)
    if params.structured_output is not None:
        fault = structured_output_fault(params.structured_output)
        if fault is not None:
            raise InvalidSamplingParams("structured_output", fault)


def _require_number(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidSamplingParams(field, f"must be from {low:g} to {high:g}, not {value}")


def _require_count(field: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidSamplingParams(field, f"must be from 0 to {MAX_LOGPROBS}, not {count}")


def _require_in_vocabulary(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    # Thousands of ids that are right are passed in one go.
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        message = f"holds token id {wrong}, which is outside the vocabulary (0 to {vocab_size - 1})"
        raise InvalidSamplingParams(field, message)

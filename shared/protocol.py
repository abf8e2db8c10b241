"""The messages on the link between a frontend and an engine: the only thing that both sides must agree on.

Each message is one msgpack array: a type tag, then the fields in order. A field is only ever added at the
end, with a default: a reader ignores trailing fields that it does not know and fills in those that it does
not get, so version N talks to N-1 during a rolling update (tests/unit/shared holds golden bytes).

A frontend process has one DEALER to each engine, whose identity is the frontend's boot id; an engine has
one ROUTER. The frontend says HELLO at every (re)connection and the engine answers WELCOME; before that an
engine accepts nothing else. Request ids are the frontend's own counter, so (boot id, request id) is unique
in the fleet; the client's ids never cross the link.
"""

import enum
import secrets
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from shared.sampling_params import SamplingParams

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_REQUESTS_PER_MESSAGE = 65_536
MAX_TOKENS_PER_REQUEST = 4 * 1024 * 1024
MAX_BLOCK_HASHES_PER_MESSAGE = 1_000_000
MAX_QUARANTINED = 256
BOOT_ID_BYTES = 12
TOKEN_ID_BYTES = 4

BootId = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
PackedTokenIds = Annotated[bytes, msgspec.Meta(max_length=TOKEN_ID_BYTES * MAX_TOKENS_PER_REQUEST)]
ShortText = Annotated[str, msgspec.Meta(max_length=4096)]
BlockHashes = Annotated[list[int], msgspec.Meta(max_length=MAX_BLOCK_HASHES_PER_MESSAGE)]
# A request's first message may carry the logprobs of its whole prompt, one entry a token.
LogprobList = Annotated[list["TokenLogprobs"], msgspec.Meta(max_length=MAX_TOKENS_PER_REQUEST)]


class FinishReason(enum.IntEnum):
    """Why the engine ended a request. Stop strings are the frontend's: it ends those with ABORT."""

    STOP = 0  # an eos id, or one of stop_token_ids
    LENGTH = 1  # max_tokens, or the model's context
    ABORT = 2  # an ABORT was carried out, or the request's deadline passed
    ERROR = 3  # this request failed and no other would help: see RequestOutput.error
    OVERLOADED = 4  # refused before any work: the engine's waiting queue is full; another may take it
    HANDED_OVER = 5  # the engine drains: another must go on from the tokens so far


class Load(msgspec.Struct, array_like=True):
    """How busy an engine is, once a message: what routing and scaling steer by."""

    running_requests: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0  # prompt tokens that no step has computed yet
    free_blocks: int = 0
    total_blocks: int = 0
    tokens_per_second: float = 0.0  # generated, over the last few seconds


class ModelLimits(msgspec.Struct, array_like=True):
    """What a frontend must know of the model to refuse a bad request before it is sent."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: Annotated[list[int], msgspec.Meta(max_length=1024)]
    block_size: int
    max_waiting_requests: int = 0


class TokenLogprobs(msgspec.Struct, array_like=True):
    """One token's logprob and rank (1 is the likeliest), and the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: Annotated[list[int], msgspec.Meta(max_length=64)] = []
    top_logprobs: Annotated[list[float], msgspec.Meta(max_length=64)] = []


class RequestOutput(msgspec.Struct, array_like=True):
    """What one step made of one request. `finish_reason` is set once, in the request's last output.

    `stop_token_id` is the id that ended it (the last of `token_ids`), where one did. `cached_tokens` comes
    with the first output: prompt tokens that the prefix cache already held. `logprobs` has one entry for
    each of `token_ids`; `prompt_logprobs` one for each prompt token but the first, in the first output.
    """

    request_id: int
    token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS_PER_REQUEST)] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int | None = None
    error: ShortText | None = None
    logprobs: LogprobList | None = None
    prompt_logprobs: LogprobList | None = None


class Hello(msgspec.Struct, array_like=True, tag=1):
    """Frontend to engine, first. `boot_id` names the frontend's process (it is the DEALER's identity too)."""

    protocol_version: int
    boot_id: BootId


class Welcome(msgspec.Struct, array_like=True, tag=2):
    """Engine to frontend, in answer to HELLO. A `boot_id` that changed means a new process: whatever was in
    flight is lost. Engines of one `model` with different `fingerprint` serve different weights,
    or the same in another type or rounding."""

    protocol_version: int
    boot_id: BootId
    model: ShortText
    fingerprint: ShortText
    limits: ModelLimits
    load: Load
    draining: bool = False


class Add(msgspec.Struct, array_like=True, tag=3):
    """Frontend to engine: generate. `output_token_ids` holds what other engines already made of the request;
    positions, min_tokens and max_tokens count on from there. A lower `priority` runs first, then the earlier
    `arrival_time` (Unix seconds). `deadline` is in Unix seconds too. `trace_context` is W3C: traceparent,
    tracestate. `cache_salt` separates tenants in the prefix cache."""

    request_id: int
    prompt_token_ids: PackedTokenIds
    sampling: SamplingParams
    output_token_ids: PackedTokenIds = b""
    priority: int = 0
    arrival_time: float = 0.0
    deadline: float | None = None
    cache_salt: ShortText = ""
    trace_context: Annotated[list[ShortText], msgspec.Meta(max_length=2)] = []


class Abort(msgspec.Struct, array_like=True, tag=4):
    """Frontend to engine: stop working for these, and send nothing more of them. Unknown ids are ignored."""

    request_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_REQUESTS_PER_MESSAGE)]


class Outputs(msgspec.Struct, array_like=True, tag=5):
    """Engine to frontend: what one step made of this frontend's requests, and what changed in the cache."""

    outputs: Annotated[list[RequestOutput], msgspec.Meta(max_length=MAX_REQUESTS_PER_MESSAGE)]
    load: Load
    stored_block_hashes: BlockHashes = []
    evicted_block_hashes: BlockHashes = []


class Quarantined(msgspec.Struct, array_like=True):
    """A prompt under which engines died, by its fingerprint (shared/quarantine.py), and for how long from now on it is
    refused. 0 seconds: no longer."""

    fingerprint: int
    seconds: float


class Heartbeat(msgspec.Struct, array_like=True, tag=6):
    """Both ways, when nothing else was sent for a while. The engine's carries its load and cache changes, the
    frontend's what it has in quarantine; this one is also sent when that has changed."""

    load: Load | None = None
    stored_block_hashes: BlockHashes = []
    evicted_block_hashes: BlockHashes = []
    quarantined: Annotated[list[Quarantined], msgspec.Meta(max_length=2 * MAX_QUARANTINED)] = []


class Goodbye(msgspec.Struct, array_like=True, tag=7):
    """Engine to frontend: it drains and takes no new request. Frontend to engine: it leaves; abort its own. To an
    engine that drains a frontend says so once it has all of its outputs, and the engine ends only then (or after a
    few seconds, for a frontend of a version that does not)."""

    reason: ShortText = ""


ToEngine = Hello | Add | Abort | Heartbeat | Goodbye
ToFrontend = Welcome | Outputs | Heartbeat | Goodbye


class MalformedMessage(ValueError):
    """The bytes are no message of this protocol. The peer that sent them is at fault, and nobody else."""


Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()
_to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
_to_frontend_decoder = msgspec.msgpack.Decoder(ToFrontend)


def encode(message: ToEngine | ToFrontend) -> bytes:
    """The message as it goes on the wire."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes | memoryview) -> ToEngine:
    """Decode what a frontend sent. Raises MalformedMessage, and only that."""
    return _decode(_to_engine_decoder, data)


def decode_to_frontend(data: bytes | memoryview) -> ToFrontend:
    """Decode what an engine sent. Raises MalformedMessage, and only that."""
    return _decode(_to_frontend_decoder, data)


def _decode(decoder: msgspec.msgpack.Decoder[Message], data: bytes | memoryview) -> Message:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"{len(data)} bytes are over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error


def new_boot_id() -> bytes:
    """A name for this process, new at every start."""
    # A ROUTER reserves identities that begin with a zero byte for itself.
    return b"t" + secrets.token_bytes(BOOT_ID_BYTES - 1)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32: a tenth of the time and half of the bytes of a msgpack array."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(data: bytes) -> list[int]:
    """The inverse of pack_token_ids. Raises MalformedMessage where the bytes are not whole int32."""
    if len(data) % TOKEN_ID_BYTES:
        raise MalformedMessage(f"{len(data)} bytes are not a whole number of int32 token ids")
    packed = array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()

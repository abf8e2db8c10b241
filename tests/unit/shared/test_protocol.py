"""The link's messages: round trip, bytes that never change, and bytes that a hostile peer may send."""

import contextlib
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.protocol import (
    MAX_MESSAGE_BYTES,
    Abort,
    Add,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    MalformedMessage,
    ModelLimits,
    Outputs,
    Quarantined,
    RequestOutput,
    TokenLogprobs,
    Welcome,
    decode_to_engine,
    decode_to_frontend,
    encode,
    new_boot_id,
    pack_token_ids,
    unpack_token_ids,
)
from shared.sampling_params import SamplingParams
from shared.structured_output import StructuredOutput

# A new field goes to the end: these bytes stay a prefix of what is sent, and decode for ever.
TO_ENGINE = {
    "930101c404626f6f74": Hello(1, b"boot"),
    "9a0307c4080100000002000000dc001203cb3ff0000000000000cb3ff000000000000000cb0000000000000000"
    "0500c29109cb3ff0000000000000cb0000000000000000cb00000000000000008104cb3ff8000000000000c090"
    "c0c0c0c40403000000ffcb4029000000000000cb402b000000000000a473616c7491a430302d78": Add(
        7,
        pack_token_ids([1, 2]),
        SamplingParams(max_tokens=3, seed=5, stop_token_ids=[9], logit_bias={4: 1.5}),
        pack_token_ids([3]),
        -1,
        12.5,
        13.5,
        "salt",
        ["00-x"],
    ),
    "9a0308c40401000000dc001203cb3ff0000000000000cb3ff000000000000000cb00000000000000000000c290cb3ff0000000000000"
    "cb0000000000000000cb000000000000000080c090c0c095a57265676578a2612ba33c743ea43c2f743ec3c40000cb0000000000000000"
    "c0a090": Add(
        8,
        pack_token_ids([1]),
        SamplingParams(
            max_tokens=3,
            structured_output=StructuredOutput(
                kind="regex", value="a+", reasoning_start="<t>", reasoning_end="</t>", reasoning_opened=True
            ),
        ),
    ),
    "9204920102": Abort([1, 2]),
    "9506c0909090": Heartbeat(None),
    "9506c090909192cfffffffffffffffffcb3ff8000000000000": Heartbeat(quarantined=[Quarantined(2**64 - 1, 1.5)]),
    "9207a3627965": Goodbye("bye"),
}
# What earlier versions sent, before fields were added.
FROM_EARLIER_FRONTENDS = {
    "without structured_output": (
        "9a0307c4080100000002000000dc001103cb3ff0000000000000cb3ff000000000000000cb0000000000"
        "0000000500c29109cb3ff0000000000000cb0000000000000000cb00000000000000008104cb3ff8000000000000c090c0c0c404030000"
        "00ffcb4029000000000000cb402b000000000000a473616c7491a430302d78",
        next(message for message in TO_ENGINE.values() if isinstance(message, Add)),
    ),
    "without quarantined": ("9406c09090", Heartbeat(None)),
}
TO_FRONTEND = {
    "980201c406656e67696e65a56d6f64656ca57072696e7495643291021007960102030405cb401a000000000000c3": Welcome(
        1, b"engine", "model", "print", ModelLimits(100, 50, [2], 16, 7), Load(1, 2, 3, 4, 5, 6.5), True
    ),
    "95059198079105000504c0919505cbbfe000000000000001910591cbbfe0000000000000c0960000000000cb0000000000000000"
    "91019102": Outputs(
        [RequestOutput(7, [5], FinishReason.STOP, 5, 4, None, [TokenLogprobs(5, -0.5, 1, [5], [-0.5])])],
        Load(),
        [1],
        [2],
    ),
    "9506c0909090": Heartbeat(None),
    "9207a3627965": Goodbye("bye"),
}

int64 = st.integers(-(2**63), 2**64 - 1)
token_ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50)
numbers = st.floats(allow_nan=False)
loads = st.builds(Load, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**9), tokens_per_second=numbers)
samplings = st.builds(
    SamplingParams,
    max_tokens=int64,
    temperature=numbers,
    seed=int64,
    ignore_eos=st.booleans(),
    stop_token_ids=token_ids,
    logit_bias=st.dictionaries(int64, numbers, max_size=5),
    allowed_token_ids=st.none() | token_ids,
    bad_words_token_ids=st.lists(token_ids, max_size=3),
    logprobs=st.none() | st.integers(0, 20),
)
logprobs = st.lists(
    st.builds(TokenLogprobs, int64, numbers, int64, token_ids, st.lists(numbers, max_size=5)), max_size=3
)
to_engine = st.one_of(
    st.builds(Hello, int64, st.binary(min_size=1, max_size=64)),
    st.builds(
        Add,
        int64,
        st.binary(max_size=64),
        samplings,
        st.binary(max_size=64),
        int64,
        numbers,
        st.none() | numbers,
        st.text(max_size=20),
        st.lists(st.text(max_size=20), max_size=2),
    ),
    st.builds(Abort, st.lists(int64, max_size=20)),
    st.builds(Heartbeat, st.none() | loads),
    st.builds(Goodbye, st.text(max_size=20)),
)
request_outputs = st.builds(
    RequestOutput,
    int64,
    token_ids,
    st.none() | st.sampled_from(FinishReason),
    st.none() | int64,
    st.none() | int64,
    st.none() | st.text(max_size=20),
    st.none() | logprobs,
    st.none() | logprobs,
)
hashes = st.lists(st.integers(0, 2**64 - 1), max_size=20)
to_frontend = st.one_of(
    st.builds(Outputs, st.lists(request_outputs, max_size=5), loads, hashes, hashes),
    st.builds(Heartbeat, st.none() | loads, hashes, hashes),
)


@given(to_engine)
def test_what_a_frontend_sends_arrives(message: object) -> None:
    assert decode_to_engine(encode(message)) == message  # type: ignore[arg-type]


@given(to_frontend)
def test_what_an_engine_sends_arrives(message: object) -> None:
    assert decode_to_frontend(encode(message)) == message  # type: ignore[arg-type]


@pytest.mark.parametrize(("golden", "message"), TO_ENGINE.items())
def test_golden_bytes_to_the_engine(golden: str, message: object) -> None:
    assert encode(message).hex() == golden  # type: ignore[arg-type]
    assert decode_to_engine(bytes.fromhex(golden)) == message


@pytest.mark.parametrize(("golden", "message"), FROM_EARLIER_FRONTENDS.values(), ids=FROM_EARLIER_FRONTENDS)
def test_golden_bytes_of_earlier_frontends(golden: str, message: object) -> None:
    assert decode_to_engine(bytes.fromhex(golden)) == message


@pytest.mark.parametrize(("golden", "message"), TO_FRONTEND.items())
def test_golden_bytes_to_the_frontend(golden: str, message: object) -> None:
    assert encode(message).hex() == golden  # type: ignore[arg-type]
    assert decode_to_frontend(bytes.fromhex(golden)) == message


def test_trailing_fields_of_a_later_version_are_ignored() -> None:
    sampling = msgspec.to_builtins(SamplingParams(max_tokens=3))
    later = msgspec.msgpack.encode([3, 7, b"\1\0\0\0", [*sampling, "new"], b"", 0, 0.0, None, "", [], {"new": [1]}, 5])
    message = decode_to_engine(later)
    assert isinstance(message, Add)
    assert message.sampling.max_tokens == 3


def test_fields_that_an_earlier_version_lacks_get_their_defaults() -> None:
    message = decode_to_engine(msgspec.msgpack.encode([3, 7, b"\1\0\0\0", [5]]))
    assert message == Add(7, b"\1\0\0\0", SamplingParams(max_tokens=5))


HOSTILE = {
    "empty": b"",
    "no array": msgspec.msgpack.encode({"type": 1}),
    "unknown tag": msgspec.msgpack.encode([99, 1]),
    "the other direction": encode(Outputs([], Load())),
    "missing fields": msgspec.msgpack.encode([3, 7]),
    "wrong type": msgspec.msgpack.encode([4, "all"]),
    "id over 64 bits": msgspec.msgpack.encode([4, ["1" * 30]]),
    "boot id too long": encode(Hello(1, b"x" * 65)),
    "boot id empty": encode(Hello(1, b"")),
    "too many ids": msgspec.msgpack.encode([4, list(range(65_537))]),
    "too many stop ids": encode(Add(1, b"", SamplingParams(stop_token_ids=list(range(5000))))),
    "text that is not UTF-8": b"\x92\x07\xa2\xff\xff",
    "an array that claims 4 billion entries": b"\x92\x04\xdd\xff\xff\xff\xff",
    "bytes that claim 4 GiB": b"\x93\x01\x01\xc6\xff\xff\xff\xff",
    "deep nesting": b"\x92\x04" + b"\x91" * 100_000 + b"\x01",
    "deep nesting in an unknown field": b"\x93\x04\x90" + b"\x91" * 100_000 + b"\x01",
    "two messages": encode(Goodbye("a")) + encode(Goodbye("b")),
    "an extension type": b"\x92\x04\xd4\x05\x00",
    "larger than allowed": b"\0" * (MAX_MESSAGE_BYTES + 1),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_to_engine(data)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_decoded(data: bytes) -> None:
    for decode in (decode_to_engine, decode_to_frontend):
        with contextlib.suppress(MalformedMessage):
            decode(data)


@given(to_engine, st.data())
def test_damaged_messages_are_refused_or_decoded(message: object, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))  # type: ignore[arg-type]
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for candidate in (bytes(damaged), cut):
        with contextlib.suppress(MalformedMessage):
            decode_to_engine(candidate)


def test_not_a_number_travels_and_is_refused_later() -> None:
    message = decode_to_engine(encode(Add(1, b"", SamplingParams(temperature=math.nan))))
    assert isinstance(message, Add)
    assert math.isnan(message.sampling.temperature)


@given(token_ids)
def test_token_ids_pack_and_unpack(ids: list[int]) -> None:
    packed = pack_token_ids(ids)
    assert len(packed) == 4 * len(ids)
    assert unpack_token_ids(packed) == ids


def test_packed_token_ids_are_little_endian() -> None:
    assert pack_token_ids([1, 258, -1]) == b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\xff"


def test_half_a_token_id_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="5 bytes"):
        unpack_token_ids(b"12345")


def test_boot_ids_are_new_and_valid_identities() -> None:
    ids = {new_boot_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(boot_id[0] != 0 and len(boot_id) == 12 for boot_id in ids)

"""What a frontend and its process for grammars say to each other: a length of four bytes, and msgpack."""

import asyncio
import struct
from typing import BinaryIO

import msgspec

_LENGTH = struct.Struct("<I")


class Verdict(msgspec.Struct, array_like=True):
    """`error` is empty where the grammar can be served; `value` is then what goes to the engine. `place` is a path
    inside the client's value. `timed_out`: there was not enough time to tell."""

    value: str = ""
    error: str = ""
    place: str = ""
    timed_out: bool = False


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None where the stream has ended."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    return stream.read(_LENGTH.unpack(header)[0])


async def read_frame_soon(stream: asyncio.StreamReader) -> bytes:
    """The same on an event loop. Raises EOFError where the stream has ended."""
    header = await stream.readexactly(_LENGTH.size)
    return await stream.readexactly(_LENGTH.unpack(header)[0])

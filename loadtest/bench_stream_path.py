"""What one streamed token costs the frontend between the engine's message and the bytes for the client's socket.

    python -m loadtest.bench_stream_path [--streams 8 64 512] [--tokens 400]

Decoding, delivery, detokenizer, collector, chunk and JSON are the real ones, a chat answer a stream; the sockets are
left out. The cost must not depend on the number of streams. CPU microseconds a token, the best of several rounds.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from loadtest.bench_result import RESULTS, table, write_json
from services.frontend.engines.connection import EngineConnection
from services.frontend.engines.connection_state import ConnectionOwner
from services.frontend.engines.counts import DispatchCounts
from services.frontend.engines.in_flight import InFlight
from services.frontend.engines.link import LinkListener
from services.frontend.generation import Generation
from services.frontend.http.answer import AnswerHead
from services.frontend.http.chat_answer import ChatAnswer, ChatChunks
from services.frontend.http.choices import Choices
from services.frontend.http.logprobs import LogprobFormat
from services.frontend.http.stream_writer import StreamPump, StreamWriter
from services.frontend.http.usage import Usage
from services.frontend.output.collector import Collector
from services.frontend.output.processor import OutputOptions, OutputProcessor
from services.frontend.tokenizer import Tokenizer
from services.launcher.smollm2 import ensure_smollm2
from shared.protocol import (
    PROTOCOL_VERSION,
    FinishReason,
    Load,
    ModelLimits,
    Outputs,
    Quarantined,
    RequestOutput,
    Welcome,
    encode,
    new_boot_id,
)
from shared.sampling_params import SamplingParams

ROUNDS = 3


class Owner(ConnectionOwner):
    """Of the one connection, which never fails."""

    def __init__(self) -> None:
        self._counts = DispatchCounts()

    @property
    def counts(self) -> DispatchCounts:
        return self._counts

    def refusal(self, connection: EngineConnection, welcome: Welcome) -> str | None:
        return None

    def quarantined(self) -> list[Quarantined]:
        return []

    def state_changed(self, connection: EngineConnection) -> None: ...

    def handshake_failed(self, connection: EngineConnection) -> None: ...

    def survived(self, connection: EngineConnection) -> None: ...

    def finished(self, request: InFlight) -> None: ...

    def lost(self, connection: EngineConnection, requests: list[InFlight], died: bool) -> None:
        raise RuntimeError("the bench's engine was lost: its message could not be handled")

    def returned(self, connection: EngineConnection, request: InFlight, reason: FinishReason) -> None:
        raise RuntimeError(f"the bench's engine gave a request back: {reason}")


class Wire:
    """A link that takes everything and says nothing."""

    def send(self, data: bytes) -> bool:
        return True

    def reset(self) -> None: ...

    def close(self) -> None: ...


class Wires:
    """The transport that opens it."""

    def open(self, address: str, identity: bytes, listener: LinkListener) -> Wire:
        return Wire()

    async def close(self) -> None: ...


class Pool:
    """Hands generations to the connection."""

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection

    def submit(self, generation: Generation) -> None:
        self._connection.add(InFlight(generation), generation.request_id)

    def abort(self, request_id: int) -> None: ...


@dataclass(slots=True)
class Body:
    """Counts what would be written."""

    on_writable: Callable[[], None] | None = None
    is_writable: bool = True
    num_chunks: int = 0
    pieces: list[bytes] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        self.num_chunks += data.count(b"data: ")
        if not self.pieces:
            self.pieces.append(data)


async def measure(tokenizer: Tokenizer, streams: int, tokens: int) -> float:
    """CPU microseconds for each token of each stream."""
    connection = EngineConnection("bench", new_boot_id(), Owner(), Wires(), 1.0, 600.0, time.monotonic)
    connection.link_up()
    limits = ModelLimits(1 << 20, tokenizer.vocab_size, [2], 16)
    connection.link_received(encode(Welcome(PROTOCOL_VERSION, new_boot_id(), "m", "f", limits, Load())))
    pump, pool = StreamPump(), Pool(connection)
    bodies: list[Body] = []
    ids: list[int] = []
    running: list[asyncio.Task[bytes]] = []
    for _ in range(streams):
        collector = Collector(1)
        sink = OutputProcessor(tokenizer, OutputOptions(), collector, 0)
        generation = Generation("m", [1, 2, 3], SamplingParams(max_tokens=1 << 20), sink)
        choices = Choices(pool, [generation], collector)
        await choices.submit()
        chunks = ChatChunks(
            ChatAnswer(
                AnswerHead("chatcmpl", "chat.completion.chunk", "m"),
                1,
                Usage([3], 1, with_reasoning=True),
                LogprobFormat(tokenizer, 0),
                LogprobFormat(tokenizer, 0),
                (),
            )
        )
        body = Body()
        writer = StreamWriter(pump, body, choices, chunks.write, b": waiting\n\n", 15.0)  # type: ignore[arg-type]
        running.append(asyncio.ensure_future(writer.run()))
        bodies.append(body)
        ids.append(generation.request_id)
    words = tokenizer.encode("a ship that never came home, and the wind on the sea", add_special_tokens=False)
    steps = [
        encode(Outputs([RequestOutput(id_, [words[step % len(words)]]) for id_ in ids], Load()))
        for step in range(len(words))
    ]
    await asyncio.sleep(0)
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for step in range(tokens):
            connection.link_received(steps[step % len(steps)])
            while pump._pass_is_due:  # noqa: ASYNC110
                await asyncio.sleep(0)
        best = min(best, (time.process_time() - began) / (tokens * streams) * 1e6)
    # The role's chunk comes first.
    assert all(body.num_chunks == ROUNDS * tokens + 1 for body in bodies), [body.num_chunks for body in bodies][:3]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--tokens", type=int, default=0, help="of each stream (default: 100,000 of all together)")
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_stream_path.json")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.load(ensure_smollm2())
    result = {
        str(streams): uvloop.run(measure(tokenizer, streams, options.tokens or max(10, 100_000 // streams)))
        for streams in options.streams
    }
    print(table(["streams", "µs a token"], [(streams, f"{cost:.2f}") for streams, cost in result.items()]))
    write_json(options.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the link costs a frontend: microseconds of its loop for each RequestOutput, the sink's own work apart.

    python -m loadtest.bench_link

Engines (threads of another process) send OUTPUTS messages as fast as they are taken; the frontend's process
reads, decodes and delivers them to sinks that only count. CPU time of the frontend's thread, on uvloop, and, with the
link encrypted and without, of the whole process: ZMQ decrypts on its own thread. The cost must not grow with the number
of streams or of engines.
"""

import argparse
import asyncio
import functools
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
import zmq

from loadtest.bench_result import RESULTS, table, write_json
from services.frontend.engines import EnginePool
from services.frontend.engines.in_process_engine import InProcessEngine
from services.frontend.generation import Generation, GenerationError
from services.frontend.settings import EnginePoolSettings, FrontendSettings
from shared.link_keys import read_link_keys, write_link_keys
from shared.protocol import Load, Outputs, RequestOutput, decode_to_frontend, encode
from shared.sampling_params import SamplingParams

TOKENS = 200_000
REPEATS = 3


class CountingSink:
    count = 0

    def accept(self, output: RequestOutput) -> bool:
        CountingSink.count += 1
        return False

    def fail(self, error: GenerationError) -> None:
        """The pool stops with every request in flight: the bench is over."""


def send_to(router: zmq.Socket[bytes], identity: bytes, data: bytes) -> None:
    router.send_multipart([identity, data])


def run_engines(num_engines: int, per_message: int, link_keys: Path | None, pipe: Connection) -> None:
    """ROUTERs that answer HELLO; once told, they send messages for the requests that they were given."""
    context = zmq.Context()
    routers, engines = [], []
    for _ in range(num_engines):
        router = context.socket(zmq.ROUTER)
        router.set(zmq.ROUTER_MANDATORY, 1)
        if link_keys is not None:
            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_SECRETKEY, read_link_keys(link_keys, "engine").secret)
        router.bind("tcp://127.0.0.1:0")
        engine = InProcessEngine()
        engine.send = functools.partial(send_to, router)
        routers.append(router)
        engines.append(engine)
    pipe.send([router.get(zmq.LAST_ENDPOINT).decode().strip("\0").removeprefix("tcp://") for router in routers])
    poller = zmq.Poller()
    for router in routers:
        poller.register(router, zmq.POLLIN)
    to_send = 0
    while True:
        for router, engine in zip(routers, engines, strict=True):
            while router.poll(0):
                engine.receive(*router.recv_multipart())
        if pipe.poll(0 if to_send else 0.001):
            command = pipe.recv()
            if command is None:
                return
            to_send = command
            messages = []
            for router, engine in zip(routers, engines, strict=True):
                ((identity, peer),) = engine.peers.items()
                ids = list(peer.requests)
                for begin in range(0, len(ids), per_message):
                    outputs = [RequestOutput(id_, [1234]) for id_ in ids[begin : begin + per_message]]
                    messages.append((router, identity, encode(Outputs(outputs, Load()))))
        while to_send > 0:
            for router, identity, data in messages:
                router.send_multipart([identity, data])
                to_send -= per_message


async def measure(
    num_engines: int, per_message: int, streams_per_engine: int, link_keys: Path | None = None
) -> tuple[float, float]:
    """Microseconds of CPU for each RequestOutput: of the loop's thread, and of the process."""
    pipe, engine_pipe = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=run_engines, args=(num_engines, per_message, link_keys, engine_pipe), daemon=True
    )
    process.start()
    addresses = pipe.recv()
    settings = FrontendSettings.model_validate(
        {"routing": "round_robin", "heartbeat_timeout": 600, "heartbeat_interval": 60, "link_keys": link_keys}
    )
    engines = EnginePoolSettings.model_validate({"engine_addresses": addresses})
    pool = EnginePool("bench", settings, engines, lambda welcome: None)
    await pool.start()
    while len(pool._dispatcher.engines) < num_engines:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for _ in range(num_engines * streams_per_engine):
        pool.submit(Generation("bench", [1, 2, 3], SamplingParams(max_tokens=1 << 20), CountingSink()))
    await asyncio.sleep(0.3)
    best = best_of_process = float("inf")
    for _ in range(REPEATS):
        CountingSink.count = 0
        begin, begin_of_process = time.thread_time(), time.process_time()
        pipe.send(TOKENS)
        while CountingSink.count < TOKENS:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        best = min(best, (time.thread_time() - begin) / CountingSink.count * 1e6)
        whole = (time.process_time() - begin_of_process) / CountingSink.count * 1e6
        best_of_process = min(best_of_process, whole)
    await pool.stop()
    pipe.send(None)
    process.join()
    return best, best_of_process


def decode_cost(per_message: int) -> float:
    """Microseconds for each RequestOutput of msgspec's decoding alone: the floor."""
    data = encode(Outputs([RequestOutput(1_000_000 + index, [1234]) for index in range(per_message)], Load()))
    rounds = TOKENS // per_message
    begin = time.thread_time()
    for _ in range(rounds):
        decode_to_frontend(data)
    return (time.thread_time() - begin) / (rounds * per_message) * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_link.json")
    options = parser.parse_args(arguments)
    counts: list[dict[str, float]] = []
    for per_message, streams in ((1, 1), (64, 64), (256, 256), (64, 512)):
        (one, _), (eight, _) = (uvloop.run(measure(engines, per_message, streams)) for engines in (1, 8))
        decoding = decode_cost(per_message)
        counts.append({"message": per_message, "streams": streams, "one": one, "eight": eight, "decoding": decoding})
    print("Event loop's µs for each output of one token:\n")
    lines = [tuple(f"{value:.3g}" for value in each.values()) for each in counts]
    print(table(["requests a message", "streams an engine", "1 engine", "8 engines", "decoding alone"], lines))

    encrypted: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_link_keys(Path(folder))
        for per_message in (1, 64, 256):
            plain, plain_process = uvloop.run(measure(1, per_message, per_message))
            thread, process = uvloop.run(measure(1, per_message, per_message, Path(folder)))
            encrypted.append(
                {
                    "requests a message": per_message,
                    "event loop": plain,
                    "event loop, encrypted": thread,
                    "process": plain_process,
                    "process, encrypted": process,
                }
            )
    print("\nWith the link encrypted (`--link-keys`) and without, one engine:\n")
    print(table(list(encrypted[0]), [tuple(f"{value:.3g}" for value in each.values()) for each in encrypted]))
    write_json(options.output, {"counts": counts, "encrypted": encrypted})


if __name__ == "__main__":
    main()

"""What the engine adds to a step besides the model: schedule, book-keeping, send, at three sequence lengths.

    python -m loadtest.bench_engine_overhead [--requests 256] [--steps 400]

The simulated executor runs without delays and its own time is shown apart; the link's thread encodes and sends to
one real DEALER on loopback. The aim: schedule + book-keeping + send under 2 ms at 256 requests.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from loadtest.bench_result import RESULTS, table, write_json
from services.engine.core import EngineCore
from services.engine.executor.simulated import SimulatedExecutor
from services.engine.link import Link
from services.engine.link_items import FromPeer
from services.engine.mailbox import Inbox
from services.engine.settings import EngineSettings
from shared.protocol import PROTOCOL_VERSION, Add, Hello, encode, new_boot_id, pack_token_ids
from shared.sampling_params import SamplingParams

COLUMNS = ("schedule", "execute", "book-keeping", "hand over", "whole step")


@contextmanager
def reading_frontend(port: int) -> Iterator[bytes]:
    """A DEALER that says HELLO and reads everything, in a thread of its own. Yields its identity."""
    identity = new_boot_id()
    stop = threading.Event()
    welcomed = threading.Event()

    def read() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.ROUTING_ID, identity)
            dealer.connect(f"tcp://127.0.0.1:{port}")
            dealer.send(encode(Hello(PROTOCOL_VERSION, identity)))
            while not stop.is_set():
                if dealer.poll(50):
                    dealer.recv()
                    welcomed.set()

    thread = threading.Thread(target=read)
    thread.start()
    if not welcomed.wait(5):
        raise RuntimeError("the engine's link did not answer HELLO")
    try:
        yield identity
    finally:
        stop.set()
        thread.join()


def measure(model: str, num_requests: int, length: int, num_steps: int) -> list[float]:
    """Milliseconds for each of COLUMNS: medians over the decode steps."""
    values: dict[str, Any] = {
        "model": model,
        "executor": "simulated",
        "max_num_seqs": num_requests,
        "max_num_batched_tokens": 1 << 16,
        "num_kv_blocks": num_requests * ((length + num_steps) // 16 + 3),
        "link_port": 0,
        "heartbeat_timeout": 600,
    }
    settings = EngineSettings(**values)
    executor = SimulatedExecutor(settings)
    core = EngineCore(executor, settings)
    inbox: Inbox[FromPeer] = Inbox(1 << 30)
    link = Link(settings, executor.description, core.limits, new_boot_id(), inbox, lambda: True, lambda error: None)
    link.start(core.load())
    rows: list[list[float]] = []
    with reading_frontend(link.port) as peer:
        for request_id in range(num_requests):
            prompt = [(request_id * 31 + position) % 40_000 + 100 for position in range(length)]
            sampling = SamplingParams(max_tokens=num_steps + 2, seed=request_id)
            core.add(peer, Add(request_id, pack_token_ids(prompt), sampling))
        while len(core.scheduler.running) < num_requests or core.load().waiting_tokens > num_requests:
            link.send_outputs(core.step(), core.load(), core.take_block_events())
        for _ in range(num_steps):
            began = time.perf_counter()
            outputs = core.step()
            stepped = time.perf_counter()
            link.send_outputs(outputs, core.load(), core.take_block_events())
            ended = time.perf_counter()
            last = core.statistics.last_step
            rows.append([last.schedule, last.execute, last.bookkeeping, ended - stepped, ended - began])
            if len(core.scheduler.running) < num_requests:
                break
    link.stop(linger=1.0)
    link.join(5.0)
    return [1000 * statistics.median(column) for column in zip(*rows, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="Running requests.")
    parser.add_argument("--steps", type=int, default=400, help="Decode steps that are measured.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 1000, 10_000], help="Prompt lengths.")
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_engine_overhead.json")
    options = parser.parse_args(arguments)
    result: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = {"vocab_size": 49_152, "max_position_embeddings": 1 << 20, "eos_token_id": 2}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for length in options.lengths:
            row = dict(zip(COLUMNS, measure(folder, options.requests, length, options.steps), strict=True))
            result[length] = row | {"overhead": row["whole step"] - row["execute"]}
    rows = [(f"{length:,}", *(f"{value:.3f}" for value in row.values())) for length, row in result.items()]
    print(f"Milliseconds a step, {options.requests} running requests:\n")
    print(table(["tokens of context", *COLUMNS, "overhead"], rows))
    write_json(options.output, {"requests": options.requests, "steps": result})


if __name__ == "__main__":
    main()

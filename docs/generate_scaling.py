"""Writes the tables of docs/scaling.md: the sizes that the protocol's encoder gives, and the mesh that they add up to.

python -m docs.generate_scaling
"""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shared.protocol import (
    Add,
    Heartbeat,
    Hello,
    Load,
    ModelLimits,
    Outputs,
    RequestOutput,
    ToEngine,
    ToFrontend,
    Welcome,
    encode,
    pack_token_ids,
)
from shared.sampling_params import SamplingParams

DOCUMENT = Path(__file__).with_name("scaling.md")

# Measured on one core (see the document): loadtest/bench_link, and idle links counted by the hundred.
FRONTEND_US_PER_MESSAGE = 1.1
FRONTEND_US_PER_OUTPUT = 0.35
FRONTEND_US_PER_HASH = 0.1
ENGINE_US_PER_MESSAGE = 2.5
FRONTEND_KIB_PER_LINK = 54
ENGINE_KIB_PER_LINK = 27
FRONTEND_DESCRIPTORS_PER_LINK = 4
ENGINE_DESCRIPTORS_PER_LINK = 1
BYTES_PER_INDEXED_HASH = 78

LOAD = Load(64, 12, 34_567, 12_345, 50_000, 3_200.5)
BOOT_ID = b"t" + bytes(range(1, 12))
TRACE = ["00-" + "a" * 32 + "-" + "b" * 16 + "-01"]


def size(message: ToEngine | ToFrontend) -> int:
    return len(encode(message))


def outputs(num_requests: int) -> Outputs:
    return Outputs([RequestOutput(10_000_000 + index, [100_000]) for index in range(num_requests)], LOAD)


OUTPUTS_BYTES = size(outputs(0))
OUTPUT_BYTES = (size(outputs(64)) - OUTPUTS_BYTES) / 64
HASH_BYTES = (size(Heartbeat(LOAD, [2**63] * 1000)) - size(Heartbeat(LOAD))) / 1000


@dataclass(frozen=True)
class EngineWork:
    """What each engine does, in requests, steps and tokens."""

    streams: int = 64
    steps_per_second: int = 50
    prompt_tokens: int = 1000
    output_tokens: int = 256
    cached_share: float = 0.5
    block_size: int = 16
    blocks: int = 50_000

    @property
    def requests_per_second(self) -> float:
        return self.streams * self.steps_per_second / self.output_tokens

    @property
    def hashes_per_second(self) -> float:
        """Stored, and as many evicted once the cache is full."""
        new_tokens = self.prompt_tokens * (1 - self.cached_share) + self.output_tokens
        return 2 * self.requests_per_second * new_tokens / self.block_size

    def messages_per_step(self, frontends: int) -> float:
        """Frontends that have at least one of the streams, which are spread at random."""
        return frontends * (1 - (1 - 1 / frontends) ** self.streams)


WORK = EngineWork()


def sizes() -> list[tuple[str, ...]]:
    sampling = SamplingParams(max_tokens=512, seed=2**62)
    add = Add(10_000_000, pack_token_ids([1] * 1000), sampling, arrival_time=1.5e9, trace_context=TRACE)
    limits = ModelLimits(40_960, 151_936, [151_645, 151_643], WORK.block_size, 1024)
    welcome = Welcome(1, BOOT_ID, "Qwen/Qwen3-32B", "f" * 64, limits, LOAD)
    return [
        ("message", "bytes"),
        ("OUTPUTS with the token of 1 stream", f"{size(outputs(1))}"),
        ("OUTPUTS with the tokens of 64 streams", f"{size(outputs(64))}"),
        ("… so: a message", f"{OUTPUTS_BYTES}"),
        ("… and each token", f"{OUTPUT_BYTES:.0f}"),
        ("a block hash, stored or evicted", f"{HASH_BYTES:.0f}"),
        ("HEARTBEAT of an engine, of a frontend", f"{size(Heartbeat(LOAD))}, {size(Heartbeat())}"),
        ("ADD with 1,000 prompt tokens (4 a token)", f"{size(add):,}"),
        ("HELLO, WELCOME", f"{size(Hello(1, BOOT_ID))}, {size(welcome)}"),
        ("the whole index of an engine with 50,000 blocks", f"{HASH_BYTES * WORK.blocks:,.0f}"),
    ]


def mesh(shapes: Iterable[tuple[int, int]]) -> list[tuple[str, ...]]:
    """A line for each (frontends, engines that each of them is connected to, which is all of them)."""
    rows: list[tuple[str, ...]] = [
        (
            "frontends × engines",
            "links",
            "messages/s to a frontend",
            "of it OUTPUTS, MB/s",
            "of it hashes, MB/s",
            "frontend's core for the link",
            "indexes, GB",
            "descriptors of a frontend",
            "engine's core for the link",
            "out of an engine, MB/s",
        )
    ]
    for frontends, engines in shapes:
        to_each = WORK.messages_per_step(frontends) / frontends * WORK.steps_per_second  # messages/s, on one link
        messages = to_each * engines
        tokens = WORK.streams * WORK.steps_per_second * engines / frontends
        hashes = WORK.hashes_per_second * engines
        core = (
            messages * FRONTEND_US_PER_MESSAGE + tokens * FRONTEND_US_PER_OUTPUT + hashes * FRONTEND_US_PER_HASH
        ) / 1e6
        out = frontends * (to_each * OUTPUTS_BYTES + WORK.hashes_per_second * HASH_BYTES)
        out += WORK.streams * WORK.steps_per_second * OUTPUT_BYTES
        rows.append(
            (
                f"{frontends:,} × {engines:,}",
                f"{frontends * engines:,}",
                f"{messages:,.0f}",
                f"{(messages * OUTPUTS_BYTES + tokens * OUTPUT_BYTES) / 1e6:.2f}",
                f"{hashes * HASH_BYTES / 1e6:.2f}",
                f"{core:.0%}",
                f"{engines * WORK.blocks * BYTES_PER_INDEXED_HASH / 1e9:.2f}",
                f"{engines * FRONTEND_DESCRIPTORS_PER_LINK:,}",
                f"{to_each * frontends * ENGINE_US_PER_MESSAGE / 1e6:.1%}",
                f"{out / 1e6:.2f}",
            )
        )
    return rows


TABLES = {
    "sizes": sizes(),
    "mesh": mesh([(1, 1), (4, 8), (10, 50), (25, 200), (50, 500), (100, 1000), (200, 2000)]),
    "subsets": mesh([(8, 64), (32, 250)]),
}


def with_tables(document: str) -> str:
    """The document, with each table between its two marks written anew."""
    for name, rows in TABLES.items():
        head, *body = rows
        align = ["---" if index == 0 else "---:" for index in range(len(head))]
        table = "\n".join("| " + " | ".join(row) + " |" for row in (head, align, *body))
        mark = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
        document = re.sub(mark, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", document, flags=re.DOTALL)
    return document


def main() -> int:
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

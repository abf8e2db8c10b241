"""How late the frontend's event loop is while long conversations come: the loop-lag metric, with streams beside them.

    python -m loadtest.bench_loop_lag [--tokens 8000] [--clients 1 4] [--streams 64] [--seconds 10] [--bodies]
                                      [--niceness 10]

Some clients send a conversation of 8,000 tokens again as soon as it is answered, which takes a template, a tokenizer
and a large ADD each time; meanwhile streams run at 50 tokens/s each. Everything that the frontend serves waits for its
event loop, so what holds it up shows in tandem_frontend_event_loop_lag_seconds. Beside it the streams alone.

Engine and clients are nice: they have what the frontend leaves of the cores, as if they ran on other machines. With
--niceness 0 they take them from it. "No core" is how long the loop's thread was ready while others had the cores, which
the frontend's own threads are among.

With --bodies the clients send other large bodies, one kind after the other: what is read, right or wrong.
"""

import argparse
import contextlib
import http.client
import json
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.bench_result import RESULTS, table, write_json
from loadtest.simulated_fleet import Fleet, core_wait_seconds, running_fleet
from loadtest.stream_load import http_request, run_stream_load
from services.launcher.smollm2 import ensure_smollm2

STEP_MS = 20.0
LIMIT = 0.005  # seconds; a bound of the metric's
WORDS = "the ship that never came home, and a wind on the grey sea before the long night of 1912 in the north "
_BUCKET = re.compile(rb'^tandem_frontend_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


@dataclass(slots=True)
class Cell:
    """One line of the table. `lags` counts by upper bound in seconds, each without those below it."""

    what: str
    clients: int
    prompts: float  # answered in a second
    prompt_median_ms: float  # from sending the conversation to the first byte of its answer
    lags: dict[str, float]
    late: float  # the share of lags over LIMIT
    within_ms: float  # the bound that no lag was over
    stream_tokens: float  # a second, of each stream
    no_core: float | None  # seconds in a second that the loop's thread was ready to run and did not


def lag_counts(port: int) -> dict[str, float]:
    """The metric's cumulative buckets."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        return {bound.decode(): float(count) for bound, count in _BUCKET.findall(response.read())}


def conversation(folder: Path, tokens: int) -> list[dict[str, str]]:
    """A few turns, of so many tokens together."""
    from tokenizers import Tokenizer

    per_word = len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(WORDS * 100).ids) / (100 * len(WORDS))
    text = WORDS * int(tokens / per_word / len(WORDS) + 1)
    turn = text[: int(tokens / per_word / 7)]
    return [{"role": ("user", "assistant")[number % 2], "content": turn} for number in range(7)]


@contextlib.contextmanager
def asking(port: int, request: bytes, clients: int, seconds: float, niceness: int) -> Iterator[list[float]]:
    """Clients that ask again and again while the context lasts. Yields what will hold prompts/s and their median ms."""
    outcome: list[float] = []

    def ask() -> None:
        load = run_stream_load(port, request, clients, seconds=seconds, niceness=niceness)
        outcome.extend((load.answers / load.seconds, load.first_median_ms))

    thread = threading.Thread(target=ask)
    if clients:
        thread.start()
    yield outcome
    if clients:
        thread.join()


@contextlib.contextmanager
def posting(port: int, path: str, body: bytes, seconds: float) -> Iterator[list[float]]:
    """The same for one client whose body need not be right: what is wrong is answered too."""
    outcome: list[float] = []

    def post() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        began, took = time.monotonic(), list[float]()
        while time.monotonic() < began + seconds:
            sent = time.monotonic()
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            connection.getresponse().read()
            took.append(time.monotonic() - sent)
        outcome.extend((len(took) / (time.monotonic() - began), 1e3 * statistics.median(took)))

    thread = threading.Thread(target=post)
    thread.start()
    yield outcome
    thread.join()


def large_bodies() -> dict[str, tuple[str, bytes]]:
    """Names, and the path and the body of each."""
    ids = json.dumps({"prompt": [[1000 + number % 40_000 for number in range(8000)]] * 64, "max_tokens": 1}).encode()
    text = json.dumps({"prompt": "naïve 北京 👍\n" * 100_000}).encode()
    message = json.dumps({"messages": [{"role": "user", "content": "naïve 北京 👍\n" * 100_000}]}).encode()
    messages = [{"role": "user", "content": "hello"}] * 9000
    numbers = json.dumps({"prompt": "x", "of_no_use": list(range(590_000)), "max_tokens": 1}).encode()
    bias = json.dumps({"prompt": "x", "logit_bias": {str(number): 1 for number in range(99_000)}}).encode()
    tokens = json.dumps({"tokens": [1000 + number % 40_000 for number in range(500_000)]}).encode()
    return {
        "64 prompts of 8,000 ids": ("/v1/completions", ids),
        "the same, wrong at its end": ("/v1/completions", ids.replace(b"]]", b",]]")),
        f"{len(text) / 1e6:.1f} MB of escapes": ("/v1/completions", text),
        "the same, a message": ("/v1/chat/completions", message),
        "590,000 numbers under an unknown name": ("/v1/completions", numbers),
        "99,000 entries of logit_bias": ("/v1/completions", bias),
        "2 MB to /tokenize": ("/tokenize", json.dumps({"prompt": WORDS * 20_000}).encode()),
        "500,000 ids to /detokenize": ("/detokenize", tokens),
        "9,000 messages": ("/v1/chat/completions", json.dumps({"messages": messages}).encode()),
        "9,000 wrong messages": ("/v1/chat/completions", json.dumps({"messages": [{"role": 1}] * 9000}).encode()),
    }


def measure(
    what: str,
    fleet: Fleet,
    asked: contextlib.AbstractContextManager[list[float]],
    clients: int,
    streams: int,
    seconds: float,
    niceness: int,
) -> Cell:
    counts: list[dict[str, float]] = []
    waits: list[float | None] = []

    def look() -> None:
        counts.append(lag_counts(fleet.port))
        waits.append(core_wait_seconds(fleet.frontend))

    short = {"model": "m", "prompt": [500] * 8, "max_tokens": 4000, "ignore_eos": True}
    with asked as outcome:
        load = run_stream_load(
            fleet.port,
            http_request("/v1/completions", short),
            streams,
            seconds=seconds,
            niceness=niceness,
            at_begin=look,
            at_end=look,
        )
    cumulative = {bound: counts[1][bound] - counts[0][bound] for bound in counts[0]}
    lags: dict[str, float] = {}
    below = 0.0
    for bound, count in cumulative.items():
        lags[bound], below = count - below, count
    prompts, median = outcome or (0.0, 0.0)
    first_wait, last_wait = waits
    return Cell(
        what,
        clients,
        prompts,
        median,
        lags,
        late=1 - cumulative[str(LIMIT)] / cumulative["+Inf"],
        within_ms=1e3 * max(float(bound) for bound, count in lags.items() if count),
        stream_tokens=load.chunks / load.seconds / streams,
        no_core=None if first_wait is None or last_wait is None else (last_wait - first_wait) / load.seconds,
    )


def as_table(cells: list[Cell]) -> str:
    shown = ("0.001", "0.0025", "0.005", "0.01")
    header = (
        "bodies|clients|prompts/s|first byte ms|lags: up to 1 ms|2.5|5|10|more|over 5 ms|a stream's tok/s|no core ms/s"
    )
    rows: list[Sequence[object]] = []
    for cell in cells:
        counts = [cell.lags[bound] for bound in shown]
        more = sum(cell.lags.values()) - sum(counts)
        lags = (f"{count:.0f}" for count in (*counts, more))
        no_core = "–" if cell.no_core is None else f"{1e3 * cell.no_core:.0f}"
        asked = (cell.what, cell.clients, f"{cell.prompts:.0f}", f"{cell.prompt_median_ms:.0f}")
        rows.append((*asked, *lags, f"{cell.late:.1%}", f"{cell.stream_tokens:.1f}", no_core))
    return table(header.split("|"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000, help="of a conversation")
    parser.add_argument("--clients", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of the steady state that are measured (default 10)"
    )
    parser.add_argument("--niceness", type=int, default=10, help="of engine and clients (default 10; 0: none)")
    parser.add_argument("--bodies", action="store_true", help="other large bodies than conversations, from one client")
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_loop_lag.json")
    options = parser.parse_args(arguments)
    folder = ensure_smollm2()
    body = {"model": "m", "messages": conversation(folder, options.tokens), "max_tokens": 1, "ignore_eos": True}
    request = http_request("/v1/chat/completions", body)
    cells: list[Cell] = []
    with (
        tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch,
        running_fleet(
            folder, Path(scratch), 1, {"simulated_step_ms": STEP_MS}, engine_niceness=options.niceness
        ) as fleet,
    ):
        longer = options.seconds + 3
        if options.bodies:
            kinds = {
                what: (posting(fleet.port, path, each, longer), 1) for what, (path, each) in large_bodies().items()
            }
        else:
            kinds = {
                f"{options.tokens} tokens, {clients}": (
                    asking(fleet.port, request, clients, longer, options.niceness),
                    clients,
                )
                for clients in options.clients
            }
        for what, (asked, clients) in kinds.items():
            print(f"{what} …", file=sys.stderr, flush=True)
            cells.append(
                measure(what, fleet, asked, clients, options.streams, options.seconds, niceness=options.niceness)
            )
            print(asdict(cells[-1]), file=sys.stderr, flush=True)
    print(as_table(cells))
    write_json(options.output, [asdict(cell) for cell in cells])
    return 0


if __name__ == "__main__":
    sys.exit(main())

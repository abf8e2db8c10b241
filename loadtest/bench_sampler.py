"""Times the batched sampler against the textbook one: sort, softmax, cumsum, scatter, one exponential per token.

    python -m loadtest.bench_sampler [--rows 1 32 256] [--threads 1] [--mix mixed greedy plain top-p top-k penalties]

Two kinds of made-up logits: `peaked`, which fall with the logarithm of the rank as a language model's do (a nucleus
of a few to a few hundred tokens in most rows), and `flat`, whose nuclei hold tens of thousands. The best of several
rounds is shown, since other work on the machine only ever makes a round slower.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loadtest.bench_result import RESULTS, table, write_json
from services.engine.request import Request, RequestKey
from services.engine.sampling.sampler import Sampler
from shared.sampling_params import SamplingParams

VOCAB_SIZE = 151_936
PROMPT = list(range(100, 164))


def mixed(row: int) -> SamplingParams:
    """A third greedy, a third top-p 0.9, a third top-k 20; half with a seed of their own."""
    kind = row % 3
    return SamplingParams(
        temperature=0.0 if kind == 0 else 1.0,
        top_p=0.9 if kind == 1 else 1.0,
        top_k=20 if kind == 2 else 0,
        seed=row if row % 2 else 0x1234_5678_9ABC_DEF0 + row,
    )


MIXES: dict[str, Callable[[int], SamplingParams]] = {
    "mixed": mixed,
    "greedy": lambda row: SamplingParams(temperature=0.0),
    "plain": lambda row: SamplingParams(seed=row),
    "top-p": lambda row: SamplingParams(top_p=0.9, seed=row),
    "top-k": lambda row: SamplingParams(top_k=20, seed=row),
    "penalties": lambda row: SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2),
}


def peaked_logits(rows: int) -> Tensor:
    """[rows, VOCAB_SIZE]: minus 1.35 to 2.5 times the logarithm of the rank, and noise; the ids are shuffled."""
    steepness = torch.linspace(1.35, 2.5, rows).unsqueeze(1)
    fall = torch.log(torch.arange(2, VOCAB_SIZE + 2, dtype=torch.float32))[torch.randperm(VOCAB_SIZE)]
    return 20.0 - steepness * fall + 0.3 * torch.randn(rows, VOCAB_SIZE)


def flat_logits(rows: int) -> Tensor:
    """[rows, VOCAB_SIZE]: a normal distribution of deviation 2, without a peak."""
    return 2.0 * torch.randn(rows, VOCAB_SIZE)


class Textbook:
    """The parameters as tensors, and every row sorted and raced whole."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self.greedy = torch.tensor([p.temperature == 0.0 for p in params])
        self.temperature = torch.tensor([p.temperature or 1.0 for p in params]).unsqueeze(1)
        self.top_k = torch.tensor([p.top_k or VOCAB_SIZE for p in params]).unsqueeze(1)
        self.top_p = torch.tensor([p.top_p for p in params]).unsqueeze(1)

    def sample(self, logits: Tensor) -> Tensor:
        best = logits.argmax(dim=-1)
        ordered, ids = (logits / self.temperature).sort(dim=-1, descending=True)
        ordered.masked_fill_(torch.arange(VOCAB_SIZE) >= self.top_k, -torch.inf)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities.masked_fill_(before >= self.top_p, 0.0)
        probabilities = torch.empty_like(probabilities).scatter_(1, ids, probabilities)
        raced = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)
        return torch.where(self.greedy, best, raced)


def best_ms(step: Callable[[], object], rounds: int) -> float:
    step()
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def batched_step(params: Sequence[SamplingParams], logits: Tensor) -> Callable[[], None]:
    """One step as the engine takes it: sample, then append. Penalties change the logits that the next reuses."""
    sampler = Sampler(vocab_size=VOCAB_SIZE, eos_token_ids=[0], device=torch.device("cpu"))
    requests = [Request(RequestKey(b"bench", i), list(PROMPT), len(PROMPT), p) for i, p in enumerate(params)]

    def step() -> None:
        for request, sampled in zip(requests, sampler.sample(logits, requests), strict=True):
            if sampled.token_id is None:
                raise SystemExit(f"row {request.key.request_id} failed: {sampled.error}")
            request.token_ids.append(sampled.token_id)

    return step


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=["mixed"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_sampler.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cells: list[dict[str, Any]] = []
    for kind, make in (("like a model's", peaked_logits), ("flat", flat_logits)):
        for rows in options.rows:
            logits = make(rows)
            # It does the same work whatever is asked for.
            textbook = Textbook([MIXES["mixed"](row) for row in range(rows)])
            textbook_ms = best_ms(lambda t=textbook, x=logits: t.sample(x), max(1, options.rounds // 3))
            for mix in options.mix:
                params = [MIXES[mix](row) for row in range(rows)]
                own_ms = best_ms(batched_step(params, logits.clone()), options.rounds)
                cells.append({"logits": kind, "rows": rows, "mix": mix, "textbook_ms": textbook_ms, "own_ms": own_ms})
    print(f"Vocabulary {VOCAB_SIZE:,}, {options.threads} threads, best of {options.rounds} rounds:\n")
    lines = [
        (
            *(cell[column] for column in ("logits", "rows", "mix")),
            f"{cell['textbook_ms']:.1f}",
            f"{cell['own_ms']:.2f}",
            f"{cell['textbook_ms'] / cell['own_ms']:.0f}",
        )
        for cell in cells
    ]
    print(table(["logits", "rows", "mix", "textbook ms", "Tandem ms", "times"], lines))
    write_json(options.output, cells)


if __name__ == "__main__":
    main()

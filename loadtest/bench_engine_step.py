"""Where a decode step of the whole engine goes: schedule, build inputs, model, sample, book-keeping, encode.

    python -m loadtest.bench_engine_step [--rows 1 8 32] [--context 64 600] [--steps 60] [--mix mixed greedy asking]

SmolLM2 in bf16 on the CPU, the engine's own scheduler, executor and sampler in this process, and the message to one
frontend encoded at the end. `bench_model_step` has the model alone; `bench_engine_overhead` the rest at 256 requests.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from services.engine.core import EngineCore
from services.engine.executor.torch_executor import TorchExecutor
from services.engine.settings import EngineSettings
from services.launcher.smollm2 import ensure_smollm2
from shared.protocol import Add, Outputs, encode, pack_token_ids
from shared.sampling_params import SamplingParams

PEER = b"bench"
COLUMNS: tuple[str, ...] = ("schedule", "inputs", "model", "sample", "bookkeeping", "encode", "whole step")


# What the requests ask for, by their number: a third each of greedy, top-p and top-k rows; greedy rows alone; and what
# ordinary clients ask for besides.
MIXES: dict[str, Callable[[int], SamplingParams]] = {
    "mixed": lambda i: (
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.9, seed=i),
        SamplingParams(top_k=20, seed=i),
    )[i % 3],
    "greedy": lambda i: SamplingParams(temperature=0.0),
    "asking": lambda i: SamplingParams(
        temperature=0.7,
        top_p=0.9,
        min_p=0.02,
        seed=i,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.1,
        logit_bias={1000 + 7 * token: 1.5 for token in range(10)},
        logprobs=5,
    ),
}


class Stopwatch:
    """Replaces methods by ones that add their time to a column."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(COLUMNS, 0.0)

    def watch(self, owner: Any, method: str, column: str) -> None:
        run: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(*arguments, **keywords)
            finally:
                self.seconds[column] += time.perf_counter() - began

        setattr(owner, method, timed)

    def take(self) -> list[float]:
        taken = [self.seconds[column] for column in COLUMNS]
        self.seconds = dict.fromkeys(COLUMNS, 0.0)
        return taken


def measure(
    executor: TorchExecutor, settings: EngineSettings, watch: Stopwatch, plan: tuple[int, int, int], mix: str
) -> None:
    """One line of the table: medians over the decode steps, in milliseconds."""
    rows, context, steps = plan
    core = EngineCore(executor, settings)
    for request_id in range(rows):
        prompt = [(request_id * 31 + 7 * position) % 40_000 + 100 for position in range(context)]
        sampling = MIXES[mix](request_id)
        sampling.max_tokens, sampling.ignore_eos = steps + 8, True
        core.add(PEER, Add(request_id, pack_token_ids(prompt), sampling))
    while core.load().waiting_tokens or len(core.scheduler.running) < rows:
        core.step()
    watch.take()
    measured: list[list[float]] = []
    for _ in range(steps):
        began = time.perf_counter()
        outputs = core.step()
        stepped = time.perf_counter()
        encode(Outputs(outputs[PEER], core.load()))
        ended = time.perf_counter()
        times = core.statistics.last_step
        _, inputs, model, sample, *_ = watch.take()
        measured.append(
            [times.schedule, inputs, model, sample, times.bookkeeping, ended - stepped, ended - began],
        )
    core.hand_over()
    core.step()
    line = [1e3 * statistics.median(column) for column in zip(*measured, strict=True)]
    outside = 1 - line[2] / line[-1]
    print(
        f"| {rows} × {context}, {mix} | " + " | ".join(f"{value:.2f}" for value in line) + f" | {outside:.0%} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="Running requests.")
    parser.add_argument("--context", type=int, nargs="+", default=[64, 600], help="Tokens of each prompt.")
    parser.add_argument("--steps", type=int, default=60, help="Decode steps that are measured.")
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=["mixed"], help="What the requests ask for.")
    arguments = parser.parse_args()
    settings = EngineSettings.model_validate({"model": str(ensure_smollm2()), "dtype": "bfloat16"})
    executor = TorchExecutor(settings)
    watch = Stopwatch()
    watch.watch(executor, "_build_batch", "inputs")
    watch.watch(executor.loaded.model, "forward", "model")
    watch.watch(executor.loaded.model, "logits", "model")
    watch.watch(executor._sampler, "sample", "sample")
    print("Milliseconds of a decode step, medians; the last column is the share outside the model.\n")
    print("| rows × context, mix | " + " | ".join(COLUMNS) + " | outside |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for mix in arguments.mix:
        for context in arguments.context:
            for rows in arguments.rows:
                measure(executor, settings, watch, (rows, context, arguments.steps), mix)


if __name__ == "__main__":
    main()

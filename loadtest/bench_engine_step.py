"""Where a decode step of the whole engine goes, from the scheduler to the message, and what memory allows at the best.

    python -m loadtest.bench_engine_step [--rows 1 8 32] [--context 64 600] [--steps 60] [--mix mixed greedy asking]

SmolLM2 in bf16 on the CPU, the engine's own scheduler, executor and sampler in this process, and the message to one
frontend encoded at the end. Milliseconds, medians over the steps. The model's time is divided by the shares that the
kernels' phases have in steps of a second copy of them, which is compiled to look at the clock.

The floor is the time in which as many threads read as many bytes as the weights have, in turns with steps of one greedy
request. `bench_model_step` has the model alone; `bench_engine_overhead` the rest at 256 requests.
"""

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench_result import RESULTS, table, write_json
from loadtest.memory_read import MemoryReader
from services.engine.core import EngineCore
from services.engine.executor.torch_executor import TorchExecutor
from services.engine.model.cpu_threads import usable_threads
from services.engine.model.kernels import load_kernels
from services.engine.settings import EngineSettings
from services.launcher.smollm2 import ensure_smollm2
from shared.protocol import Add, Outputs, encode, pack_token_ids
from shared.sampling_params import SamplingParams

PEER = b"bench"
# As in services/engine/model/kernels/decoder_step.c.
PHASES = ("norm 1", "qkv", "rotate", "attention", "select", "output", "norm 2", "gate and up", "down")
MATRICES = ("qkv", "output", "gate and up", "down")

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


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs together, and for how many steps."""

    rows: int
    context: int
    mix: str
    steps: int


@dataclass(slots=True)
class Cell:
    """One line of the table, in milliseconds; `layers` are all of the model but the matrix that makes the logits."""

    schedule: float
    inputs: float
    layers: float
    logits: float
    sampling: float
    bookkeeping: float
    send: float
    step: float
    phases: dict[str, float] = field(default_factory=dict)  # shares of `layers`; none where PyTorch runs the layers

    @property
    def attention(self) -> float | None:
        return self.layers * self.phases["attention"] if self.phases else None

    @property
    def matrices(self) -> float | None:
        return self.logits + self.layers * sum(self.phases[phase] for phase in MATRICES) if self.phases else None

    @property
    def rest(self) -> float | None:
        """Norms, rotary embedding, and what else the model does."""
        if self.matrices is None or self.attention is None:
            return None
        return self.layers + self.logits - self.matrices - self.attention

    @property
    def outside(self) -> float:
        """The share of the step that is not the model's."""
        return 1 - (self.layers + self.logits) / self.step


class Stopwatch:
    """Replaces methods by ones that add their time to a column."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def watch(self, owner: Any, method: str, column: str) -> None:
        run: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(*arguments, **keywords)
            finally:
                self._seconds[column] = self._seconds.get(column, 0.0) + time.perf_counter() - began

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """Seconds of each column since the last time."""
        taken, self._seconds = self._seconds, {}
        return taken


@contextmanager
def decoding(executor: TorchExecutor, settings: EngineSettings, plan: Plan) -> Iterator[EngineCore]:
    """A core all of whose next `plan.steps` steps are decodes of all rows."""
    core = EngineCore(executor, settings)
    for request_id in range(plan.rows):
        prompt = [(request_id * 31 + 7 * position) % 40_000 + 100 for position in range(plan.context)]
        sampling = MIXES[plan.mix](request_id)
        # The first decode while the prompts of the last are computed, and must not end before those begin.
        sampling.max_tokens, sampling.ignore_eos = 4096, True
        core.add(PEER, Add(request_id, pack_token_ids(prompt), sampling))
    while core.load().waiting_tokens or len(core.scheduler.running) < plan.rows:
        core.step()
    yield core
    core.hand_over()
    core.step()


def measure(executor: TorchExecutor, settings: EngineSettings, watch: Stopwatch, plan: Plan) -> Cell:
    measured: list[list[float]] = []
    with decoding(executor, settings, plan) as core:
        watch.take()
        for _ in range(plan.steps):
            began = time.perf_counter()
            outputs = core.step()
            stepped = time.perf_counter()
            encode(Outputs(outputs[PEER], core.load()))
            ended = time.perf_counter()
            times, own = core.statistics.last_step, watch.take()
            model = [own[column] for column in ("inputs", "layers", "logits", "sampling")]
            measured.append([times.schedule, *model, times.bookkeeping, ended - stepped, ended - began])
    return Cell(*(1e3 * statistics.median(column) for column in zip(*measured, strict=True)))


def measure_phases(executor: TorchExecutor, settings: EngineSettings, plan: Plan) -> dict[str, float]:
    """The share of each of PHASES in the threads' time, over all steps. The kernels must be of `profiled_kernels`.
    Empty where the model does not run in them."""
    kernels = load_kernels()
    if kernels is None:
        return {}
    nanoseconds = (ctypes.c_int64 * len(PHASES))()
    with decoding(executor, settings, plan) as core:
        kernels.long.take_phase_nanoseconds(nanoseconds)
        for _ in range(plan.steps):
            core.step()
        kernels.long.take_phase_nanoseconds(nanoseconds)
    total = sum(nanoseconds)
    return {phase: value / total for phase, value in zip(PHASES, nanoseconds, strict=True)} if total else {}


@contextmanager
def profiled_kernels() -> Iterator[None]:
    """Executors that are made meanwhile have kernels that look at the clock."""
    before = os.environ.get("CC")
    os.environ["CC"] = f"{before or 'cc'} -DPROFILE_PHASES"
    load_kernels.cache_clear()
    try:
        yield
    finally:
        load_kernels.cache_clear()
        if before is None:
            del os.environ["CC"]
        else:
            os.environ["CC"] = before


def measure_floor(executor: TorchExecutor, settings: EngineSettings, plan: Plan) -> dict[str, float]:
    """Milliseconds of a step of one greedy request, and of reading its weights, in turns; and the median of their
    ratios."""
    weights = sum(path.stat().st_size for path in Path(settings.model).glob("*.safetensors"))
    reader = MemoryReader(weights, usable_threads())
    steps: list[float] = []
    reads: list[float] = []
    with decoding(executor, settings, plan) as core:
        for _ in range(plan.steps):
            began = time.perf_counter()
            core.step()
            steps.append(time.perf_counter() - began)
            reads.append(reader.seconds())
    times = statistics.median(step / read for step, read in zip(steps, reads, strict=True))
    return {"step_ms": 1e3 * statistics.median(steps), "floor_ms": 1e3 * statistics.median(reads), "times": times}


def as_table(cells: dict[Plan, Cell]) -> str:
    header = "rows × context|mix|schedule|inputs|matrices|attention|norms, rotary …|sampling|book-keeping|send|step"
    lines: list[Sequence[object]] = []
    for plan, cell in cells.items():
        times = (cell.schedule, cell.inputs, cell.matrices, cell.attention, cell.rest, cell.sampling, cell.bookkeeping)
        shown = ("–" if value is None else f"{value:.2f}" for value in (*times, cell.send, cell.step))
        lines.append((f"{plan.rows} × {plan.context}", plan.mix, *shown, f"{cell.outside:.0%}"))
    return table([*header.split("|"), "outside the model"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="Running requests.")
    parser.add_argument("--context", type=int, nargs="+", default=[64, 600], help="Tokens of each prompt.")
    parser.add_argument("--steps", type=int, default=60, help="Decode steps that are measured.")
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=["mixed"], help="What the requests ask for.")
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_engine_step.json")
    options = parser.parse_args(arguments)
    settings = EngineSettings.model_validate({"model": str(ensure_smollm2()), "dtype": "bfloat16"})
    plans = [
        Plan(rows, context, mix, options.steps)
        for mix in options.mix
        for context in options.context
        for rows in options.rows
    ]
    with profiled_kernels():
        executor = TorchExecutor(settings)
        phases = {plan: measure_phases(executor, settings, plan) for plan in plans}
        executor.close()
    executor = TorchExecutor(settings)
    floor = measure_floor(executor, settings, Plan(1, 64, "greedy", options.steps))
    watch = Stopwatch()
    watch.watch(executor, "_build_batch", "inputs")
    watch.watch(executor.loaded.model, "forward", "layers")
    watch.watch(executor.loaded.model, "logits", "logits")
    watch.watch(executor._sampler, "sample", "sampling")
    cells: dict[Plan, Cell] = {}
    for plan in plans:
        cells[plan] = measure(executor, settings, watch, plan)
        cells[plan].phases = phases[plan]
    executor.close()
    print(as_table(cells))
    print(
        f"\nA step of one greedy request at 64 tokens takes {floor['step_ms']:.2f} ms, in turns with reading as much "
        f"memory as its weights take, which takes {floor['floor_ms']:.2f}: {floor['times']:.2f} times that."
    )
    steps = [asdict(plan) | asdict(cell) | {"outside": cell.outside} for plan, cell in cells.items()]
    for step, cell in zip(steps, cells.values(), strict=True):
        step |= {"matrices": cell.matrices, "attention": cell.attention, "rest": cell.rest}
    write_json(options.output, {"steps": steps, "floor": floor})


if __name__ == "__main__":
    main()

"""Milliseconds of one run of the model, beside transformers' own forward and the floor that memory bandwidth sets.

    python -m loadtest.bench_model_step --model ~/.cache/tandem/SmolLM2-135M-Instruct --dtype bfloat16

Decode steps at several batch sizes and context lengths, and a prefill. The floor is the time to read the weights
(and the step's keys and values) once at the rate at which this machine was just measured to read memory.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from loadtest.bench_engine_step import PHASES, profiled_kernels
from loadtest.memory_read import MemoryReader
from services.engine.executor.torch_executor import TorchExecutor
from services.engine.model.cpu_threads import usable_threads
from services.engine.model.kernels import load_kernels
from services.engine.model.kv_pool import block_bytes
from services.engine.request import Request, RequestKey, SampledToken, ScheduledRequest, Step
from services.engine.settings import EngineSettings
from shared.protocol import TokenLogprobs
from shared.sampling_params import SamplingParams

BLOCK_SIZE = 16


class Argmax:
    """The cheapest sampler, so that the model's time is what is measured."""

    def sample(
        self, logits: torch.Tensor, requests: Any, token_bitmask: torch.Tensor | None = None
    ) -> list[SampledToken]:
        return [SampledToken(token_id=token_id) for token_id in logits.argmax(-1).tolist()]

    def prompt_logprobs(self, logits: torch.Tensor, next_token_ids: list[int], count: int) -> list[TokenLogprobs]:
        return []

    def release(self, key: RequestKey) -> None: ...


def median_ms(run: Callable[[], object], repeats: int) -> float:
    run()
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def read_rate(threads: int) -> float:
    """Bytes a second that this machine reads from memory, at best."""
    num_bytes = 256 * 1024 * 1024
    reader = MemoryReader(num_bytes, threads)
    return num_bytes / min(reader.seconds() for _ in range(9))


def engine_step(executor: TorchExecutor, rows: int, context: int, new_tokens: int) -> Callable[[], object]:
    blocks = -(-context // BLOCK_SIZE)
    scheduled: list[ScheduledRequest] = []
    for i in range(rows):
        token_ids = [(7 * i + 3 * position) % 1000 for position in range(context)]
        request = Request(RequestKey(b"bench", i), token_ids, context, SamplingParams())
        request.block_table = list(range(i * blocks, (i + 1) * blocks))
        scheduled.append(ScheduledRequest(request, context - new_tokens, new_tokens))
    step = Step(scheduled)
    return lambda: executor.execute(step)


def transformers_step(model: Any, rows: int, context: int, new_tokens: int) -> Callable[[], object]:
    from transformers import DynamicCache

    token_ids = torch.randint(0, 1000, (rows, context))
    if new_tokens == context:
        return lambda: model(token_ids, use_cache=True, logits_to_keep=1)
    cache = DynamicCache(config=model.config)
    model(token_ids[:, :-new_tokens], past_key_values=cache, use_cache=True, logits_to_keep=1)

    def run() -> None:
        model(token_ids[:, -new_tokens:], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.crop(-new_tokens)

    return run


def phases_step(run: Callable[[], object], repeats: int) -> str:
    """One line: where the threads' time goes in the median step, in ms of all threads together."""
    kernels = load_kernels()
    assert kernels is not None
    nanoseconds = (ctypes.c_int64 * len(PHASES))()
    steps: list[tuple[float, list[int]]] = []
    for _ in range(repeats):
        kernels.long.take_phase_nanoseconds(nanoseconds)
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        kernels.long.take_phase_nanoseconds(nanoseconds)
        steps.append((seconds, list(nanoseconds)))
    _, median = sorted(steps)[repeats // 2]
    return ", ".join(f"{name} {value / 1e6:.2f}" for name, value in zip(PHASES, median, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path.home() / ".cache/tandem/SmolLM2-135M-Instruct"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-kernels", action="store_true", help="PyTorch's operations instead of the C kernels")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers' own times out")
    parser.add_argument("--phases", action="store_true", help="where a step's time goes (bf16 on a CPU alone)")
    arguments = parser.parse_args()
    with profiled_kernels() if arguments.phases else nullcontext():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    settings: dict[str, Any] = {"model": arguments.model, "dtype": arguments.dtype, "threads": arguments.threads}
    settings |= {"device": "cpu", "block_size": BLOCK_SIZE}
    threads = arguments.threads or usable_threads()
    executor = TorchExecutor(EngineSettings(**settings), sampler=Argmax(), use_kernels=not arguments.no_kernels)
    own_threads = torch.get_num_threads()
    reference: Any = None
    if not arguments.no_transformers:
        import transformers

        dtype = getattr(torch, arguments.dtype)
        reference = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()

    loaded = executor.loaded
    torch.set_num_threads(threads)  # an executor whose model brings its own threads leaves PyTorch but one
    rate = read_rate(threads)
    weights = sum(path.stat().st_size for path in Path(arguments.model).glob("*.safetensors"))
    weights = weights * loaded.dtype.itemsize // 2  # the checkpoints of this benchmark are in 16 bits
    token_bytes = block_bytes(loaded.model.kv_layers, 1, loaded.dtype)
    print(f"{arguments.dtype}, {threads} threads, memory {rate / 1e9:.1f} GB/s, ms a step (median)")
    print(f"{'':24}{'tandem':>10}{'transformers':>14}{'floor':>8}")
    cases = [("decode", rows, context, 1) for context in (64, 600) for rows in (1, 8, 32)] + [("prefill", 1, 512, 512)]
    with torch.inference_mode():
        for kind, rows, context, new_tokens in cases:
            torch.set_num_threads(own_threads)
            step = engine_step(executor, rows, context, new_tokens)
            ours = median_ms(step, arguments.repeats)
            phases = phases_step(step, arguments.repeats) if arguments.phases else ""
            torch.set_num_threads(threads)
            theirs = (
                f"{median_ms(transformers_step(reference, rows, context, new_tokens), arguments.repeats):.1f}"
                if reference is not None
                else "-"
            )
            floor = (weights + rows * context * token_bytes) / rate * 1e3
            print(f"{kind} {rows:>3} x {context:<13}{ours:>13.1f}{theirs:>14}{floor:>8.1f}  {phases}", flush=True)
    executor.close()


if __name__ == "__main__":
    main()

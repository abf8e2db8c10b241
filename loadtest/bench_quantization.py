"""What weights of 8 and 4 bits cost and give: perplexity, equal tokens, bytes, speed; PyTorch's own kernels beside.

    python -m loadtest.bench_quantization [--windows 8] [--rounds 3] [--rows 1 8 32]

SmolLM2 in bf16 on the CPU, all three in this process and in turns. The text is Python's language reference as the
standard library carries it (`pydoc_data.topics`). Greedy tokens are compared position by position after the text's own
tokens, so that one difference does not make all that follow differ.
"""

import argparse
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from loadtest.bench_model_step import BLOCK_SIZE, Argmax, engine_step
from loadtest.bench_result import RESULTS, table, write_json
from services.engine.executor.torch_executor import TorchExecutor
from services.engine.model.cpu_decoder import CpuDecoder
from services.engine.model.cpu_threads import usable_threads
from services.engine.model.kernel_structures import LinearArguments
from services.engine.model.kernels import load_kernels
from services.engine.model.packed_weights import MatrixPlan, PackedWeights
from services.engine.model.quantization import GROUP, WeightFormat
from services.engine.request import Request, RequestKey, ScheduledRequest
from services.engine.settings import EngineSettings
from services.launcher.smollm2 import ensure_smollm2
from shared.sampling_params import SamplingParams

QUANTIZATIONS = ("none", "int8", "int4")
WINDOW = 1024  # tokens that see each other
CONTEXT = 64
PREFILL = 512
SCORED_AT_ONCE = 256

Times = dict[tuple[str, str], list[float]]  # (what, which) -> seconds


@dataclass
class Quality:
    log_likelihood: float = 0.0
    likeliest: list[Tensor] = field(default_factory=list)


def windows(folder: str, count: int) -> tuple[list[list[int]], int]:
    """Evenly spread over the text, and how many tokens the text has."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, model_max_length=1 << 30)
    token_ids: list[int] = tokenizer("\n\n".join(topics[name] for name in sorted(topics))).input_ids
    starts = [i * (len(token_ids) - WINDOW) // max(count - 1, 1) for i in range(count)]
    return [token_ids[start : start + WINDOW] for start in starts], len(token_ids)


def score(executor: TorchExecutor, token_ids: list[int], quality: Quality) -> None:
    request = Request(RequestKey(b"bench", 0), token_ids, len(token_ids), SamplingParams())
    request.block_table = list(range(-(-len(token_ids) // BLOCK_SIZE)))
    batch = executor._build_batch([ScheduledRequest(request, 0, len(token_ids))])
    model = executor.loaded.model
    states = model.forward(batch, torch.arange(len(token_ids) - 1), executor._attention)
    for first in range(0, len(states), SCORED_AT_ONCE):
        logits = model.logits(states[first : first + SCORED_AT_ONCE])
        following = torch.tensor(token_ids[first + 1 : first + 1 + len(logits)])
        quality.log_likelihood += logits.log_softmax(-1).gather(1, following[:, None]).sum().item()
        quality.likeliest.append(logits.argmax(-1))


def measure(run: Callable[[], object], seconds: float, into: list[float]) -> None:
    """The median of as many runs as take so long, three at least."""
    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    into.append(statistics.median(times))


def our_products(shapes: list[tuple[int, int]], format_: WeightFormat, threads: int) -> Callable[[int], None]:
    kernels = load_kernels()
    if kernels is None:
        raise SystemExit("This needs a C compiler.")
    packed = PackedWeights(kernels, [MatrixPlan(*shape, format=format_) for shape in shapes])
    linears = [packed.add(torch.randn(shape).bfloat16()) for shape in shapes]
    product: Callable[..., None] = kernels.long.linear_float
    product.argtypes = [ctypes.POINTER(LinearArguments), *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2]
    product.restype = None

    def run(rows: int, _: Any = packed) -> None:
        for linear in linears:
            x, out = torch.ones(rows, linear.inputs, dtype=torch.bfloat16), torch.empty(rows, linear.outputs)
            product(linear, x.data_ptr(), out.data_ptr(), rows, threads)

    return run


def torch_products(shapes: list[tuple[int, int]], format_: WeightFormat) -> Callable[[int], None]:
    ops: Any = torch.ops.aten
    if format_ is WeightFormat.INT8:
        eights = [
            (torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs).bfloat16())
            for outputs, inputs in shapes
        ]

        def run(rows: int) -> None:
            for codes, scales in eights:
                ops._weight_int8pack_mm(torch.ones(rows, codes.shape[1], dtype=torch.bfloat16), codes, scales)
    else:
        fours = [
            (
                ops._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (outputs, inputs), dtype=torch.int32), 2),
                torch.rand(inputs // GROUP, outputs, 2).bfloat16(),
            )
            for outputs, inputs in shapes
        ]

        def run(rows: int) -> None:
            for packed, scales in fours:
                x = torch.ones(rows, len(scales) * GROUP, dtype=torch.bfloat16)
                ops._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)

    return run


def layer_shapes(executor: TorchExecutor) -> list[tuple[int, int]]:
    """Outputs and inputs of every matrix of the layers."""
    model = executor.loaded.model
    if not isinstance(model, CpuDecoder):
        raise SystemExit("This needs a C compiler.")
    config = model.config
    query, kv = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return [(query + 2 * kv, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)] * config.num_layers


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8, help=f"Pieces of {WINDOW} tokens of the text.")
    parser.add_argument("--rounds", type=int, default=3, help="Of the speed; medians are reported.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="Requests that decode together.")
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_quantization.json")
    options = parser.parse_args(arguments)
    folder, threads = str(ensure_smollm2()), usable_threads()
    executors: dict[str, TorchExecutor] = {}
    loading: dict[str, float] = {}
    for name in ("none", *QUANTIZATIONS):  # the first time everything is imported too
        settings = {"model": folder, "dtype": "bfloat16", "quantization": name, "device": "cpu"}
        settings |= {"block_size": BLOCK_SIZE, "num_kv_blocks": 1024, "max_model_len": 2048, "threads": threads}
        began = time.perf_counter()
        executors[name] = TorchExecutor(EngineSettings.model_validate(settings), sampler=Argmax())
        loading[name] = time.perf_counter() - began
    pieces, text_tokens = windows(folder, options.windows)
    scored = sum(len(piece) - 1 for piece in pieces)
    qualities = {name: Quality() for name in QUANTIZATIONS}
    speeds: Times = {}
    with torch.inference_mode():
        torch.set_num_threads(threads)  # PyTorch's part is only to read the logits
        for piece in pieces:
            for name, executor in executors.items():
                score(executor, piece, qualities[name])
        torch.set_num_threads(1)  # as in an engine
        for _ in range(options.rounds):
            for name, executor in executors.items():
                for rows in options.rows:
                    measure(engine_step(executor, rows, CONTEXT, 1), 0.5, speeds.setdefault((name, f"{rows} rows"), []))
                measure(engine_step(executor, 1, PREFILL, PREFILL), 0.5, speeds.setdefault((name, "prefill"), []))
    print(f"{scored} of the text's {text_tokens} tokens, {threads} threads, medians of {options.rounds} rounds:\n")
    exact = torch.cat(qualities["none"].likeliest)
    results: dict[str, dict[str, float]] = {}
    for name, quality in qualities.items():
        model: Any = executors[name].loaded.model
        results[name] = {
            "weights MB": model.weight_bytes / 1e6,
            "loading s": loading[name],
            "perplexity": math.exp(-quality.log_likelihood / scored),
            "equal greedy tokens": (torch.cat(quality.likeliest) == exact).float().mean().item(),
            **{f"tok/s at {rows}": rows / statistics.median(speeds[name, f"{rows} rows"]) for rows in options.rows},
            f"prefill of {PREFILL}, ms": 1e3 * statistics.median(speeds[name, "prefill"]),
        }
    digits = {"loading s": ".1f", "perplexity": ".2f", "equal greedy tokens": ".1%"}
    lines = [
        (name, *(format(value, digits.get(column, ".0f")) for column, value in result.items()))
        for name, result in results.items()
    ]
    print(table(["weights", *results["none"]], lines))

    shapes = layer_shapes(executors["none"])
    products = {"bf16": our_products(shapes, WeightFormat.BF16, threads)}
    for format_ in (WeightFormat.INT8, WeightFormat.INT4):
        products[format_.name.lower()] = our_products(shapes, format_, threads)
        products[f"{format_.name.lower()}, PyTorch's"] = torch_products(shapes, format_)
    times: Times = {}
    for _ in range(options.rounds):
        for name, run in products.items():
            torch.set_num_threads(threads if "PyTorch" in name else 1)
            for rows in options.rows:
                measure(lambda run=run, rows=rows: run(rows), 0.3, times.setdefault((name, str(rows)), []))
    print("\nProducts of the layers' matrices alone, all in one format, ms:\n")
    alone = {name: [1e3 * statistics.median(times[name, str(rows)]) for rows in options.rows] for name in products}
    lines = [(name, *(f"{value:.1f}" for value in values)) for name, values in alone.items()]
    print(table(["weights", *(f"at {rows}" for rows in options.rows)], lines))
    write_json(options.output, {"rows": options.rows, "engine": results, "products": alone})


if __name__ == "__main__":
    main()

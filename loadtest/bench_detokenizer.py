"""Microseconds a token on the way from token ids to text, at growing lengths: it must not grow with them.

    python -m loadtest.bench_detokenizer --tokenizer PATH_OR_NAME [--lengths 1000 10000 100000]

Beside the detokenizer: tokenizers' DecodeStream, the usual prefix and read offsets over `decode`, and the whole of
OutputProcessor.accept (detokenizer, stop strings, reasoning, collector) with a reader that keeps up and with one
that reads nothing until the end. Each number is the best of a few runs, one token an update.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable

from tokenizers.decoders import DecodeStream

from services.frontend.output.collector import Collector
from services.frontend.output.detokenizer import WindowDetokenizer
from services.frontend.output.processor import OutputOptions, OutputProcessor
from services.frontend.output.reasoning import make_reasoning_parser
from services.frontend.tokenizer import Tokenizer
from shared.protocol import RequestOutput

TEXT = """北京是中国的首都，也是全国的政治、文化中心。👨‍👩‍👧‍👦 family 🙂🇨🇳
def add(first: int, second: int) -> int:
    return first + second  # 1234567890
Streams of text, naïve façades, नमस्ते, and many ordinary English words one after another.
"""

STOPS = ("\n\nUser:", "<|end|>", "STOP", "###")


def detokenizer(tokenizer: Tokenizer, ids: list[int]) -> None:
    push = tokenizer.detokenizer().push
    for token_id in ids:
        push((token_id,))


def window(tokenizer: Tokenizer, ids: list[int]) -> None:
    push = WindowDetokenizer(tokenizer.hf.decode, lambda token_id: True).push
    for token_id in ids:
        push((token_id,))


def decode_stream(tokenizer: Tokenizer, ids: list[int]) -> None:
    backend = tokenizer.hf.backend_tokenizer
    step = DecodeStream(skip_special_tokens=True).step
    for token_id in ids:
        step(backend, token_id)


def processor(options: OutputOptions, reasoning: str | None, reader: bool) -> Callable[[Tokenizer, list[int]], None]:
    def run(tokenizer: Tokenizer, ids: list[int]) -> None:
        collector = Collector(1)
        parser = make_reasoning_parser(reasoning, tokenizer=tokenizer, prompt_token_ids=[]) if reasoning else None
        accept = OutputProcessor(tokenizer, options, collector, 0, parser).accept
        for token_id in ids:
            accept(RequestOutput(1, [token_id]))
            if reader:
                # What a reader that waits takes, without the event loop's own cost.
                with contextlib.suppress(StopIteration):
                    collector.get().send(None)
        if not reader:
            asyncio.run(collector.get())

    return run


CASES: dict[str, Callable[[Tokenizer, list[int]], None]] = {
    "detokenizer": detokenizer,
    "window (no fast backend)": window,
    "DecodeStream": decode_stream,
    "accept, plain, read": processor(OutputOptions(), None, True),
    "accept, plain, unread": processor(OutputOptions(), None, False),
    "accept, 4 stop strings": processor(OutputOptions(STOPS), None, False),
    "accept, reasoning": processor(OutputOptions(), "deepseek_r1", False),
    "accept, both": processor(OutputOptions(STOPS), "deepseek_r1", False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Microseconds a token from token ids to text.")
    parser.add_argument("--tokenizer", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(arguments.tokenizer)
    some = tokenizer.encode(TEXT, add_special_tokens=False)
    print(f"{'µs a token':<26}" + "".join(f"{length:>12,}" for length in arguments.lengths))
    for name, case in CASES.items():
        row = f"{name:<26}"
        for length in arguments.lengths:
            ids = (some * (length // len(some) + 1))[:length]
            best = float("inf")
            for _ in range(arguments.runs):
                start = time.perf_counter()
                case(tokenizer, ids)
                best = min(best, time.perf_counter() - start)
            row += f"{best / length * 1e6:>12.2f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()

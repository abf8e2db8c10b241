"""The picture of `tandem top`: one line of traffic, one of latencies, one row an engine. Colour says what is wrong."""

import math
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.top.figures import Figures, Latency
from services.top.reading import Engine, Reading

_STATES = {"ready": "green", "draining": "yellow", "leaving": "yellow", "connecting": "bright_black", "refused": "red"}
_BLOCKS = " ▁▂▃▄▅▆▇█"
_BAR_WIDTH = 10


def picture(reading: Reading, figures: Figures | None, tokens_per_second: Sequence[float]) -> RenderableType:
    """`tokens_per_second` is the fleet's rate at each look so far, the latest last; `figures` are None at the first."""
    parts: list[RenderableType] = [_headline(reading)]
    parts += [Text(f"  {problem}", style="red") for problem in reading.problems]
    if reading.num_answered:
        parts += [Text(), *_traffic(figures, tokens_per_second), Text(), _engines(reading.engines)]
    return Group(*parts)


def _headline(reading: Reading) -> Text:
    models = sorted({engine.model for engine in reading.engines})
    ready = sum(engine.state == "ready" for engine in reading.engines)
    line = Text.assemble(("tandem top", "bold"), "  ", ", ".join(models) or "no engine known yet", "  ")
    line.append(
        f"{_count(reading.num_answered, 'frontend')}, {ready} of {_count(len(reading.engines), 'engine')} ready",
        style="" if ready else "red",
    )
    return line.append(time.strftime("  %H:%M:%S"), style="bright_black")


def _traffic(figures: Figures | None, tokens_per_second: Sequence[float]) -> list[Text]:
    tokens = _line("tokens", f"{tokens_per_second[-1]:,.0f}/s" if tokens_per_second else "–")
    tokens.append("   " + sparkline(tokens_per_second), style="cyan")
    if figures is None:
        return [tokens, _line("requests", "measuring …")]
    requests = _line("requests", f"{figures.requests:,.1f}/s")
    requests.append(f"   {figures.in_flight} in flight, {figures.streaming} of them streaming")
    trouble = [
        Text(text, style)
        for value, text, style in (
            (figures.refused, f"{figures.refused:,.1f}/s refused", "yellow"),
            (figures.failed, f"{figures.failed:,.1f}/s failed", "red"),
            (figures.abandoned, f"{figures.abandoned:,.1f}/s abandoned", "bright_black"),
            (figures.failovers, _count(figures.failovers, "failover"), "yellow"),
        )
        if value
    ]
    latencies = _line("first token", _latency(figures.first_token))
    latencies.append("     each further ", style="bright_black")
    latencies.append(_latency(figures.each_token))
    latencies.append(f"     (median / 99th percentile of {figures.seconds:.0f} s)", style="bright_black")
    lines = [tokens, requests, latencies]
    if trouble:
        lines.append(_line("trouble", "").append(Text("   ").join(trouble)))
    return lines


def _engines(engines: Sequence[Engine]) -> Table:
    several = len({engine.model for engine in engines}) > 1
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bright_black")
    for name, justify in (
        ("engine", "left"),
        *((("model", "left"),) if several else ()),
        ("state", "left"),
        ("running", "right"),
        ("waiting", "right"),
        ("KV cache", "left"),
        ("tokens/s", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]
    for engine in engines:
        known = engine.kv_blocks_total > 0
        table.add_row(
            engine.address,
            *((engine.model,) if several else ()),
            Text(f"● {engine.state}", style=_STATES.get(engine.state, "")),
            f"{engine.running_requests:,}" if known else "",
            Text(f"{engine.waiting_requests:,}", style="yellow" if engine.waiting_requests else "") if known else "",
            _bar(1 - engine.kv_blocks_free / engine.kv_blocks_total) if known else "",
            f"{engine.tokens_per_second:,.0f}" if known else "",
        )
    return table


def _bar(share: float) -> Text:
    """What is in use, in eighths of a character."""
    share = min(1.0, max(0.0, share))
    eighths = round(share * _BAR_WIDTH * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    style = "red" if share >= 0.95 else "yellow" if share >= 0.8 else "cyan"
    return Text.assemble((filled.ljust(_BAR_WIDTH, "·"), style), f" {share:4.0%}")


def sparkline(values: Sequence[float]) -> str:
    """The values as bars of eighths, the highest full; nothing is the lowest bar's absence."""
    highest = max(values, default=0.0)
    if highest <= 0:
        return ""
    return "".join(_BLOCKS[math.ceil(8 * value / highest)] for value in values)


def _latency(latency: Latency) -> str:
    return f"{_seconds(latency.median)} / {_seconds(latency.p99)}"


def _seconds(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _line(name: str, value: str) -> Text:
    return Text.assemble((f"{name:<13}", "bright_black"), value)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"

"""A trace as text: one line a span, indented below its parent, with its time as a bar and what matters of it.

`trace_console` collects the spans.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_BAR = 28
_NAME = 34


@dataclass(slots=True)
class TreeSpan:
    """What is shown of a span. Times in nanoseconds; `error` is None where it went well."""

    name: str
    span_id: bytes
    parent_id: bytes
    start: int
    end: int
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    error: str | None = None


def render_trace(trace_id: str, spans: Sequence[TreeSpan], *, color: bool) -> str:
    """The tree. Spans whose parent is not among them (the client's, or one that was lost) stand at the left."""
    began = min(span.start for span in spans)
    lasted = max(max(span.end for span in spans) - began, 1)
    lines = [_paint(f"trace {trace_id}", "1", color)]
    for prefix, span in _in_order(spans):
        name = f"{prefix}{span.name}"
        offset = f"{_milliseconds(span.start - began):>9}"
        duration = f"{_milliseconds(span.end - span.start):>9}"
        bar = _bar(span.start - began, span.end - began, lasted)
        note = _note(span)
        if span.error is not None:
            note = (
                f"{note}  {_paint('✗ ' + span.error, '31', color)}" if note else _paint("✗ " + span.error, "31", color)
            )
        lines.append(
            f"  {name:<{_NAME}} {_paint(offset, '2', color)} {duration}  {_paint(bar, '36', color)}  {note}".rstrip()
        )
    return "\n".join(lines)


def _in_order(spans: Sequence[TreeSpan]) -> Iterator[tuple[str, TreeSpan]]:
    children: dict[bytes, list[TreeSpan]] = defaultdict(list)
    known = {span.span_id for span in spans}
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        children[span.parent_id if span.parent_id in known else b""].append(span)

    def below(parent: bytes, prefix: str) -> Iterator[tuple[str, TreeSpan]]:
        of_parent = children[parent]
        for number, span in enumerate(of_parent):
            last = number == len(of_parent) - 1
            top = not parent
            yield ("" if top else prefix + ("└ " if last else "├ ")), span
            yield from below(span.span_id, "" if top else prefix + ("  " if last else "│ "))

    return below(b"", "")


def _bar(start: int, end: int, lasted: int) -> str:
    first = min(start * _BAR // lasted, _BAR - 1)
    last = max(first + 1, -(-end * _BAR // lasted))
    return "·" * first + "━" * (last - first) + "·" * (_BAR - last)


def _note(span: TreeSpan) -> str:
    of = span.attributes
    match span.name:
        case "route":
            parts = [_engine(of)]
        case "generate":
            outcome = of.get("tandem.outcome")
            parts = [_engine(of), _tokens(of), "" if outcome == "finished" else f"{outcome}"]
        case "queue":
            ahead, resumed = of.get("tandem.queue.requests_ahead"), of.get("tandem.resumed_tokens")
            parts = [
                f"{ahead} ahead" if ahead else "",
                f"resumed after {resumed} tokens" if resumed else "",
                "preempted" if of.get("tandem.preempted") else "",
            ]
        case "prefill":
            cached = of.get("tandem.prefill.cached_tokens")
            parts = [f"{of.get('tandem.prefill.tokens')} tokens", f"{cached} cached" if cached else ""]
        case "decode":
            gap = of.get("tandem.decode.longest_gap_seconds", 0.0)
            preemptions = span.events.count("preempted")
            parts = [
                _tokens(of),
                str(of.get("tandem.finish_reason", "")),
                f"longest gap {_milliseconds(int(gap * 1e9))}" if gap else "",
                f"preempted {preemptions} times" if preemptions else "",
            ]
        case "stream" | "respond":
            writes, sent = of.get("tandem.stream.writes", 0), of.get("tandem.stream.bytes", 0)
            text = of.get("tandem.detokenize.seconds", 0.0)
            parts = [
                f"{writes} writes, {sent / 1000:.1f} kB" if writes else "",
                f"detokenizing {_milliseconds(int(text * 1e9))}",
            ]
        case _ if "gen_ai.operation.name" in of:
            cached = of.get("gen_ai.usage.cache_read.input_tokens")
            prompt = f"{of.get('gen_ai.usage.input_tokens', 0)} prompt tokens"
            parts = [
                f"{prompt} ({cached} cached)" if cached else prompt,
                _tokens(of),
                ", ".join(of.get("gen_ai.response.finish_reasons", [])),
            ]
        case _:
            status = of.get("http.response.status_code")
            parts = [f"{status}" if status else ""]
    return ", ".join(part for part in parts if part)


def _engine(attributes: dict[str, Any]) -> str:
    address = attributes.get("server.address")
    return f"{address}:{attributes.get('server.port')}" if address else ""


def _tokens(attributes: dict[str, Any]) -> str:
    tokens = attributes.get("gen_ai.usage.output_tokens")
    return "" if tokens is None else f"{tokens} token{'s' * (tokens != 1)} made"


def _milliseconds(nanoseconds: int) -> str:
    value = nanoseconds / 1e6
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def _paint(text: str, code: str, color: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if color else text

"""Puts what `make bench` measured into docs/performance.md: tables and plots, between the comments that name them."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


def servers_in(text: str) -> set[str]:
    """What stands in the column "server" of a Markdown table.

    >>> sorted(servers_in("| n | server |\\n|---|---|\\n| 1 | **a** |\\n| 1 | b |"))
    ['a', 'b']
    """
    rows = [[cell.strip(" *") for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    if not rows or "server" not in rows[0]:
        return set()
    column = rows[0].index("server")
    return {row[column] for row in rows[2:]}


def write_block(document: Path, name: str, text: str) -> set[str]:
    """Replace what is between the comments `<!-- bench NAME -->` and `<!-- end -->`. Raises ValueError.

    Returns the servers that were measured for what stands there, but not for `text`, a peer that takes some setting up
    for one: then nothing is replaced.
    """
    content = document.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- bench {re.escape(name)} -->\n)(.*?)(<!-- end -->)", re.DOTALL)
    found = pattern.findall(content)
    if len(found) != 1:
        raise ValueError(f"{document} has {len(found)} places for bench {name}; one is expected")
    lost = servers_in(found[0][1]) - servers_in(text)
    if not lost:
        replaced = pattern.sub(lambda match: f"{match[1]}\n{text.strip()}\n\n{match[3]}", content)
        document.write_text(replaced, encoding="utf-8")
    return lost


def plot(
    title: str, x_axis: tuple[str, Iterable[object]], y_axis: str, series: Iterable[tuple[str, Sequence[float]]]
) -> str:
    """A chart that GitHub draws; `series` are ("bar" or "line", values). The axis begins at 0.

    >>> print(plot("Rate", ("streams", [1, 8]), "tok/s", [("line", [100.0, 520.25])]))
    ```mermaid
    xychart-beta
        title "Rate"
        x-axis "streams" [1, 8]
        y-axis "tok/s" 0 --> 600
        line [100.0, 520.2]
    ```
    """
    drawn = list(series)
    most = max(value for _, values in drawn for value in values)
    step = 10 ** math.floor(math.log10(most))
    lines = ["```mermaid", "xychart-beta", f'    title "{title}"']
    lines.append(f'    x-axis "{x_axis[0]}" [{", ".join(map(str, x_axis[1]))}]')
    lines.append(f'    y-axis "{y_axis}" 0 --> {math.ceil(most / step) * step:g}')
    lines += [f"    {kind} [{', '.join(f'{value:.1f}' for value in values)}]" for kind, values in drawn]
    return "\n".join([*lines, "```"])


def serve_plots(result: Any) -> str:
    """Tokens a second over the concurrency, a line for each server."""
    cells = result["cells"]
    servers = list(dict.fromkeys(cell["server"] for cell in cells))
    plots: list[str] = []
    for prompt in dict.fromkeys(cell["prompt"] for cell in cells):
        of_prompt = [cell for cell in cells if cell["prompt"] == prompt]
        rates = {
            server: [cell["tokens_per_second"] for cell in of_prompt if cell["server"] == server] for server in servers
        }
        order = ", ".join(sorted(servers, key=lambda server: -rates[server][-1]))
        concurrency = dict.fromkeys(cell["concurrency"] for cell in of_prompt)
        title = f"Tokens/s, {prompt} prompts; at the right end from the top: {order}"
        plots.append(plot(title, ("requests at once", concurrency), "tokens/s", [("line", rates[s]) for s in servers]))
    return "\n\n".join(plots)


def frontend_plot(result: Any) -> str:
    """CPU time a token over the number of streams, a line for each number of engines."""
    cells = result["cells"]
    engines = sorted({cell["engines"] for cell in cells})
    lines = [("line", [cell["frontend_cpu_us"] for cell in cells if cell["engines"] == count]) for count in engines]
    title = f"Frontend CPU µs a token; lines: {', '.join(map(str, engines))} engines"
    return plot(title, ("streams", sorted({cell["streams"] for cell in cells})), "µs", lines)


def engine_step_plot(result: Any) -> str:
    """Milliseconds of each phase, in the step with the most rows and the shortest context."""
    step = max(
        (step for step in result["steps"] if step["mix"] == "mixed"), key=lambda step: (step["rows"], -step["context"])
    )
    phases = {
        "schedule": step["schedule"],
        "inputs": step["inputs"],
        "matrices": step["matrices"],
        "attention": step["attention"],
        "norms …": step["rest"],
        "sampling": step["sampling"],
        "book-keeping": step["bookkeeping"],
        "send": step["send"],
    }
    known = {name: value for name, value in phases.items() if value is not None}
    title = f"A decode step of {step['rows']} requests at {step['context']} tokens, ms"
    return plot(title, ("phase", [f'"{name}"' for name in known]), "ms", [("bar", list(known.values()))])


PLOTS: dict[str, Callable[[Any], str]] = {
    "serve": serve_plots,
    "frontend": frontend_plot,
    "engine_step": engine_step_plot,
}

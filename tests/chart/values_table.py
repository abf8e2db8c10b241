"""Writes the table of values in the chart's README from values.yaml and the comments there.

`python -m tests.chart.values_table` brings it up to date; a test compares.
"""

import re
from dataclasses import dataclass
from pathlib import Path

CHART = Path(__file__).parents[2] / "charts/tandem"
VALUES = CHART / "values.yaml"
README = CHART / "README.md"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]\w*):(?: (?P<value>.*))?$")


@dataclass(frozen=True)
class Value:
    path: str
    default: str
    description: str


def documented_values(text: str) -> list[Value]:
    """Every key of values.yaml that has a value or a comment, with the comment lines right above it."""
    values: list[Value] = []
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("#").strip())
            continue
        if match := _KEY.match(line):
            indent = len(match["indent"])
            parents = [parent for parent in parents if parent[0] < indent]
            path = ".".join([*(name for _, name in parents), match["key"]])
            parents.append((indent, match["key"]))
            if comment or match["value"]:
                values.append(Value(path, match["value"] or "", " ".join(comment)))
        comment = []
    return values


def table(values: list[Value]) -> str:
    rows = ["| Value | Default | |", "| --- | --- | --- |"]
    for value in values:
        default = f"`{value.default}`" if value.default else ""
        rows.append(f"| `{value.path}` | {default} | {value.description} |".replace("  ", " "))
    return "\n".join(rows)


def with_table(readme: str) -> str:
    """The README with its table of values made anew."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(documented_values(VALUES.read_text()))}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))

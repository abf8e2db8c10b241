"""What a PromQL expression asks for: its selectors, and the labels that it groups by."""

import re
from collections.abc import Iterator
from typing import Any

import promql_parser

# Grafana's variables, as a release of one pool and model would fill them.
VARIABLES = {"$__rate_interval": "10m", "$namespace": ".*", "$release": ".*", "$model": ".*", "$pool": ".*"}


def fill_in(query: str) -> str:
    """A dashboard's query as Grafana sends it."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


def nodes(expression: Any) -> Iterator[Any]:
    """Every node of a parsed expression."""
    yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        if (child := getattr(expression, name, None)) is not None:
            yield from nodes(child)
    for child in getattr(expression, "args", None) or []:
        yield from nodes(child)


def selectors(query: str) -> Iterator[tuple[str, list[str]]]:
    """(metric, labels of its matchers) of each selector. Raises ValueError for what does not parse."""
    for node in nodes(promql_parser.parse(query)):
        if isinstance(node, promql_parser.VectorSelector):
            yield node.name, [matcher.name for matcher in node.matchers.matchers]


def grouping_labels(query: str) -> set[str]:
    """Labels named in `by (…)` and `on (…)`."""
    found = re.findall(r"\b(?:by|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", query)
    return {label.strip() for labels in found for label in labels.split(",") if label.strip()}

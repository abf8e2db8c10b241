"""What hypothesis feeds the text side: texts of many scripts, and ways to cut a sequence into updates."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

_DIFFICULT = [
    "👨‍👩‍👧‍👦",
    "é",
    "\u0301",
    "北京",
    " ",
    "  ",
    "\n",
    "🇨🇳",
    "नमस्ते",
    "\x00",
    "▁",
    "<",
    "\ufffd",
    "a b",
    "<0x41>",
]

texts = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(_DIFFICULT)), max_size=12).map("".join)


def cut(draw: st.DrawFn, sequence: Sequence[Any]) -> list[Any]:
    """The sequence in consecutive parts, empty ones among them."""
    cuts = sorted(draw(st.lists(st.integers(0, len(sequence)), max_size=8)))
    bounds = [0, *cuts, len(sequence)]
    return [sequence[start:end] for start, end in pairwise(bounds)]

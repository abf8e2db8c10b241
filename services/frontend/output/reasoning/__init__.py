"""Splits what a model thinks from what it answers, over the stream. `make_reasoning_parser` is the way in."""

from services.frontend.output.reasoning.parser import ReasoningParser
from services.frontend.output.reasoning.registry import REASONING_PARSERS, make_reasoning_parser

__all__ = ["REASONING_PARSERS", "ReasoningParser", "make_reasoning_parser"]

"""Structured output: what a request asks for, and whether it can be served. `checker` is the way in."""

from services.frontend.structured.checker import GrammarChecker, GrammarRefused

__all__ = ["GrammarChecker", "GrammarRefused"]

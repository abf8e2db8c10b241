"""Splits tool calls from what a model says, over the stream. `make_tool_parser` is the way in."""

from services.frontend.output.tools.parser import ToolCallDelta, ToolParser
from services.frontend.output.tools.registry import TOOL_PARSERS, find_tool_parser, make_tool_parser

__all__ = ["TOOL_PARSERS", "ToolCallDelta", "ToolParser", "find_tool_parser", "make_tool_parser"]

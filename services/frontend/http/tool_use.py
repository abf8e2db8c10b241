"""Whether and how one request may call tools: what it asks for, held against what the model can do."""

from dataclasses import dataclass
from typing import Any

from services.frontend.http.errors import bad_request
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.schemas.chat import ChatCompletionRequest
from services.frontend.http.schemas.tools import NamedTool, Tool
from services.frontend.output.tools import TOOL_PARSERS, ToolParser


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request. `required`: at least one call, of nothing but `callable_tools`."""

    tools: list[Tool]
    callable_tools: list[Tool]
    required: bool
    parallel: bool

    @property
    def any_strict(self) -> bool:
        return any(tool.function.strict for tool in self.callable_tools)

    def for_template(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.tools]

    def new_parser(self, model: LoadedModel) -> ToolParser:
        """A parser for one choice."""
        return model.new_tool_parser([tool.function.name for tool in self.tools], single=not self.parallel)


def tool_use(request: ChatCompletionRequest, model: LoadedModel) -> ToolUse | None:
    """How the request uses tools; None where it does not. Raises ApiError 400."""
    choice = request.tool_choice or "auto"
    if not request.tools:
        if choice not in ("none", "auto"):
            raise bad_request("tool_choice asks for a call, but there are no tools", "tool_choice")
        return None
    if choice == "none":
        return None
    called = request.tools
    if isinstance(choice, NamedTool):
        called = [tool for tool in called if tool.function.name == choice.name]
        if not called:
            raise bad_request(f"tool_choice names {choice.name[:64]!r}, which is none of the tools", "tool_choice")
    if model.template.exists and model.template.tools_text is None:
        raise bad_request(
            "this model's chat template has no place for tools, so the model would not hear of them: leave tools out, "
            "send tool_choice none, or start the server with a --chat-template that reads `tools`",
            "tools",
        )
    if model.tool_call_parser is None:
        raise bad_request(
            "this server cannot read this model's tool calls: leave tools out, send tool_choice none, or start the "
            f"server with --tool-call-parser and the format that the model writes ({', '.join(TOOL_PARSERS)})",
            "tools",
        )
    return ToolUse(request.tools, called, choice != "auto", request.parallel_tool_calls is not False)

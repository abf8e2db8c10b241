"""The parsers of tool calls by name, and which of them a model's chat template speaks of."""

from collections.abc import Collection

from services.frontend.output.tools.deepseek_v3 import CALL_BEGIN, DeepSeekV3Parser
from services.frontend.output.tools.hermes import HermesParser
from services.frontend.output.tools.llama3_json import Llama3JsonParser
from services.frontend.output.tools.mistral import MistralParser
from services.frontend.output.tools.parser import ToolParser
from services.frontend.output.tools.pythonic import PythonicParser
from services.frontend.tokenizer import Tokenizer

PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekV3Parser,
    "pythonic": PythonicParser,
}
TOOL_PARSERS = tuple(PARSERS)

# Formats of other kinds between the same tags as Hermes' (Qwen3-Coder, GLM).
_NOT_HERMES = ("<function=", "<arg_key>")


def make_tool_parser(name: str, tokenizer: Tokenizer, names: Collection[str], *, single: bool = False) -> ToolParser:
    """A parser for one choice of a request that offers functions of these names; `single` allows one call only.

    Raises ValueError for a parser that there is not.
    """
    if name not in PARSERS:
        raise ValueError(f"there is no tool-call parser {name!r}; there are {', '.join(TOOL_PARSERS)}")
    parser = PARSERS[name]
    markers = [token_id for marker in parser.markers if (token_id := tokenizer.token_id(marker)) is not None]
    return parser(names, single=single, marker_token_ids=markers)


def find_tool_parser(template: str) -> str | None:
    """The parser for what a chat template tells the model to write; None where it tells of none that there is."""
    if CALL_BEGIN in template:
        return "deepseek_v3"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return None if any(mark in template for mark in _NOT_HERMES) else "hermes"
    if "func_name1(params_name1=params_value1" in template:
        return "pythonic"
    if '"parameters"' in template and ("<|python_tag|>" in template or "Environment: ipython" in template):
        return "llama3_json"
    return None

"""The reasoning parsers by name, and what the prompt says of where the output begins.

- `tagged`: reasoning where the output begins with the opening tag, or the prompt has opened it.
- `qwen3`: the same, with <think> and </think>.
- `deepseek_r1`: the same tags, and reasoning from the start though neither has opened it.

For all: `enable_thinking` or `thinking` false in chat_template_kwargs makes everything answer, tags included; a
prompt that has closed the reasoning, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.output.reasoning.parser import Phase, ReasoningParser
from services.frontend.tokenizer import Tokenizer

REASONING_PARSERS = ("qwen3", "deepseek_r1", "tagged")

_THINK_TAGS = ("<think>", "</think>")

# How far back the open turn of a prompt is read, for templates whose turns are not separated by tokens of their own.
_LONGEST_OPEN_TURN = 8192


def make_reasoning_parser(
    name: str,
    *,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tags: tuple[str, str] = _THINK_TAGS,
) -> ReasoningParser:
    """A parser for one choice. `tags` are those of `tagged`. Raises ValueError for a name that is none."""
    if name not in REASONING_PARSERS:
        raise ValueError(f"there is no reasoning parser {name!r}; there are {', '.join(REASONING_PARSERS)}")
    open_tag, close_tag = tags if name == "tagged" else _THINK_TAGS
    kwargs = chat_template_kwargs or {}
    if kwargs.get("enable_thinking") is False or kwargs.get("thinking") is False:
        return ReasoningParser(open_tag, close_tag, Phase.ANSWER_START)
    markers = [token_id for tag in (open_tag, close_tag) if (token_id := tokenizer.token_id(tag)) is not None]
    turn = _open_turn(tokenizer, prompt_token_ids, markers)
    opened_at, closed_at = turn.rfind(open_tag), turn.rfind(close_tag)
    if closed_at > opened_at:
        return ReasoningParser(open_tag, close_tag, Phase.ANSWER_START, marker_token_ids=markers)
    opened = opened_at >= 0 or name == "deepseek_r1"
    return ReasoningParser(open_tag, close_tag, Phase.OPENING, opened, markers)


def _open_turn(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], markers: Sequence[int]) -> str:
    """The end of the prompt that the output continues: what follows the last token that separates turns.

    Tags in earlier turns say nothing: a user may write one, and some templates keep the history's thoughts.
    """
    first = max(0, len(prompt_token_ids) - _LONGEST_OPEN_TURN)
    position = len(prompt_token_ids)
    while position > first:
        token_id = prompt_token_ids[position - 1]
        # Some vocabularies list runs of blanks as added tokens; those separate nothing.
        if token_id in tokenizer.added_token_ids and token_id not in markers and tokenizer.token_text(token_id).strip():
            break
        position -= 1
    return tokenizer.decode(prompt_token_ids[position:], skip_special_tokens=False)

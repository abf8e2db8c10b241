"""Whether a prompt and what may follow it fit the model: checked before anything is sent to an engine."""

from collections.abc import Sequence

from services.frontend.prompts.errors import InvalidPrompt

# A third of a millisecond's work in C, which lets no other thread run meanwhile.
_IDS_AT_ONCE = 16_384


def truncate_prompt(token_ids: list[int], keep: int | None, *, max_model_len: int, max_tokens: int | None) -> list[int]:
    """The last `keep` tokens of the prompt; -1 keeps as many as fit beside `max_tokens`; None keeps all."""
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max_model_len - (1 if max_tokens is None else max_tokens)
    if not 1 <= keep <= max_model_len:
        raise InvalidPrompt(
            f"truncate_prompt_tokens must be -1, or from 1 to the model's context length ({max_model_len}), not {keep}",
            "truncate_prompt_tokens",
        )
    return token_ids[-keep:]


def room_for_output(num_prompt_tokens: int, max_tokens: int | None, *, max_model_len: int, param: str) -> int:
    """How many tokens may be generated: `max_tokens`, or all that fit where it is None.

    `param` names the prompt's field. Raises InvalidPrompt, with both numbers, where they do not fit; a prompt
    needs room for at least one token after it, unless `max_tokens` is 0 and it is only scored.
    """
    if num_prompt_tokens == 0:
        raise InvalidPrompt(f"{param} has no tokens: a prompt needs at least one", param)
    needed = num_prompt_tokens + (1 if max_tokens is None else max_tokens)
    if needed <= max_model_len:
        return max_model_len - num_prompt_tokens if max_tokens is None else max_tokens
    if num_prompt_tokens >= max_model_len:
        raise _too_long(f"{num_prompt_tokens} tokens", max_model_len, param)
    raise InvalidPrompt(
        f"this model's maximum context length is {max_model_len} tokens, but {needed} were asked for: "
        f"{num_prompt_tokens} in the prompt and {max_tokens} for the output; shorten the prompt or lower max_tokens "
        f"to {max_model_len - num_prompt_tokens}",
        "max_tokens",
        "context_length_exceeded",
    )


def refuse_long_text(num_head_tokens: int, *, max_model_len: int, param: str) -> None:
    """Raise InvalidPrompt where the first part of a text alone, cut anywhere, is certain to be too long.

    Where a text is cut, tokens may come out otherwise than in the whole, hence twice the length.
    """
    if num_head_tokens > 2 * max_model_len:
        raise _too_long(f"more than {num_head_tokens} tokens", max_model_len, param)


def _too_long(length: str, max_model_len: int, param: str) -> InvalidPrompt:
    message = (
        f"this model's maximum context length is {max_model_len} tokens, but the prompt has {length}, which leaves "
        "no room for output: shorten the prompt"
    )
    return InvalidPrompt(message, param, "context_length_exceeded")


def check_prompt_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidPrompt where a client's token id is none of the model's."""
    for start in range(0, len(token_ids), _IDS_AT_ONCE):
        part = token_ids[start : start + _IDS_AT_ONCE]
        if min(part) < 0 or max(part) >= vocab_size:
            wrong = next(token_id for token_id in part if not 0 <= token_id < vocab_size)
            raise InvalidPrompt(
                f"{param} holds token id {wrong}, which is outside the vocabulary (0 to {vocab_size - 1})", param
            )

"""Logprobs in the three shapes that clients know: chat's, completions', and vLLM's of a prompt."""

from collections.abc import Sequence
from typing import Any

from services.frontend.tokenizer import Tokenizer
from shared.protocol import TokenLogprobs

# JSON has no minus infinity; OpenAI writes this for a token that cannot be.
LOWEST_LOGPROB = -9999.0


class LogprobFormat:
    """How one request's logprobs are written: `top` alternatives, tokens by their text or as "token_id:42"."""

    def __init__(self, tokenizer: Tokenizer, top: int, *, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._as_token_ids = as_token_ids

    def chat(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """OpenAI's chat format."""
        return {
            "content": [
                {
                    **self._chat_entry(token.token_id, token.logprob),
                    "top_logprobs": [self._chat_entry(*alternative) for alternative in self._alternatives(token)],
                }
                for token in tokens
            ],
            "refusal": None,
        }

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = f"token_id:{token_id}" if self._as_token_ids else self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(self._tokenizer.token_bytes(token_id))}

    def prompt(self, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """vLLM's prompt_logprobs: nothing for the first token, then each token and its alternatives by id."""
        entries: list[dict[str, Any] | None] = [None]
        for token in tokens:
            entry = {str(token.token_id): self._prompt_entry(token.token_id, token.logprob, token.rank)}
            for rank, (token_id, logprob) in enumerate(self._alternatives(token), start=1):
                entry.setdefault(str(token_id), self._prompt_entry(token_id, logprob, rank))
            entries.append(entry)
        return entries

    def _prompt_entry(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": self._tokenizer.token_text(token_id),
        }

    def name(self, token_id: int) -> str:
        """A token as the completions format names it: text, or its bytes where they are no whole characters."""
        if self._as_token_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def top_by_name(self, token: TokenLogprobs) -> dict[str, float]:
        """The alternatives, and the token itself, by name. Of two with one name the likelier stays."""
        top: dict[str, float] = {}
        for token_id, logprob in [*self._alternatives(token), (token.token_id, token.logprob)]:
            top.setdefault(self.name(token_id), _finite(logprob))
        return top

    def _alternatives(self, token: TokenLogprobs) -> list[tuple[int, float]]:
        return list(zip(token.top_token_ids, token.top_logprobs, strict=True))[: self._top]


class CompletionLogprobs:
    """One choice's logprobs in the completions format, chunk after chunk: text offsets go on from the last."""

    def __init__(
        self, form: LogprobFormat, tokenizer: Tokenizer, hidden: frozenset[int], *, begins_text: bool = False
    ) -> None:
        """`begins_text`: nothing precedes the first token in the text, so a space may be dropped there."""
        self._form = form
        self._tokenizer = tokenizer
        self._hidden = hidden  # special tokens that the text does not show
        self._characters = 0  # begun so far
        self._strip_left = tokenizer.strip_left if begins_text else 0

    def prompt(self, text: str, token_ids: Sequence[int], tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The prompt's, echoed as `text`: its first token follows nothing, so it has no logprob."""
        first = {
            "tokens": [self._form.name(token_ids[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset(token_ids[0], text)],
        }
        return joined(first, self.output(tokens, text))

    def output(self, tokens: Sequence[TokenLogprobs], prompt: str = "") -> dict[str, Any]:
        return {
            "tokens": [self._form.name(token.token_id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._form.top_by_name(token) for token in tokens],
            "text_offset": [self._offset(token.token_id, prompt) for token in tokens],
        }

    def _offset(self, token_id: int, prompt: str) -> int:
        """Where in the text the token begins, in characters; within a character, where that one begins."""
        data = self._tokenizer.token_bytes(token_id)
        # A prompt is echoed as it was sent: with the special tokens that the client wrote, without those added.
        if token_id in self._hidden and not prompt.startswith(data.decode("utf-8", "replace"), self._characters):
            data = b""
        while data and self._strip_left:
            if data.startswith(b" "):
                data = data[1:]
                self._strip_left -= 1
            else:
                self._strip_left = 0
        continues = bool(data) and _is_continuation(data[0]) and self._characters > 0
        offset = self._characters - continues
        self._characters += sum(not _is_continuation(byte) for byte in data)
        return offset


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two stretches of completion logprobs as one."""
    return {key: [*first[key], *second[key]] for key in first}


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _finite(logprob: float) -> float:
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB

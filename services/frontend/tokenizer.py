"""The model's tokenizer: text to ids and back, and what single tokens stand for. It never needs torch.

Wraps transformers' AutoTokenizer. Encoding goes to its fast backend directly, which may be called from several
threads at once; decoding is done by `output/detokenizer.py`, so that streamed and whole texts are the same.
"""

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from services.frontend.output.detokenizer import Detokenizer, PieceDetokenizer, WindowDetokenizer
from services.frontend.output.pieces import MAX_TOKEN_ID, TokenPieces
from shared.token_bytes import read_decoding_rule

_TOKENS_AT_ONCE = 8192
# What is no longer is encoded by the calling thread: some 0.2 ms, where to hand it over takes 0.02.
_OWN_THREAD_CHARACTERS = 1024


class TokenizerLoadError(Exception):
    """The tokenizer cannot be had; the message says from where and why."""


class Tokenizer:
    """One model's tokenizer. `hf` is transformers' own, for chat templates (render them with tokenize=False)."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.vocab_size: int = len(hf)
        self.eos_token_id: int | None = hf.eos_token_id
        self.bos_token_id: int | None = hf.bos_token_id
        added: dict[int, Any] = getattr(hf, "added_tokens_decoder", {})
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self.added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(
            [token_id for token_id, token in added.items() if token.special] + list(hf.all_special_ids)
        )
        # Only a tokenizer of the `tokenizers` library has one.
        self._backend: Any = getattr(hf, "backend_tokenizer", None)
        self._rule = None
        if self._backend is not None:
            # What a tokenizer.json may hold of these is meant for training, and would cut prompts in silence.
            self._backend.no_truncation()
            self._backend.no_padding()
            decoder = self._backend.decoder
            self._rule = read_decoding_rule(decoder.__getstate__() if decoder is not None else None)
        self._pieces: dict[frozenset[int], TokenPieces] = {}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> "Tokenizer":
        """From a local folder or a name on the hub. Raises TokenizerLoadError."""
        from transformers import AutoTokenizer

        if isinstance(source, Path) and not source.is_dir():
            raise TokenizerLoadError(f"there is no folder {source} to load a tokenizer from")
        try:
            hf = AutoTokenizer.from_pretrained(
                str(source), revision=revision or "main", trust_remote_code=trust_remote_code
            )
        except Exception as error:  # transformers, the hub's client and a broken file each raise their own
            raise TokenizerLoadError(
                f"cannot load a tokenizer from {str(source)!r}: {error}. It must be a folder with tokenizer.json "
                "(or another file that transformers reads), or the name of a model on the hub that can be reached."
            ) from error
        if not hf or not len(hf):
            raise TokenizerLoadError(f"the tokenizer of {str(source)!r} is empty: its vocabulary has no tokens")
        return cls(hf)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of the text; names of added tokens inside it become those tokens. Never truncates.

        With a fast backend it leaves Python's lock to the other threads while it works. Raises ValueError where
        the text holds a lone surrogate: it has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: a lone surrogate at character {error.start}") from error
        if self._backend is None:
            return self.hf.encode(text, add_special_tokens=add_special_tokens, truncation=False, verbose=False)
        # Unlike `encode`, it releases the lock: a megabyte would otherwise stop the event loop for seconds. One text is
        # encoded by the calling thread, and of two each by one of the library's. A thread that has just used its share
        # of a core waits for the next, and the event loop with it where that thread has, or is promised, the lock. The
        # event loop's own thread would wait until one of the library's is free.
        by_itself = len(text) <= _OWN_THREAD_CHARACTERS or _is_event_loop()
        texts = [text] if by_itself else [text, ""]
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)[0].ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The whole text of a sequence: exactly the concatenation of what its detokenizer streams."""
        detokenizer = self.detokenizer(skip_special_tokens, spaces_between_special_tokens)
        # In parts: to join what hundreds of thousands of tokens give would keep all other threads for milliseconds.
        starts = range(0, len(token_ids), _TOKENS_AT_ONCE)
        texts = [detokenizer.push(token_ids[start : start + _TOKENS_AT_ONCE]) for start in starts]
        return "".join(texts) + detokenizer.flush()

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        keep: Collection[int] = (),
        prompt_token_ids: Sequence[int] = (),
    ) -> Detokenizer:
        """A fresh incremental detokenizer for a sequence that continues the prompt.

        `keep` names special tokens that are not skipped. `spaces_between_special_tokens` matters only to tokenizers
        without a fast backend, which may set spaces around added tokens.
        """
        hidden = self.special_token_ids.difference(keep) if skip_special_tokens else frozenset()
        if self._rule is not None:
            pieces = self._pieces.get(hidden)
            if pieces is None:
                pieces = self._pieces[hidden] = TokenPieces(self.token_bytes, hidden)
            return PieceDetokenizer(pieces, self._rule.strip_left, prompt_token_ids)

        def is_visible(token_id: int) -> bool:
            return 0 <= token_id < self.vocab_size and token_id not in hidden

        def decode(ids: list[int]) -> str:
            if self._backend is not None:
                return self._backend.decode(ids, skip_special_tokens=False)
            return self.hf.decode(
                ids,
                skip_special_tokens=False,
                spaces_between_special_tokens=spaces_between_special_tokens,
                clean_up_tokenization_spaces=False,
            )

        return WindowDetokenizer(decode, is_visible, prompt_token_ids)

    @property
    def strip_left(self) -> int:
        """Spaces that are dropped where a whole text begins (sentencepiece puts one before its first word)."""
        return 0 if self._rule is None else self._rule.strip_left

    def token_text(self, token_id: int) -> str:
        """The text of the single token, special ones too; U+FFFD for what is not a whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of the single token; none for an id outside the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._read_bytes(token_id)
            if data:  # ids outside the vocabulary have no end
                self._bytes[token_id] = data
        return data

    def _read_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id <= MAX_TOKEN_ID:
            return b""
        if self._rule is None:
            if token_id >= self.vocab_size:
                return b""
            decode = self.hf.decode if self._backend is None else self._backend.decode
            return decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._rule.byte_level and token_id in self.added_token_ids and not self._in_model(token_id):
            return token.encode("utf-8", "replace")  # its text may look like the alphabet's stand-ins for bytes
        return self._rule.apply(token)

    def token_id(self, token: str) -> int | None:
        """The id of one token by its name, such as "<think>"; None where the vocabulary has no such token."""
        token_id = self._added_ids.get(token)
        if token_id is None and self._backend is not None:
            return self._backend.token_to_id(token)
        return token_id

    def _in_model(self, token_id: int) -> bool:
        return self._backend.model.id_to_token(token_id) is not None


def _is_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

"""Token ids to text as they come, at a cost per token that does not grow with the length.

The concatenation of all chunks is the same however the ids are cut into updates, and is what Tokenizer.decode
returns. No half character leaves: the incomplete tail of at most three bytes waits, and becomes one U+FFFD only at
the end of the sequence, or as soon as a byte shows that it can never become valid.

`tokenizers.decoders.DecodeStream` is not used: it decodes its window twice a token, never advances over tokens
without text or over bytes that stay invalid (its window then grows with every token), repeats a prompt that ends
mid-character, and raises where byte fallback rewrites what it already gave out.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

from services.frontend.output.pieces import TokenPieces

REPLACEMENT = "\ufffd"

# The longest character is four bytes, so no more than three can wait for the rest of theirs.
_LONGEST_PARTIAL = 3

# Tokens of a window that may wait for whole characters. Four suffice where each is one byte; some tokenizers have
# tokens that end one character and begin another.
_LONGEST_WAIT = 16

# Tokens of the prompt that the window begins with, so that spaces and merges at the seam come out right.
_PROMPT_CONTEXT = 8


class Detokenizer(Protocol):
    """Incremental decoding of one sequence. Any error of `push` is this sequence's alone."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; ids that mean nothing to the tokenizer give none."""
        ...

    def flush(self) -> str:
        """The end of the sequence: what still waited."""
        ...


class PieceDetokenizer:
    """Joins the tokens' bytes. `strip_left`: spaces that the tokenizer drops where a text begins.

    The sequence continues `prompt_token_ids`: where those hold any text, the first token keeps its leading
    space, and where they end within a character, the first tokens complete it.
    """

    __slots__ = ("_partial", "_pieces", "_strip_left")

    def __init__(self, pieces: TokenPieces, strip_left: int = 0, prompt_token_ids: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._partial = _partial_tail(pieces, prompt_token_ids)
        self._strip_left = strip_left
        if strip_left and any(pieces[token_id] for token_id in prompt_token_ids):
            self._strip_left = 0

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        partial = self._partial
        if len(token_ids) == 1 and not partial and not self._strip_left:
            piece = pieces[token_ids[0]]
            if type(piece) is str:
                return piece
        texts: list[str] = []
        for token_id in token_ids:
            piece = pieces[token_id]
            if type(piece) is str:
                if partial and piece:
                    texts.append(REPLACEMENT)
                    partial = b""
                texts.append(piece)
            else:
                text, partial = _decode(partial + piece)  # pyright: ignore[reportOperatorIssue]
                texts.append(text)
        self._partial = partial
        text = "".join(texts)
        return self._strip(text) if self._strip_left else text

    def flush(self) -> str:
        if not self._partial:
            return ""
        self._partial = b""
        return REPLACEMENT

    def _strip(self, text: str) -> str:
        while text and self._strip_left:
            if text[0] == " ":
                text = text[1:]
                self._strip_left -= 1
            else:
                self._strip_left = 0
        return text


def _decode(data: bytes) -> tuple[str, bytes]:
    """The text of the bytes, and the incomplete character that they end with."""
    text, consumed = utf_8_decode(data, "replace", False)
    partial = data[consumed:]
    # Python waits for the third byte of a surrogate too, for the sake of an error handler that lets them through.
    if len(partial) == 2 and partial[0] == 0xED and partial[1] >= 0xA0:
        return text + 2 * REPLACEMENT, b""
    return text, partial


def _partial_tail(pieces: TokenPieces, token_ids: Sequence[int]) -> bytes:
    """The bytes of the last character, where the tokens end within it. Only the last few tokens are looked at."""
    tail = b""
    for token_id in reversed(token_ids):
        piece = pieces[token_id]
        if isinstance(piece, bytes):
            tail = piece + tail
        elif piece:
            break
        if len(tail) >= _LONGEST_PARTIAL:
            break
    return _decode(tail[-_LONGEST_PARTIAL:])[1]


class WindowDetokenizer:
    """For tokenizers whose tokens depend on their neighbours: decodes a short window and takes what it adds.

    The window is what was given out last and what waits, as in Hugging Face's text-generation-inference
    (prefix and read offsets). `decode` is the tokenizer's; ids for which `is_visible` is False are left out.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_visible: Callable[[int], bool],
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._is_visible = is_visible
        self._window = [token_id for token_id in prompt_token_ids[-_PROMPT_CONTEXT:] if is_visible(token_id)]
        self._read = len(self._window)
        self._given = decode(self._window) if self._window else ""
        self._complete_prompt()

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._step(token_id) for token_id in token_ids if self._is_visible(token_id)])

    def flush(self) -> str:
        if self._read == len(self._window):
            return ""
        text = self._decode(self._window)[len(self._given) :]
        self._advance()
        return text

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        incomplete = len(text) <= len(self._given) or text.endswith(REPLACEMENT)
        if incomplete and len(self._window) - self._read < _LONGEST_WAIT:
            return ""
        added = text[len(self._given) :]
        self._advance()
        return added

    def _advance(self) -> None:
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._given = self._decode(self._window)

    def _complete_prompt(self) -> None:
        # A prompt that ends within a character: count its last tokens as not given out yet.
        read = self._read
        given = self._given
        while read > max(0, self._read - _LONGEST_PARTIAL) and given.endswith(REPLACEMENT):
            read -= 1
            given = self._decode(self._window[:read]) if read else ""
        if not given.endswith(REPLACEMENT):
            self._read, self._given = read, given

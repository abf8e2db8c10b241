"""Token id → its piece of the text, filled as ids are first seen.

Generated text is the UTF-8 reading of its tokens' bytes, one after another, for every tokenizer whose decoder
treats each token alone (byte-level BPE; sentencepiece, with or without byte fallback): shared/token_bytes.py.
`detokenizer.py` joins the pieces; tokenizers that need their neighbours (WordPiece, and those without a fast
backend) take its window.
"""

from collections.abc import Callable, Container

MAX_TOKEN_ID = 2**32 - 1  # the backend's ids are unsigned 32-bit, and it raises beyond them

Piece = str | bytes


class TokenPieces(dict[int, Piece]):
    """Token id → its text where its bytes are whole characters, else its bytes. Filled as ids are first seen.

    An id in `hidden` (special tokens that are skipped) is "", as is one outside the vocabulary: a model's logits
    may be wider than its tokenizer.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], hidden: Container[int]) -> None:
        super().__init__()
        self._token_bytes = token_bytes
        self._hidden = hidden

    def __missing__(self, token_id: int) -> Piece:
        data = b"" if token_id in self._hidden else self._token_bytes(token_id)
        if not data and token_id not in self._hidden:
            return ""  # not kept: ids outside the vocabulary have no end
        try:
            piece: Piece = data.decode()
        except UnicodeDecodeError:
            piece = data
        self[token_id] = piece
        return piece

"""What a vocabulary's entry stands for, as exact bytes: the rule of a tokenizer's decoder, applied token by token.

Frontends put their text together with it, engines the table that grammars need. It needs no tokenizer library.
"""

import json
from dataclasses import dataclass
from typing import Any


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2, encoder.py, bytes_to_unicode), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class DecodingRule:
    """What a tokenizer's decoder does to each token. `strip_left`: spaces dropped where the whole text begins."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_left: int = 0

    def apply(self, token: str) -> bytes:
        """The bytes that a vocabulary entry stands for."""
        if self.byte_level:
            try:
                return bytes([_BYTE_LEVEL[char] for char in token])
            except KeyError:  # an added token is written as it is
                return token.encode("utf-8", "replace")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode("utf-8", "replace")


def read_decoding_rule(decoder_state: bytes | None) -> DecodingRule | None:
    """The rule of a `tokenizers` decoder, given its serialized state (the `decoder` of a tokenizer.json); None where
    tokens depend on each other.

    >>> read_decoding_rule(b'{"type": "ByteLevel"}')
    DecodingRule(byte_level=True, replacements=(), byte_fallback=False, strip_left=0)
    """
    if decoder_state is None:
        return None
    state: dict[str, Any] = json.loads(decoder_state)
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    byte_level, byte_fallback, fused, strip_left = False, False, False, 0
    replacements: list[tuple[str, str]] = []
    for step in steps:
        match step:
            case {"type": "ByteLevel"} if not replacements and not byte_fallback:
                byte_level = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "ByteFallback"} if not fused and not byte_level:
                byte_fallback = True
            # Once fused, a longer pattern could match across two tokens.
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                not byte_level and not byte_fallback and (not fused or len(old) == 1)
            ):
                replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                strip_left += start
            case {"type": "Metaspace", "replacement": str(old)} if not byte_level and not byte_fallback:
                replacements.append((old, " "))
                strip_left += step.get("prepend_scheme", "always") != "never"
            case _:
                return None
    return DecodingRule(byte_level, tuple(replacements), byte_fallback, strip_left)

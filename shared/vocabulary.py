"""A model's vocabulary as a table of bytes, read from its folder without a tokenizer: what grammars are matched on.

Byte-level BPE and sentencepiece (with or without byte fallback) are read from tokenizer.json, or from vocab.json
where an older byte-level model has only that.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shared.model_source import ModelSourceError, read_json
from shared.token_bytes import DecodingRule, read_decoding_rule

_BYTE_LEVEL = DecodingRule(byte_level=True)


class VocabularyError(Exception):
    """The table cannot be made for this model. The message is one line that says why."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens[id]` are the token's bytes, empty for ids that stand for nothing (a model's logits may be wider than
    its tokenizer). `special_ids` are those that are no text (end of turn, padding); `special_names` their names."""

    tokens: list[bytes]
    special_ids: list[int]
    special_names: dict[str, int]


def read_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Collection[int] = ()) -> Vocabulary:
    """The first `vocab_size` ids of the model in this folder. Raises VocabularyError."""
    try:
        entries, rule, added = _read_files(folder)
        names = _special_names(folder)
    except ModelSourceError as error:
        raise VocabularyError(str(error)) from error
    tokens = [b""] * vocab_size
    for token, token_id in entries.items():
        if 0 <= token_id < vocab_size:
            tokens[token_id] = rule.apply(token)
    special: dict[int, str] = {}
    for token_id, content, is_special in added:
        if not 0 <= token_id < vocab_size:
            continue
        # Outside the model's own vocabulary an added token is written as it is: it may look like the stand-ins for
        # bytes and is none.
        plain = rule.byte_level and content not in entries
        tokens[token_id] = content.encode("utf-8", "replace") if plain else rule.apply(content)
        if is_special or content in names:
            special[token_id] = content
    special |= {entries[name]: name for name in names if entries.get(name, vocab_size) < vocab_size}
    special |= {token_id: special.get(token_id, "") for token_id in eos_token_ids if 0 <= token_id < vocab_size}
    if not any(tokens):
        raise VocabularyError(f"The tokenizer in {folder} has no tokens: no grammar can be matched.")
    return Vocabulary(tokens, sorted(special), {name: token_id for token_id, name in special.items() if name})


Added = list[tuple[int, str, bool]]  # id, text, special


def _read_files(folder: Path) -> tuple[dict[str, int], DecodingRule, Added]:
    added: dict[int, tuple[int, str, bool]] = {entry[0]: entry for entry in _added_in_config(folder)}
    path = folder / "tokenizer.json"
    if not path.is_file():
        path = folder / "vocab.json"
        if not path.is_file():
            raise VocabularyError(
                f"{folder} has neither tokenizer.json nor vocab.json: grammars need one of them "
                "(save the tokenizer again with transformers' save_pretrained)."
            )
        entries = {token: token_id for token, token_id in read_json(path).items() if isinstance(token_id, int)}
        return entries, _BYTE_LEVEL, list(added.values())
    content = read_json(path)
    model: Any = content.get("model")
    vocab: Any = cast("dict[str, Any]", model).get("vocab") if isinstance(model, dict) else None
    rule = read_decoding_rule(_as_bytes(content.get("decoder")))
    if rule is None or not isinstance(vocab, (dict, list)):
        raise VocabularyError(
            f"The tokenizer in {path} does not decode token by token (as byte-level BPE and sentencepiece do): "
            "grammars are not supported for it."
        )
    for token in cast("list[dict[str, Any]]", content.get("added_tokens") or []):
        added.setdefault(token["id"], (token["id"], token["content"], bool(token.get("special"))))
    if isinstance(vocab, list):  # Unigram: pieces and their scores
        pieces = [str(piece) for piece, _ in cast("list[tuple[object, object]]", vocab)]
        return {piece: token_id for token_id, piece in enumerate(pieces)}, rule, list(added.values())
    return cast("dict[str, int]", vocab), rule, list(added.values())


def _as_bytes(decoder: object) -> bytes | None:
    return None if decoder is None else json.dumps(decoder).encode()


def _added_in_config(folder: Path) -> Iterator[tuple[int, str, bool]]:
    path = folder / "tokenizer_config.json"
    decoder: Any = read_json(path).get("added_tokens_decoder") if path.is_file() else None
    if isinstance(decoder, dict):
        for token_id, token in cast("dict[str, dict[str, Any]]", decoder).items():
            if token_id.isdecimal():
                yield int(token_id), str(token.get("content", "")), bool(token.get("special"))


def _special_names(folder: Path) -> set[str]:
    """The texts that tokenizer_config.json and special_tokens_map.json give a role (bos_token and so on)."""
    names: set[str] = set()
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / file
        for key, value in (read_json(path) if path.is_file() else {}).items():
            if key.endswith("_token") or key == "additional_special_tokens":
                for token in cast("list[object]", value) if isinstance(value, list) else [value]:
                    text: Any = cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token
                    if isinstance(text, str) and text:
                        names.add(text)
    return names

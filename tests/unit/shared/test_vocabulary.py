"""The table of bytes read from a model's files agrees with the frontend's tokenizer, id by id."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from services.frontend.tokenizer import Tokenizer
from shared.vocabulary import VocabularyError, read_vocabulary
from tests import tokenizers_at_hand


@pytest.mark.parametrize("make", [tokenizers_at_hand.deepseek, tokenizers_at_hand.sentencepiece_like])
def test_the_table_agrees_with_the_tokenizer(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    tokenizer = make()
    folder = tokenizers_at_hand.write_model_folder(tokenizer, tmp_path)
    vocab_size = tokenizer.vocab_size + 5  # a model's logits are often wider than its tokenizer
    vocabulary = read_vocabulary(folder, vocab_size)
    assert vocabulary.tokens == [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    assert set(vocabulary.special_ids) == tokenizer.special_token_ids
    for name, token_id in vocabulary.special_names.items():
        assert tokenizer.token_id(name) == token_id


def test_smollm2s_table(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    vocabulary = read_vocabulary(smollm2, tokenizer.vocab_size, [2])
    assert vocabulary.tokens == [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    assert vocabulary.special_names["<|im_end|>"] == 2
    assert set(vocabulary.special_ids) == tokenizer.special_token_ids


def test_ids_beyond_the_model_are_left_out_and_eos_is_no_text(smollm2: Path) -> None:
    vocabulary = read_vocabulary(smollm2, 1000, [999, 5000])
    assert len(vocabulary.tokens) == 1000
    assert 999 in vocabulary.special_ids
    assert all(token_id < 1000 for token_id in vocabulary.special_ids)


def test_an_older_byte_level_model_has_vocab_json_alone(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "Ġb": 2, "åĮĹ": 3}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "added_tokens_decoder": {"4": {"content": "Ġ", "special": False}}})
    )
    vocabulary = read_vocabulary(tmp_path, 5)
    assert vocabulary.tokens == [b"<|endoftext|>", b"a", b" b", "北".encode(), "Ġ".encode()]
    assert vocabulary.special_names == {"<|endoftext|>": 0}


def test_a_model_without_a_table_says_why(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"neither tokenizer\.json nor vocab\.json"):
        read_vocabulary(tmp_path, 10)
    folder = tokenizers_at_hand.write_model_folder(tokenizers_at_hand.wordpiece(), tmp_path / "wordpiece")
    with pytest.raises(VocabularyError, match="token by token"):
        read_vocabulary(folder, 10)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(VocabularyError, match="cannot be read"):
        read_vocabulary(tmp_path, 10)

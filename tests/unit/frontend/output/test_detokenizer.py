"""Streamed text is the whole text, for every tokenizer and every way of cutting ids into updates."""

import functools

import pytest
import sentencepiece as sentencepiece_library
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.frontend.output.detokenizer import WindowDetokenizer
from services.frontend.tokenizer import Tokenizer
from tests import tokenizers_at_hand
from tests.unit.frontend.output.strategies import cut, texts


def stream(tokenizer: Tokenizer, parts: list[list[int]], **options: object) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)  # pyright: ignore[reportArgumentType]
    return [*[detokenizer.push(part) for part in parts], detokenizer.flush()]


@functools.cache
def single_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """The bytes that have a token to themselves, and its id."""
    single = {}
    for token_id in reversed(range(tokenizer.vocab_size)):
        data = tokenizer.token_bytes(token_id)
        if len(data) == 1:
            single[data[0]] = token_id
    return single


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    return single_bytes(tokenizer)[byte]


@given(text=texts, data=st.data())
@settings(max_examples=150, deadline=None)
@example(text="👨‍👩‍👧‍👦 is one family", data=None)
@example(text="<think>", data=None)
def test_any_text_comes_back_whole_and_in_pieces(tokenizer: Tokenizer, text: str, data: st.DataObject | None) -> None:
    if tokenizer is tokenizers_at_hand.sentencepiece_like():
        # Its own signs for a space and for a byte: as text, the vocabulary cannot tell them apart.
        text = text.replace("▁", "_").replace("<0x", "<")
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = cut(data.draw, ids) if data else [[token_id] for token_id in ids]
    whole = tokenizer.decode(ids)
    assert "".join(stream(tokenizer, parts)) == whole
    # SmolLM2's vocabulary lacks some rare bytes: what has those is lost when it is encoded. Special tokens go too.
    if single_bytes(tokenizer).keys() >= set(text.encode()) and tokenizer.special_token_ids.isdisjoint(ids):
        assert whole == text


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_ids_however_senseless_stream_as_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-3, tokenizer.vocab_size + 3), max_size=40))
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        chunks = stream(tokenizer, cut(data.draw, ids), skip_special_tokens=skip)
        assert "".join(chunks) == whole
        whole.encode()  # no lone surrogate
        plain = [i for i in ids if not (skip and i in tokenizer.special_token_ids)]
        expected = b"".join(tokenizer.token_bytes(token_id) for token_id in plain).decode("utf-8", "replace")
        if tokenizer is tokenizers_at_hand.sentencepiece_like():
            expected = expected.removeprefix(" ")
        assert whole == expected


@given(ids=st.lists(st.integers(0, 127_999), max_size=30))
@settings(max_examples=150, deadline=None)
def test_byte_level_text_is_what_the_library_decodes(deepseek: Tokenizer, ids: list[int]) -> None:
    assert deepseek.decode(ids, skip_special_tokens=False) == deepseek.hf.decode(ids)


@given(text=st.text(alphabet="abc 北京🙂é", max_size=20))
@settings(max_examples=100, deadline=None)
def test_sentencepiece_text_is_what_sentencepiece_decodes(sentencepiece: Tokenizer, text: str) -> None:
    original = sentencepiece_library.SentencePieceProcessor(model_proto=tokenizers_at_hand.sentencepiece_model())
    ids = original.encode(text)
    assert sentencepiece.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("text", ["北京是中国的首都", "🙂👨‍👩‍👧‍👦🇨🇳", "Ünïcödé"])
def test_no_half_character_leaves(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    chunks = stream(tokenizer, [[token_id] for token_id in ids])
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)


def test_a_sequence_that_ends_within_a_character_ends_in_one_replacement(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("ok", add_special_tokens=False), *[byte_token(tokenizer, b) for b in (0xF0, 0x9F, 0x99)]]
    chunks = stream(tokenizer, [[token_id] for token_id in ids])
    assert chunks[-1] == "\ufffd"
    assert "".join(chunks) == "ok\ufffd"


def test_bytes_that_can_never_become_valid_are_not_waited_for(tokenizer: Tokenizer) -> None:
    lead, invalid, letter = (byte_token(tokenizer, byte) for byte in (0xE0, 0x80, ord("A")))
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push([lead]) == ""
    assert detokenizer.push([invalid]) == "\ufffd\ufffd"
    assert detokenizer.push([lead]) == ""
    assert detokenizer.push([letter]) == "\ufffdA"
    first, second = (byte_token(tokenizer, byte) for byte in (0xED, 0xA0))  # a surrogate's
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([second]) == "\ufffd\ufffd"
    assert [detokenizer.push([invalid]) for _ in range(100)] == ["\ufffd"] * 100


def test_ids_outside_the_vocabulary_give_no_text_and_break_no_character(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    ids = [byte_token(tokenizer, byte) for byte in "北".encode()]
    assert detokenizer.push([ids[0], -1, ids[1], 2**31, 2**70, tokenizer.vocab_size + 999]) == ""
    assert detokenizer.push([ids[2]]) == "北"


def test_special_tokens_are_skipped_or_shown_on_every_path(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_id is not None
    name = tokenizer.token_text(tokenizer.eos_token_id)
    ids = [*tokenizer.encode("one", add_special_tokens=False), tokenizer.eos_token_id, tokenizer.eos_token_id]
    for options, expected in (({}, "one"), ({"skip_special_tokens": False}, f"one{name}{name}")):
        assert tokenizer.decode(ids, **options) == expected
        assert "".join(stream(tokenizer, [[i] for i in ids], **options)) == expected
        assert "".join(stream(tokenizer, [ids], **options)) == expected


def test_kept_special_tokens_are_shown_though_others_are_skipped(sentencepiece: Tokenizer) -> None:
    think, turn = sentencepiece.token_id("<think>"), sentencepiece.token_id("<|turn|>")
    assert think is not None
    assert turn is not None
    assert "".join(stream(sentencepiece, [[turn, think, turn]], keep=[think])) == "<think>"


def test_the_text_continues_the_prompt(sentencepiece: Tokenizer) -> None:
    prompt = sentencepiece.encode("Hello", add_special_tokens=False)
    world = sentencepiece.encode("world", add_special_tokens=False)
    assert "".join(stream(sentencepiece, [world], prompt_token_ids=prompt)) == " world"
    # Nothing of this prompt is text, so the text begins here.
    assert "".join(stream(sentencepiece, [world], prompt_token_ids=[sentencepiece.bos_token_id])) == "world"
    assert "".join(stream(sentencepiece, [world])) == "world"


def test_a_prompt_that_ends_within_a_character_is_completed_and_not_repeated(tokenizer: Tokenizer) -> None:
    ids = [byte_token(tokenizer, byte) for byte in "北京".encode()]
    for split in range(3, 6):
        expected = "京"
        assert "".join(stream(tokenizer, [[i] for i in ids[split:]], prompt_token_ids=ids[:split])) == expected


@pytest.mark.parametrize("make", [tokenizers_at_hand.wordpiece, tokenizers_at_hand.without_backend])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_tokenizers_whose_tokens_need_neighbours_stream_as_the_whole(make: object, data: st.DataObject) -> None:
    tokenizer: Tokenizer = make()  # pyright: ignore[reportCallIssue]
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 2), max_size=30))
    assert "".join(stream(tokenizer, cut(data.draw, ids))) == tokenizer.decode(ids)


@given(text=st.text(alphabet="aé北🙂 ", max_size=20))
@settings(max_examples=50, deadline=None)
def test_a_tokenizer_without_fast_backend_gives_the_text_back(text: str) -> None:
    tokenizer = tokenizers_at_hand.without_backend()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, [[i] for i in ids])) == text


def test_wordpiece_spaces_are_right_at_every_cut() -> None:
    tokenizer = tokenizers_at_hand.wordpiece()
    ids = tokenizer.encode("hello playing worlds!", add_special_tokens=False)
    whole = tokenizer.decode(ids)
    assert whole.replace(" !", "!") == "hello playing worlds!"
    prompt, rest = ids[:2], ids[2:]
    assert tokenizer.decode(prompt) + "".join(stream(tokenizer, [rest], prompt_token_ids=prompt)) == whole


def test_the_window_stays_short_whatever_comes() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "\ufffd" * len(ids)

    detokenizer = WindowDetokenizer(decode, lambda token_id: True)
    text = "".join(detokenizer.push([1]) for _ in range(1000)) + detokenizer.flush()
    assert text == "\ufffd" * 1000
    assert longest <= 32

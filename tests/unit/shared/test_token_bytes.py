"""A tokenizer's decoder is read as a rule for single tokens, or not at all."""

import pytest
from tokenizers import Regex, decoders

from shared.token_bytes import DecodingRule, read_decoding_rule


@pytest.mark.parametrize(
    ("decoder", "rule"),
    [
        (decoders.ByteLevel(), DecodingRule(byte_level=True)),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), DecodingRule(byte_level=True)),
        (
            decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
            DecodingRule(replacements=(("▁", " "),), byte_fallback=True),
        ),
        (decoders.Metaspace(), DecodingRule(replacements=(("▁", " "),), strip_left=1)),
        (decoders.Metaspace(prepend_scheme="never"), DecodingRule(replacements=(("▁", " "),))),
        (decoders.WordPiece(), None),
        (decoders.CTC(), None),
        (decoders.BPEDecoder(), None),
        (decoders.Sequence([decoders.Replace(Regex("a+"), "b"), decoders.Fuse()]), None),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), None),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]), None),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), None),
    ],
)
def test_rule_of_each_decoder(decoder: decoders.Decoder, rule: DecodingRule | None) -> None:
    assert read_decoding_rule(decoder.__getstate__()) == rule


def test_no_decoder_no_rule() -> None:
    assert read_decoding_rule(None) is None


def test_what_single_tokens_stand_for() -> None:
    byte_level = DecodingRule(byte_level=True)
    assert byte_level.apply("Ġthe") == b" the"
    assert byte_level.apply("åĮĹ") == "北".encode()
    assert byte_level.apply("<｜User｜>") == "<｜User｜>".encode()
    sentencepiece = DecodingRule(replacements=(("▁", " "),), byte_fallback=True)
    assert sentencepiece.apply("▁the") == b" the"
    assert sentencepiece.apply("<0xE5>") == b"\xe5"
    assert sentencepiece.apply("<0xZZ>") == b"<0xZZ>"

"""Reasoning is split from the answer the same way however the text is cut."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.frontend.output.reasoning import REASONING_PARSERS, ReasoningParser, make_reasoning_parser
from services.frontend.output.reasoning.parser import Phase
from services.frontend.tokenizer import Tokenizer
from tests.unit.frontend.output.strategies import cut


def split(parser: ReasoningParser, parts: list[str]) -> tuple[str, str]:
    pieces = [*[parser.push(part) for part in parts], parser.finish()]
    return "".join(reasoning for reasoning, _ in pieces), "".join(content for _, content in pieces)


def without_blank_lines(text: str) -> str:
    blanks = text[: len(text) - len(text.lstrip())]
    return "" if blanks == text else text[blanks.rfind("\n") + 1 :]


def split_whole(text: str, opened: bool) -> tuple[str, str]:
    """From the definition, with the whole text at hand."""
    begins = text.lstrip().startswith("<think>")
    if not begins and not opened:
        return "", without_blank_lines(text)
    before = ""
    if begins:
        before, _, text = text.partition("<think>")
        before = before if opened else ""
    reasoning, _, content = text.partition("</think>")
    return before + reasoning, without_blank_lines(content)


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", "\n", " ", "a", "é"]), max_size=14),
    opened=st.booleans(),
    data=st.data(),
)
@settings(max_examples=600, deadline=None)
@example(text=["<think>", "a", "</think>", "\n", "\n", "b"], opened=False, data=None)
def test_any_cut_gives_the_same_split(text: list[str], opened: bool, data: st.DataObject | None) -> None:
    whole = "".join(text)
    parts = cut(data.draw, whole) if data else list(whole)
    parser = ReasoningParser("<think>", "</think>", Phase.OPENING, opened)
    assert split(parser, parts) == split_whole(whole, opened)


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>why\n</think>\n\nbecause", "why\n", "because"),
        (False, "\n <think>why</think>  indented", "why", "  indented"),
        (False, "<think></think>yes", "", "yes"),
        (False, "<think>cut off </thi", "cut off </thi", ""),
        (False, "<thin ice", "", "<thin ice"),
        (False, "<thi", "", "<thi"),
        (False, "plain <think>no</think>", "", "plain <think>no</think>"),
        (False, "no tag</think>", "", "no tag</think>"),
        (True, "why</think>because", "why", "because"),
        (True, "<think>why</think>because", "why", "because"),
        (True, "never closed", "never closed", ""),
        (True, "<thi", "<thi", ""),
        (True, "a<think>b</think>c</think>d", "a<think>b", "c</think>d"),
        (False, " \n\n ", "", ""),
        (True, "x</think> \n\t", "x", ""),
    ],
)
def test_single_cases(opened: bool, text: str, reasoning: str, content: str) -> None:
    for parts in ([text], list(text)):
        parser = ReasoningParser("<think>", "</think>", Phase.OPENING, opened)
        assert split(parser, parts) == (reasoning, content)


def test_text_that_is_no_tag_is_not_held() -> None:
    parser = ReasoningParser("<think>", "</think>", Phase.OPENING)
    assert parser.push("<") == ("", "")
    assert parser.push("div>") == ("", "<div>")
    parser = ReasoningParser("<think>", "</think>", Phase.OPENING, opened=True)
    assert parser.push("a</") == ("a", "")
    assert parser.push("t") == ("", "")
    assert parser.push("d>b") == ("</td>b", "")


def test_blanks_without_end_are_neither_kept_nor_slow() -> None:
    parser = ReasoningParser("<think>", "</think>")
    for _ in range(20_000):
        assert parser.push(" ") == ("", "")
    assert len(parser.push("a")[1]) < 1000


def test_both_tags_in_one_piece() -> None:
    assert ReasoningParser("<think>", "</think>").push("<think>a</think>b") == ("a", "b")


def test_a_token_that_ends_one_tag_and_begins_the_other_is_no_reasoning() -> None:
    parser = ReasoningParser("[A]", "[/A]")
    for start, token in ((0, "[A"), (2, "]["), (4, "/A]")):
        parser.push(token)
        parser.add_token(start, start + len(token))
    parser.finish()
    assert parser.reasoning_tokens == 0


@pytest.mark.parametrize("tags", [("", "x"), ("x", ""), (" x", "y")])
def test_tags_that_cannot_work_are_refused(tags: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="tag"):
        ReasoningParser(*tags)


def make(name: str, tokenizer: Tokenizer, prompt: str = "", **kwargs: object) -> ReasoningParser:
    return make_reasoning_parser(
        name,
        tokenizer=tokenizer,
        prompt_token_ids=tokenizer.encode(prompt, add_special_tokens=False),
        **kwargs,  # pyright: ignore[reportArgumentType]
    )


TURN = "<｜User｜>What does <think> do?<｜Assistant｜>"


@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        ("qwen3", TURN, "<think>a</think>b", ("a", "b")),
        ("qwen3", TURN, "a</think>b", ("", "a</think>b")),
        ("qwen3", TURN + "<think>\n", "a</think>b", ("a", "b")),
        ("qwen3", TURN + "<think>\n\n</think>\n\n", "b", ("", "b")),
        ("qwen3", TURN + "<think>\nSo far", " a</think>b", (" a", "b")),
        ("qwen3", "<｜User｜>Hi<｜Assistant｜><think>x</think>y<｜end▁of▁sentence｜>" + TURN, "b", ("", "b")),
        ("deepseek_r1", TURN, "a</think>b", ("a", "b")),
        ("deepseek_r1", TURN, "<think>a</think>b", ("a", "b")),
        ("deepseek_r1", TURN + "<think>\n", "a</think>b", ("a", "b")),
        ("deepseek_r1", TURN + "</think>", "b", ("", "b")),
        ("tagged", TURN, "<think>a</think>b", ("a", "b")),
    ],
)
def test_where_the_output_begins(
    deepseek: Tokenizer, name: str, prompt: str, text: str, expected: tuple[str, str]
) -> None:
    for parts in ([text], list(text)):
        assert split(make(name, deepseek, prompt), parts) == expected


@pytest.mark.parametrize("name", REASONING_PARSERS)
@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_thinking_switched_off_leaves_only_answer(deepseek: Tokenizer, name: str, switch: str) -> None:
    parser = make(name, deepseek, TURN + "<think>\n", chat_template_kwargs={switch: False})
    assert split(parser, ["<think>a", "</think>b"]) == ("", "<think>a</think>b")
    parser = make(name, deepseek, TURN + "<think>\n", chat_template_kwargs={switch: True})
    assert split(parser, ["<think>a", "</think>b"]) == ("a", "b")


def test_tags_of_ones_own(deepseek: Tokenizer) -> None:
    tags = ("[THINK]", "[/THINK]")
    assert split(make("tagged", deepseek, tags=tags), list("[THINK]a[/THINK]b")) == ("a", "b")
    assert split(make("qwen3", deepseek, tags=tags), list("[THINK]a[/THINK]b")) == ("", "[THINK]a[/THINK]b")
    assert split(make("tagged", deepseek, TURN + "[THINK]\n", tags=tags), list("a[/THINK]b")) == ("a", "b")


def test_an_unknown_name_lists_the_known_ones(deepseek: Tokenizer) -> None:
    with pytest.raises(ValueError, match="qwen3, deepseek_r1, tagged"):
        make("qwen4", deepseek)

"""Prompts around the model's limit, and token ids around its vocabulary."""

import pytest

from services.frontend.prompts.errors import InvalidPrompt
from services.frontend.prompts.limits import check_prompt_ids, room_for_output, truncate_prompt

LIMIT = 10


@pytest.mark.parametrize(
    ("prompt", "asked", "room"),
    [(9, None, 1), (9, 1, 1), (1, None, 9), (1, 9, 9), (10, 0, 0), (1, 0, 0), (5, 5, 5)],
)
def test_what_fits(prompt, asked, room):
    assert room_for_output(prompt, asked, max_model_len=LIMIT, param="prompt") == room


@pytest.mark.parametrize(
    ("prompt", "asked", "param"),
    [
        (10, None, "prompt"),
        (11, None, "prompt"),
        (10, 1, "prompt"),
        (11, 0, "prompt"),
        (9, 2, "max_tokens"),
        (1, 10, "max_tokens"),
    ],
)
def test_what_does_not_fit_is_told_with_both_numbers(prompt, asked, param):
    with pytest.raises(InvalidPrompt) as error:
        room_for_output(prompt, asked, max_model_len=LIMIT, param="prompt")
    assert error.value.param == param
    assert error.value.code == "context_length_exceeded"
    assert str(LIMIT) in error.value.message
    assert str(prompt) in error.value.message


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidPrompt, match="no tokens"):
        room_for_output(0, None, max_model_len=LIMIT, param="prompt")


@pytest.mark.parametrize(
    ("keep", "asked", "kept"),
    [
        (None, 1, list(range(20))),
        (3, 1, [17, 18, 19]),
        (10, 1, list(range(10, 20))),
        (-1, 4, list(range(14, 20))),
        (-1, None, list(range(11, 20))),
    ],
)
def test_truncation_keeps_the_end(keep, asked, kept):
    assert truncate_prompt(list(range(20)), keep, max_model_len=LIMIT, max_tokens=asked) == kept


@pytest.mark.parametrize(("keep", "asked"), [(0, 1), (11, 1), (-1, 10), (-1, 11)])
def test_truncation_to_nothing_or_beyond_is_refused(keep, asked):
    with pytest.raises(InvalidPrompt) as error:
        truncate_prompt([1, 2], keep, max_model_len=LIMIT, max_tokens=asked)
    assert error.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize("wrong", [-1, 100, 2**40])
def test_ids_outside_the_vocabulary_are_named(wrong):
    check_prompt_ids([0, 99], 100, "prompt")
    with pytest.raises(InvalidPrompt, match=str(wrong)):
        check_prompt_ids([0, wrong, 99], 100, "prompt")


@pytest.mark.parametrize("place", [0, 16_383, 16_384, 49_999])
@pytest.mark.parametrize("wrong", [-1, 100])
def test_one_wrong_id_among_many_is_found_and_named(place, wrong):
    token_ids = [number % 100 for number in range(50_000)]
    check_prompt_ids(token_ids, 100, "tokens")
    token_ids[place] = wrong
    with pytest.raises(InvalidPrompt, match=f"tokens holds token id {wrong},"):
        check_prompt_ids(token_ids, 100, "tokens")

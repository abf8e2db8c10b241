"""Every field out of range is refused by its name."""

import math

import pytest

from shared.sampling_params import MAX_SEED, InvalidSamplingParams, SamplingParams, check_sampling_params
from shared.structured_output import StructuredOutput

WRONG = [
    ("max_tokens", {"max_tokens": -1}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.1}),
    ("top_p", {"top_p": math.nan}),
    ("top_k", {"top_k": -1}),
    ("min_p", {"min_p": 1.5}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": MAX_SEED + 1}),
    ("min_tokens", {"min_tokens": 17, "max_tokens": 16}),
    ("min_tokens", {"min_tokens": -1}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": 1e-30}),
    ("repetition_penalty", {"repetition_penalty": math.inf}),
    ("frequency_penalty", {"frequency_penalty": 2.1}),
    ("presence_penalty", {"presence_penalty": -2.1}),
    ("logprobs", {"logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("stop_token_ids", {"stop_token_ids": [5, 100]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("logit_bias", {"logit_bias": {100: 1.0}}),
    ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("logit_bias", {"logit_bias": {1: 101.0}}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("allowed_token_ids", {"allowed_token_ids": [100]}),
    ("bad_words", {"bad_words_token_ids": [[]]}),
    ("bad_words", {"bad_words_token_ids": [[1, 100]]}),
    ("structured_output", {"structured_output": StructuredOutput(kind="xml", value="<a/>")}),
    ("structured_output", {"structured_output": StructuredOutput(kind="regex")}),
    ("structured_output", {"structured_output": StructuredOutput(kind="json_object", reasoning_opened=True)}),
    ("structured_output", {"structured_output": StructuredOutput(kind="json_object", reasoning_start="<think>")}),
]


@pytest.mark.parametrize(("field", "values"), WRONG)
def test_a_wrong_field_is_named(field: str, values: dict) -> None:
    with pytest.raises(InvalidSamplingParams) as caught:
        check_sampling_params(SamplingParams(**values), vocab_size=100)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": 0},
        {"temperature": 0.0},
        {"top_p": 1e-9},
        {"seed": MAX_SEED},
        {"min_tokens": 16, "max_tokens": 16},
        {"stop_token_ids": [0, 99], "allowed_token_ids": [99], "logit_bias": {0: -100.0, 99: 100.0}},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"structured_output": StructuredOutput(kind="json_object", reasoning_end="</think>", reasoning_opened=True)},
    ],
)
def test_the_limits_themselves_are_allowed(values: dict) -> None:
    check_sampling_params(SamplingParams(**values), vocab_size=100)

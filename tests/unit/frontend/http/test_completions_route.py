"""/v1/completions: prompts in every form, echo, scoring, logprobs in the completions format."""

import pytest
from echo_app import EOS, Call, EchoPool, events

from services.frontend.http.schemas.responses import Completion


def ids(text: str, pool: EchoPool) -> list[int]:
    return pool.tokenizer.encode(text, add_special_tokens=False)


def texts(stream):
    joined: dict[int, str] = {}
    for event in stream:
        for choice in event["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return joined


def test_a_prompt_in_every_form(call, pool: EchoPool):
    forms = {
        "one": ["one"],
        ("one", "two"): ["one", "two"],
        tuple(ids("one", pool)): ["one"],
        (tuple(ids("one", pool)), tuple(ids("zwei", pool))): ["one", "zwei"],
    }
    for form, expected in forms.items():
        prompt = form if isinstance(form, str) else [list(p) if isinstance(p, tuple) else p for p in form]
        response = call.complete(prompt)
        assert response.status_code == 200
        answer = Completion.model_validate_json(response.content)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
        assert answer.usage.prompt_tokens == sum(map(len, expected))
        assert answer.usage.prompt_tokens_details.cached_tokens == 3 * len(expected)
        stream = events(call.complete(prompt, stream=True, stream_options={"include_usage": True}))
        assert texts(stream) == dict(enumerate(expected))
        assert stream[-1]["usage"] == answer.usage.model_dump(exclude_none=True)


def test_whole_numbers_may_be_written_with_a_point(call, pool: EchoPool):
    one, two = ids("one", pool), ids("zwei", pool)
    for prompt in ([*map(float, one)], [one[0], *map(float, one[1:])], [[*map(float, one)], two]):
        pool.submitted.clear()
        fields = {"n": 1.0, "max_tokens": 2.0, "seed": 5.0, "logprobs": 1.0, "top_k": 7.0}
        fields |= {"stop_token_ids": [9.0, 10], "allowed_token_ids": [*map(float, range(200))]}
        assert call.complete(prompt, **fields).status_code == 200
        generation = pool.submitted[0]
        assert generation.prompt_token_ids == one
        sampling = generation.sampling
        assert (sampling.max_tokens, sampling.seed, sampling.logprobs, sampling.top_k) == (2, 5, 1, 7)
        assert (sampling.stop_token_ids, sampling.allowed_token_ids) == ([9, 10], list(range(200)))
        for numbers in (generation.prompt_token_ids, sampling.stop_token_ids, sampling.allowed_token_ids or ()):
            assert set(map(type, numbers)) == {int}
    long = [float(one[0])] * 20_000  # read in parts
    assert "20000 tokens" in call.complete(long).json()["error"]["message"]
    assert call.post("/detokenize", {"tokens": [*map(float, one)]}).json() == {"prompt": "one"}
    assert call.post("/detokenize", {"tokens": long}).json() == {"prompt": "o" * 20_000}


def test_sixteen_tokens_by_default(call, pool: EchoPool):
    choice = call.complete("a" * 20).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a" * 16, "length")


def test_choices_belong_to_their_prompts(call, pool: EchoPool):
    answer = call.complete(["ab", "cd"], n=2, seed=5).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "cd", "cd"]
    assert [generation.sampling.seed for generation in pool.submitted] == [5, 6, 5, 6]
    assert answer["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_finish_once_for_each_choice(call, stream):
    response = call.complete(["a", "b"], n=2, stream=stream)
    if stream:
        finished = [c["index"] for e in events(response) for c in e["choices"] if c["finish_reason"] == "stop"]
    else:
        finished = [c["index"] for c in response.json()["choices"] if c["finish_reason"] == "stop"]
    assert sorted(finished) == [0, 1, 2, 3]


def test_echo(call, pool: EchoPool):
    assert call.complete("né", echo=True).json()["choices"][0]["text"] == "néné"
    assert call.complete(ids("né", pool), echo=True).json()["choices"][0]["text"] == "néné"
    stream = events(call.complete(["né", "x"], n=2, echo=True, stream=True))
    assert texts(stream) == {0: "néné", 1: "néné", 2: "xx", 3: "xx"}


def test_scoring_a_prompt(call, pool: EchoPool):
    """What evaluation harnesses ask: echo, logprobs and no new token, or one that they cut off."""
    response = call.complete(ids("héy", pool), echo=True, logprobs=1, max_tokens=0)
    answer = Completion.model_validate_json(response.content)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("héy", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", "y"]
    assert choice.logprobs.token_logprobs == [None, -0.25, -0.25, -0.25]
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.top_logprobs[3] == {"y": -0.25}
    assert choice.logprobs.text_offset == [0, 1, 1, 2]
    assert answer.usage.completion_tokens == 0

    one_more = call.complete(ids("héy", pool), echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    assert one_more["text"] == "héyh"
    assert one_more["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert one_more["logprobs"]["text_offset"] == [0, 1, 1, 2, 3]


def test_offsets_in_a_prompt_that_names_special_tokens(call, pool: EchoPool):
    """They are in the text as it was sent, though not in that which is made of token ids."""
    prompt = f"a{EOS}b"
    choice = call.complete(prompt, echo=True, logprobs=0, max_tokens=0).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == (prompt, [0, 1, 1 + len(EOS)])
    choice = call.complete(ids(prompt, pool), echo=True, logprobs=0, max_tokens=0).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("ab", [0, 1, 1])


def test_echo_of_one_token_and_no_more(call, pool: EchoPool):
    choice = call.complete([ids("h", pool)[0]], echo=True, logprobs=0, max_tokens=0).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [None]
    assert call.complete("h", echo=True, max_tokens=0).json()["choices"][0]["text"] == "h"


def test_logprobs(call):
    choice = call.complete("abé", logprobs=2).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "bytes:\\xc3", "bytes:\\xa9", EOS]
    assert logprobs["token_logprobs"] == [-0.25] * 5
    assert logprobs["top_logprobs"][0] == {"a": -0.25, "!": -0.75}
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3]
    streamed: dict[str, list] = {}
    for event in events(call.complete("abé", logprobs=2, stream=True)):
        for part in event["choices"]:
            for key, values in (part["logprobs"] or {}).items():
                streamed.setdefault(key, []).extend(values)
    assert streamed == logprobs


def test_logprobs_zero_with_several_choices(call):
    for choice in call.complete("ab", logprobs=0, n=2).json()["choices"]:
        assert choice["logprobs"]["top_logprobs"] == [{"a": -0.25}, {"b": -0.25}, {EOS: -0.25}]


def test_echoed_logprobs_streamed(call):
    whole = call.complete("abé", echo=True, logprobs=1).json()["choices"][0]
    streamed: dict[str, list] = {}
    stream = events(call.complete("abé", echo=True, logprobs=1, stream=True))
    for event in stream:
        for part in event["choices"]:
            for key, values in (part["logprobs"] or {}).items():
                streamed.setdefault(key, []).extend(values)
    assert streamed == whole["logprobs"]
    assert texts(stream) == {0: whole["text"]}


def test_tokens_as_ids(call, pool: EchoPool):
    choice = call.complete("a", logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]
    assert choice["logprobs"]["tokens"][0] == f"token_id:{ids('a', pool)[0]}"


def test_prompt_logprobs_and_token_ids(call, pool: EchoPool):
    response = call.complete(["ab", "c"], prompt_logprobs=1, return_token_ids=True)
    answer = Completion.model_validate_json(response.content)
    assert [choice.prompt_token_ids for choice in answer.choices] == [ids("ab", pool), ids("c", pool)]
    assert answer.choices[0].prompt_logprobs is not None
    assert len(answer.choices[0].prompt_logprobs) == 2
    assert answer.choices[1].prompt_logprobs == [None]


def test_truncation(call, pool: EchoPool):
    answer = call.complete("abcdef", truncate_prompt_tokens=2, echo=True).json()
    assert answer["choices"][0]["text"] == "efef"
    assert answer["usage"]["prompt_tokens"] == 2


def test_the_stop_token_of_the_client(call, pool: EchoPool):
    (b,) = ids("b", pool)
    choice = call.complete("abc", logit_bias={}, stop_token_ids=[b]).json()["choices"][0]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("length", [510, 511, 512, 513])
def test_prompts_around_the_limit(call, length):
    response = call.complete("a" * length, max_tokens=1)
    if length <= 511:
        assert response.status_code == 200
    else:
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert "512" in error["message"]
        assert str(length) in error["message"]
    scored = call.complete("a" * length, max_tokens=0, echo=True)
    assert scored.status_code == (200 if length <= 512 else 400)


def test_prompt_logprobs_are_made_once_for_a_prompts_choices(call: Call, pool: EchoPool):
    choices = call.complete(["abc", "de"], n=2, prompt_logprobs=1).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [3, 3, 2, 2]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    assert [generation.sampling.prompt_logprobs for generation in pool.submitted] == [1, None, 1, None]
    echoed = call.complete("abc", n=2, echo=True, logprobs=0, max_tokens=1).json()["choices"]
    assert [choice["logprobs"]["tokens"] for choice in echoed] == [["a", "b", "c", "a"]] * 2

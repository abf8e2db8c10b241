"""The `openai` client runs every option that both completions take, against SmolLM2. Each test says which it runs."""

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from loadtest.server_process import ServerProcess
from services.frontend.http.schemas.chat import ChatCompletionRequest
from services.frontend.http.schemas.completion import CompletionRequest
from tests.integration.openai_options.options_client import (
    ANSWER,
    EOS,
    MODEL,
    PROMPT,
    QUESTION,
    content,
    detokenize,
    encode,
    output_ids,
    runs,
    text,
)


@runs("model")
def test_models_and_their_names(client: openai.OpenAI, complete: Callable[..., Any]) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "smol/alias"]
    assert client.models.retrieve("smol/alias").id == "smol/alias"
    assert complete(model="smol/alias").model == "smol/alias"
    with pytest.raises(openai.NotFoundError) as missing:
        complete(model="another")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


@runs("stream", "stream_options")
def test_streams_and_their_usage(complete: Callable[..., Any], chat: Callable[..., Any]) -> None:
    for ask, whole in ((complete, complete()), (chat, chat())):
        chunks = list(ask(stream=True))
        assert not any(chunk.usage for chunk in chunks)
        chunks = list(ask(stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].choices == []
        assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens
        assert not any(chunk.usage for chunk in chunks[:-1])
        chunks = list(ask(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == whole.usage.completion_tokens
        if ask is chat:
            assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == content(whole)
            assert chunks[0].choices[0].delta.role == "assistant"
        else:
            assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text(whole)
        assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [
            whole.choices[0].finish_reason
        ]


@runs("n", "seed")
def test_choices_draw_with_seeds_of_their_own(complete: Callable[..., Any], chat: Callable[..., Any]) -> None:
    texts = [choice.text for choice in complete(n=3, seed=41, temperature=1.0).choices]
    assert texts == [text(complete(seed=seed, temperature=1.0)) for seed in (41, 42, 43)]
    assert len(set(texts)) > 1
    contents = [choice.message.content for choice in chat(n=3, seed=41, temperature=1.5).choices]
    assert contents == [content(chat(seed=seed, temperature=1.5)) for seed in (41, 42, 43)]
    streamed = ["", "", ""]
    for chunk in complete(n=3, seed=41, temperature=1.0, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    with pytest.raises(openai.BadRequestError):
        complete(n=5)


@runs("stop", "include_stop_str_in_output")
def test_stop_strings(complete: Callable[..., Any], chat: Callable[..., Any]) -> None:
    assert content(chat()) == ANSWER
    answer = chat(stop=" is")
    assert (content(answer), answer.choices[0].finish_reason) == ("The capital of France", "stop")
    assert answer.choices[0].model_extra["stop_reason"] == " is"
    assert content(chat(stop=["zebra", "France is"], include_stop_str_in_output=True)) == "The capital of France is"
    assert content(chat(stop=None)) == content(chat(stop=[])) == ANSWER
    for stop in ("", ["a", ""], ["a", "b", "c", "d", "e"]):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(stop=stop)
        assert refused.value.param == "stop"


@runs("temperature", "top_p", "top_k", "min_p")
def test_truncations_to_one_token_are_greedy(complete: Callable[..., Any]) -> None:
    greedy = text(complete())
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-5}):
        assert text(complete(**({"temperature": 1.0, "seed": 7} | options))) == greedy, options
    for options in ({"top_k": 0}, {"top_k": -1}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert text(complete(temperature=1.0, seed=7, **options)) == text(complete(temperature=1.0, seed=7))
    for options in ({"top_p": 0}, {"top_k": -2}, {"min_p": 1.1}, {"temperature": -1}, {"temperature": 101}):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(**options)
        assert refused.value.param in options


@runs("frequency_penalty", "presence_penalty", "repetition_penalty", "allowed_token_ids")
def test_penalties(client: openai.OpenAI, server: ServerProcess, complete: Callable[..., Any]) -> None:
    ids = encode(server, " red blue")
    assert len(ids) == 2
    options = {
        "prompt": "red red red red red red",
        "allowed_token_ids": ids,
        "max_tokens": 24,
        "return_token_ids": True,
    }
    plain = output_ids(complete(**options))
    assert set(plain) <= set(ids)
    assert plain.count(ids[0]) > plain.count(ids[1])
    for penalty in ("frequency_penalty", "presence_penalty"):
        assert output_ids(complete(**options, **{penalty: 2.0})).count(ids[1]) > plain.count(ids[1]), penalty
    # Repetition counts the prompt's tokens too.
    answer = complete("red red red red red red", repetition_penalty=100.0, return_token_ids=True)
    assert not set(output_ids(answer)) & set(answer.choices[0].model_extra["prompt_token_ids"])
    assert len(set(output_ids(answer))) == len(output_ids(answer))


@runs("logit_bias", "stop_token_ids", "bad_words")
def test_tokens_forced_ended_and_banned(server: ServerProcess, complete: Callable[..., Any]) -> None:
    (blue,) = encode(server, " blue")
    assert text(complete(logit_bias={str(blue): 100}, max_tokens=3)) == " blue blue blue"
    answer = complete(logit_bias={str(blue): 100}, stop_token_ids=[blue])
    assert (text(answer), answer.choices[0].finish_reason) == ("", "stop")
    assert answer.choices[0].model_extra["stop_reason"] == blue
    assert "Paris" in text(complete())
    assert "Paris" not in text(complete(bad_words=["Paris"]))
    first, second = text(complete()).split()[:2]
    assert f"{first} {second}" not in text(complete(bad_words=[f"{first} {second}"]))


@runs("min_tokens", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens")
def test_the_end_of_a_sequence(complete: Callable[..., Any]) -> None:
    eager = {"logit_bias": {str(EOS): 100}, "max_tokens": 6}
    answer = complete(**eager)
    assert (text(answer), answer.usage.completion_tokens, answer.choices[0].finish_reason) == ("", 1, "stop")
    answer = complete(**eager, min_tokens=4)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "stop")
    answer = complete(**eager, ignore_eos=True)
    assert (text(answer), answer.usage.completion_tokens, answer.choices[0].finish_reason) == ("", 6, "length")
    for spaces in (True, False):
        shown = complete(**eager, ignore_eos=True, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert text(shown) == "<|im_end|>" * 6


@runs("truncate_prompt_tokens", "return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs")
def test_token_ids(server: ServerProcess, complete: Callable[..., Any], chat: Callable[..., Any]) -> None:
    ids = encode(server, PROMPT)
    answer = complete(truncate_prompt_tokens=2, return_token_ids=True, echo=True)
    assert answer.usage.prompt_tokens == 2
    assert answer.choices[0].model_extra["prompt_token_ids"] == ids[-2:]
    assert text(answer).startswith(" France is")
    assert len(output_ids(answer)) == answer.usage.completion_tokens
    assert complete(truncate_prompt_tokens=-1).usage.prompt_tokens == len(ids)

    answer = complete(logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    assert answer.choices[0].logprobs.tokens == [f"token_id:{token_id}" for token_id in output_ids(answer)]
    answer = chat(logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)
    names = [token.token for token in answer.choices[0].logprobs.content]
    assert names == [f"token_id:{token_id}" for token_id in output_ids(answer)]
    assert detokenize(server, answer.model_extra["prompt_token_ids"]).endswith("<|im_start|>assistant\n")

    scored = complete(prompt_logprobs=2).choices[0].model_extra["prompt_logprobs"]
    assert len(scored) == len(ids)
    assert scored[0] is None
    assert all(str(token_id) in entry for token_id, entry in zip(ids[1:], scored[1:], strict=True))
    assert len(chat(prompt_logprobs=0).model_extra["prompt_logprobs"]) == chat().usage.prompt_tokens
    with pytest.raises(openai.BadRequestError):
        complete(prompt_logprobs=1, stream=True)


@runs("priority", "cache_salt")
def test_priority_and_cache_salt(complete: Callable[..., Any]) -> None:
    assert text(complete(priority=-5)) == text(complete(priority=5)) == text(complete())
    long = "A prompt of its own, long enough to fill some blocks of the cache. " * 4

    def cached(**options: Any) -> int:
        return complete(long, max_tokens=1, **options).usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="first") == 0
    assert cached(cache_salt="first") >= 32
    assert cached(cache_salt="second") == 0
    assert cached() == 0


@runs("timeout")
def test_a_timeout(complete: Callable[..., Any]) -> None:
    assert complete(timeout=60).choices[0].finish_reason == "length"
    with pytest.raises(openai.InternalServerError) as late:
        complete(timeout=0.001, max_tokens=500, ignore_eos=True)
    assert late.value.status_code == 504


@runs(
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prediction", "verbosity", "modalities",
)  # fmt: skip
def test_options_that_change_nothing(complete: Callable[..., Any], chat: Callable[..., Any]) -> None:
    both: dict[str, Any] = {
        "user": "somebody",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "id",
        "prompt_cache_key": "key",
        "a_field_of_tomorrow": {"any": ["thing"]},
    }
    assert text(complete(**both)) == text(complete())
    own: dict[str, Any] = {
        "prediction": {"type": "content", "content": "The"},
        "verbosity": "low",
        "modalities": ["text"],
    }
    assert content(chat(**both, **own)) == ANSWER


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


@runs("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
def test_structured_output(complete: Callable[..., Any], chat: Callable[..., Any]) -> None:
    assert text(complete(response_format={"type": "text"})) == text(complete())
    for strict in (True, False, None):
        schema = {"name": "city", "schema": CITY, "strict": strict}
        answer = chat(response_format={"type": "json_schema", "json_schema": schema}, max_completion_tokens=60)
        assert set(json.loads(content(answer))) == {"city", "big"}
        assert answer.choices[0].finish_reason == "stop"
    answer = chat(response_format={"type": "json_object"}, max_completion_tokens=200, temperature=0.5, seed=1)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content(answer)), dict)
    assert content(answer).startswith("{")
    tag = {"begin": "<city>", "schema": CITY, "end": "</city>"}
    answer = chat(
        response_format={"type": "structural_tag", "structures": [tag], "triggers": ["<city>"]}, max_completion_tokens=8
    )
    assert content(answer)
    for options in ({"structured_outputs": {"json": CITY}}, {"guided_json": CITY}, {"guided_json": json.dumps(CITY)}):
        assert set(json.loads(text(complete(max_tokens=60, **options)))) == {"city", "big"}
    for options in ({"structured_outputs": {"regex": "[A-Z]{3}"}}, {"guided_regex": "[A-Z]{3}"}):
        assert re.fullmatch("[A-Z]{3}", text(complete(**options)))
    for options in ({"structured_outputs": {"choice": ["Rome", "Oslo"]}}, {"guided_choice": ["Rome", "Oslo"]}):
        answer = chat(**options, n=3, temperature=1, logprobs=True, top_logprobs=2)
        for choice in answer.choices:
            assert choice.message.content in ("Rome", "Oslo")
            assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    lark, gbnf = 'start: "x" ("y" | "z")', 'root ::= "x" ("y" | "z")'
    for options in ({"structured_outputs": {"grammar": gbnf}}, {"guided_grammar": lark}):
        assert text(complete(**options)) in ("xy", "xz")
    bad = {"name": "bad", "schema": {"type": "array", "items": {"type": "string", "format": "sonnet"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        chat(response_format={"type": "json_schema", "json_schema": bad})
    assert refused.value.param == "response_format.json_schema.schema.items.format"


class City(BaseModel):
    name: str = Field(max_length=12)
    country: Literal["France", "Norway"]
    districts: list[Annotated[str, Field(max_length=8)]] = Field(max_length=2)
    mayor: str | None = Field(max_length=8)


def test_parse_and_streamed_parse(client: openai.OpenAI) -> None:
    """The openai client's own helpers, which check what they read."""
    settings: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 1, "seed": 5, "max_tokens": 150}
    whole = client.chat.completions.parse(response_format=City, n=2, **settings)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, City)
    with client.chat.completions.stream(response_format=City, **settings) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events
    assert events[-1] == "content.done"
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


def test_the_server_warns_once_of_a_field_that_it_does_not_know(
    server: ServerProcess, complete: Callable[..., Any]
) -> None:
    for _ in range(2):
        complete(max_tokens=1, field_of_a_test=1)
    assert server.log.count("'field_of_a_test'") == 1


@pytest.mark.parametrize("name", sorted(ChatCompletionRequest.unsupported))
def test_what_would_change_the_answer_is_refused(
    chat: Callable[..., Any], complete: Callable[..., Any], name: str
) -> None:
    for ask in (chat, complete) if name in CompletionRequest.unsupported else (chat,):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(**{name: ["something"]})
        assert refused.value.param == name

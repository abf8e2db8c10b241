"""The `openai` client runs every option that docs/api.md describes, against SmolLM2.

Each test says which options it runs; one test holds the list against the document, another the document against the
schema, so that an option cannot be added without being described and run.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from loadtest.server_process import ROOT, ServerProcess, tandem_serve
from services.frontend.http.schemas.chat import ChatCompletionRequest
from services.frontend.http.schemas.completion import CompletionRequest

KEY = "a-key-of-the-test"
MODEL = "smol"
EOS = 2  # <|im_end|>
PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."

RUN: set[str] = set()

Test = Callable[..., None]


def runs(*options: str) -> Callable[[Test], Test]:
    """This test runs these options."""

    def note(test: Test) -> Test:
        RUN.update(options)
        return test

    return note


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ["--dtype", "float32", "--kv-cache-memory", "0.5", "--max-model-len", "2048", "--api-key", KEY]
    flags += ["--served-model-name", MODEL, "--served-model-name", "smol/alias", "--max-n", "4", "--max-stop", "4"]
    with tandem_serve(tmp_path_factory.mktemp("options"), "--model", str(smollm2), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def complete(client: openai.OpenAI) -> Callable[..., Any]:
    """A completion, greedy and of eight tokens where nothing else is said; vLLM's options as keywords too."""

    def ask(prompt: Any = PROMPT, **options: Any) -> Any:
        fields = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8} | options
        return client.completions.create(**split(client.completions.create, fields))

    return ask


@pytest.fixture
def chat(client: openai.OpenAI) -> Callable[..., Any]:
    """A chat completion, in the same way."""

    def ask(messages: Any = QUESTION, **options: Any) -> Any:
        fields = {"model": MODEL, "messages": messages, "temperature": 0, "max_completion_tokens": 16} | options
        return client.chat.completions.create(**split(client.chat.completions.create, fields))

    return ask


def split(method: Callable[..., Any], fields: dict[str, Any]) -> dict[str, Any]:
    """What the client knows as its arguments, and the rest as extra_body."""
    known = set(method.__wrapped__.__annotations__) if hasattr(method, "__wrapped__") else set()  # type: ignore[attr-defined]
    own = {name: value for name, value in fields.items() if name in known and name != "timeout"}
    return own | {"extra_body": {name: value for name, value in fields.items() if name not in own}}


def text(answer: Any) -> str:
    return answer.choices[0].text


def content(answer: Any) -> Any:
    return answer.choices[0].message.content


def output_ids(answer: Any) -> list[int]:
    return answer.choices[0].model_extra["token_ids"]


def documented(heading: str) -> set[str]:
    """The options in the first column of the table under a heading of docs/api.md."""
    document = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    section = document.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|") and "---" not in line]
    return {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}


HEADINGS = ["Fields of both completions", "Chat only", "Completions only"]


def test_every_documented_option_is_run() -> None:
    assert set().union(*map(documented, HEADINGS)) - RUN == set()


def test_every_option_is_documented() -> None:
    both, chat, completions = map(documented, HEADINGS)
    assert set(ChatCompletionRequest.model_fields) - (both | chat) == set()
    assert set(CompletionRequest.model_fields) - (both | completions) == set()
    assert both <= set(ChatCompletionRequest.model_fields) & set(CompletionRequest.model_fields)
    refused = set(ChatCompletionRequest.unsupported)
    document = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert {name for name in refused if f"`{name}`" not in document and not name.startswith("guided_")} == set()


# Both.


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


# Chat.


@runs("messages")
def test_messages_of_every_role_and_form(server: ServerProcess, chat: Callable[..., Any]) -> None:
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of France?"}]
    joined = [{"role": "user", "content": "What is the capital\nof France?"}]
    assert prompt_of(server, chat([{"role": "user", "content": parts}], return_token_ids=True)) == prompt_of(
        server, chat(joined, return_token_ids=True)
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "somebody"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
        {"role": "function", "name": "f", "content": "43"},
        {"role": "assistant", "content": "", "reasoning": "why"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello"}], "reasoning_content": "why"},
        {"role": "user", "content": "And now?"},
    ]
    prompt = prompt_of(server, chat(messages, return_token_ids=True))
    for said in ("Be brief.", "user\nHi", "tool\n42", "function\n43", "assistant\nHello", "And now?"):
        assert said in prompt
    developer = prompt_of(
        server, chat([{"role": "developer", "content": "Be brief."}, *QUESTION], return_token_ids=True)
    )
    assert "<|im_start|>system\nBe brief.<|im_end|>" in developer
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    for content, said in (([image], "images are not supported"), (None, "content must be given")):
        with pytest.raises(openai.BadRequestError, match=said):
            chat([{"role": "user", "content": content}])


@runs("max_completion_tokens", "max_tokens")
def test_lengths(chat: Callable[..., Any], complete: Callable[..., Any]) -> None:
    assert chat(max_completion_tokens=3).usage.completion_tokens == 3
    assert chat(max_completion_tokens=2, max_tokens=5).usage.completion_tokens == 2
    assert chat(max_completion_tokens=None, max_tokens=4).usage.completion_tokens == 4
    # Without either, all that fits: this answer ends by itself.
    assert content(chat(max_completion_tokens=None)) == ANSWER
    assert complete(max_tokens=None).usage.completion_tokens == 16
    assert complete(max_tokens=0, echo=True).usage.completion_tokens == 0
    for options in ({"max_tokens": 0}, {"max_tokens": 3000}):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(**options)
        assert refused.value.param == "max_tokens"


@runs("logprobs", "top_logprobs")
def test_logprobs_of_chat(chat: Callable[..., Any]) -> None:
    assert chat().choices[0].logprobs is None
    answer = chat(logprobs=True, top_logprobs=3)
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens).removesuffix("<|im_end|>") == ANSWER
    for token in tokens:
        assert bytes(token.bytes).decode() == token.token
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1.001
    streamed = [
        token.logprob
        for chunk in chat(logprobs=True, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert streamed == pytest.approx([token.logprob for token in tokens], abs=1e-4)
    assert chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    for options in ({"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 1}):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(**options)
        assert refused.value.param == "top_logprobs"


@runs("add_generation_prompt", "continue_final_message", "echo")
def test_a_message_is_continued(server: ServerProcess, chat: Callable[..., Any]) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France"}]
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert content(chat(begun, **going_on)) == " is Paris."
    assert content(chat(begun, **going_on, echo=True)) == ANSWER
    streamed = chat(begun, **going_on, echo=True, stream=True)
    assert "".join(choice.delta.content or "" for chunk in streamed for choice in chunk.choices) == ANSWER
    assert prompt_of(server, chat(add_generation_prompt=False, return_token_ids=True)).endswith("France?<|im_end|>\n")
    with pytest.raises(openai.BadRequestError) as refused:
        chat(begun, continue_final_message=True)
    assert refused.value.param == "continue_final_message"


@runs("chat_template_kwargs", "documents", "reasoning_effort", "include_reasoning")
def test_variables_of_the_template(chat: Callable[..., Any]) -> None:
    # SmolLM2's template reads none of them; tests of the echo show that they reach one that does.
    for options in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"title": "a", "text": "b"}]},
        {"reasoning_effort": "low"},
        {"include_reasoning": False},
    ):
        assert content(chat(**options)) == ANSWER
    with pytest.raises(openai.BadRequestError) as refused:
        chat(chat_template_kwargs={"chat_template": "{{ 1 }}"})
    assert refused.value.param == "chat_template_kwargs"


@runs("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "audio", "web_search_options")
def test_tools_where_the_template_has_no_place_for_them(chat: Callable[..., Any]) -> None:
    """test_serve_tools.py has a template that does."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert content(chat(tools=tools, tool_choice="none", parallel_tool_calls=False)) == ANSWER
    assert content(chat(function_call="none")) == ANSWER
    for choice in ("auto", "required"):
        with pytest.raises(openai.BadRequestError, match="template has no place for tools") as refused:
            chat(tools=tools, tool_choice=choice)
        assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError):
        chat(functions=[{"name": "f"}])
    with pytest.raises(openai.BadRequestError):
        chat(modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"})


# Completions.


@runs("prompt")
def test_prompts_of_every_form(server: ServerProcess, complete: Callable[..., Any]) -> None:
    other = "Water boils at"
    expected = [text(complete(prompt)) for prompt in (PROMPT, other)]
    ids = [encode(server, prompt) for prompt in (PROMPT, other)]
    assert [choice.text for choice in complete([PROMPT, other]).choices] == expected
    assert text(complete(ids[0])) == expected[0]
    answer = complete(ids)
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    for prompt in ([], [[]], "", [PROMPT, 5], [10**9], {"a": 1}):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(prompt)
        assert refused.value.param == "prompt"


@runs("echo", "logprobs")
def test_echo_and_logprobs_of_completions(server: ServerProcess, complete: Callable[..., Any]) -> None:
    plain = complete(logprobs=2).choices[0]
    echoed = complete(logprobs=2, echo=True).choices[0]
    length = len(encode(server, PROMPT))
    assert echoed.text == PROMPT + plain.text
    assert "".join(echoed.logprobs.tokens) == echoed.text
    assert echoed.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.token_logprobs[length:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    for name, offset in zip(echoed.logprobs.tokens, echoed.logprobs.text_offset, strict=True):
        assert echoed.text[offset:].startswith(name)
    assert all(len(top) == 2 for top in plain.logprobs.top_logprobs)
    tokens = [
        token
        for chunk in complete(logprobs=2, echo=True, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.tokens
    ]
    assert tokens == echoed.logprobs.tokens
    assert all(len(top) == 1 for top in complete(logprobs=0).choices[0].logprobs.top_logprobs)
    with pytest.raises(openai.BadRequestError):
        complete(logprobs=21)


@runs("add_special_tokens", "best_of", "suffix")
def test_the_lesser_options_of_completions(complete: Callable[..., Any], chat: Callable[..., Any]) -> None:
    # SmolLM2's tokenizer puts nothing around a text.
    assert text(complete(add_special_tokens=False)) == text(complete(add_special_tokens=True))
    assert content(chat(add_special_tokens=True)) == ANSWER
    assert text(complete(best_of=1)) == text(complete())
    for options in ({"best_of": 2}, {"suffix": "the end"}):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(**options)
        assert refused.value.param in options


# The other routes.


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(server.url + path, json=body, headers={"Authorization": f"Bearer {KEY}"})
    assert response.status_code == 200, response.text
    return response.json()


def encode(server: ServerProcess, prompt: str) -> list[int]:
    return post(server, "/tokenize", {"prompt": prompt})["tokens"]


def detokenize(server: ServerProcess, token_ids: list[int]) -> str:
    return post(server, "/detokenize", {"tokens": token_ids})["prompt"]


def prompt_of(server: ServerProcess, answer: Any) -> str:
    """The prompt's text, of an answer that was asked with return_token_ids."""
    return detokenize(server, answer.model_extra["prompt_token_ids"])


def test_the_other_routes(server: ServerProcess) -> None:
    for said in (PROMPT, "北京 👩‍👩‍👧‍👦", "<|im_start|>user\n"):
        assert detokenize(server, encode(server, said)) == said
    asked = post(server, "/tokenize", {"messages": QUESTION, "return_token_strs": True})
    assert "".join(asked["token_strs"]).endswith("<|im_start|>assistant\n")
    assert asked["max_model_len"] == 2048
    for path in ("/version", "/health", "/health/live", "/health/ready", "/metrics", "/docs", "/openapi.json"):
        assert httpx.get(server.url + path).status_code == 200
    for path in ("/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"):
        assert httpx.post(server.url + path, json={}).status_code == 401
    response = httpx.get(server.url + "/version", headers={"X-Request-Id": "mine", "Origin": "https://elsewhere"})
    assert response.headers["x-request-id"] == "mine"
    assert "access-control-allow-origin" not in response.headers

"""The `openai` client runs the options that chat or text completions alone take, and the other routes."""

import math
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from loadtest.server_process import ServerProcess
from tests.integration.openai_options.options_client import (
    ANSWER,
    PROMPT,
    QUESTION,
    content,
    detokenize,
    encode,
    post,
    prompt_of,
    runs,
    text,
)

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
    for parts, said in (([image], "images are not supported"), (None, "content must be given")):
        with pytest.raises(openai.BadRequestError, match=said):
            chat([{"role": "user", "content": parts}])


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

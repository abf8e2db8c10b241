"""Every bad request gets its 4xx, in OpenAI's JSON, with the field's name, before anything is queued."""

import json

import pytest
from echo_app import MAX_MODEL_LEN, Call, EchoPool

from services.frontend.http import parsing
from services.frontend.http.app import create_app
from services.frontend.http.schemas.responses import ErrorResponse
from services.frontend.settings import FrontendSettings
from shared.sampling_params import MAX_LIST_LENGTH

USER = {"role": "user", "content": "hi"}

BOTH = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": True}, "n"),
    ({"n": 10**30}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": [str(i) for i in range(17)]}, "stop"),
    ({"stop": "s" * 5000}, "stop"),
    ({"stop": ["a" * 3000, "b" * 3000]}, "stop"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"max_tokens": 0}, None),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"max_tokens": 10**4300 - 1}, "max_tokens"),  # one more digit, and Python would not write it out
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop_token_ids": [257]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * (MAX_LIST_LENGTH + 1)}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**12]}, "allowed_token_ids"),
    ({"logit_bias": {"257": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"logit_bias": {"5.0": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(MAX_LIST_LENGTH + 1)}}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["  "]}, "bad_words"),
    ({"bad_words": ["a"] * MAX_LIST_LENGTH}, "bad_words"),
    ({"bad_words": "word"}, "bad_words"),
    ({"bad_words": ["b" * 2000]}, "bad_words"),
    ({"bad_words": ["b" * 1000] * 100}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "s" * 2000}, "cache_salt"),
    ({"timeout": 0}, "timeout"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.structures"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"properties": {"a": {"uniqueItems": True}}}}, "guided_json.properties.a.uniqueItems"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"model": 5}, "model"),
]

CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": "REFUSE"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "CRASH"}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 512}, "max_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
]

COMPLETION = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [257]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**20]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 64}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"max_tokens": 512}, "max_tokens"),
]


def refused(response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return ErrorResponse.model_validate_json(response.content).error.model_dump()


@pytest.mark.parametrize(("fields", "param"), BOTH)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_fields_of_both(call, pool: EchoPool, path, fields, param):
    body = ({"messages": [USER]} if "chat" in path else {"prompt": "hi"}) | fields
    error = refused(call.post(path, body))
    if param is not None:
        assert error["param"] is not None
        assert error["param"].split("[")[0] == param
        assert param.split(".")[0] in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not pool.submitted


@pytest.mark.parametrize(("fields", "param"), CHAT)
def test_fields_of_chat(call, pool: EchoPool, fields, param):
    assert refused(call.post("/v1/chat/completions", {"messages": [USER]} | fields))["param"] == param
    assert not pool.submitted


@pytest.mark.parametrize(("fields", "param"), COMPLETION)
def test_fields_of_completions(call, pool: EchoPool, fields, param):
    assert refused(call.post("/v1/completions", {"prompt": "hi"} | fields))["param"] == param
    assert not pool.submitted


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, None),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "REFUSE"}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**20]}, "tokens"),
    ],
)
def test_the_lesser_routes(call, path, body, param):
    assert refused(call.post(path, body))["param"] == param


PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]

MALFORMED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"5",
    b"\xff\xfe",
    b"\x00",
    b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": [1e400], "messages": [1e400], "tokens": [1e400]}',
    b'{"prompt": "\xc3\x28", "tokens": [1]}',
    b'{"prompt": "\\ud800", "tokens": [1], "messages": [{"role": "user", "content": "\\udfff"}]}',
    b'{"\\ud800": 1}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    b'{"tokens": [' + b"9" * 10_000 + b"], " + b'"prompt": [' + b"9" * 10_000 + b"]}",
    b'{"prompt": "a\x01"}',
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_bodies(call, pool: EchoPool, path, body):
    refused(call("POST", path, content=body, headers={"content-type": "application/json"}))
    assert not pool.submitted


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", None])
def test_only_json_is_read(call, path, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    refused(call("POST", path, content=b'{"prompt": "a", "tokens": [1]}', headers=headers), 415)
    json_type = {"content-type": "Application/JSON; charset=utf-8"}
    body = {"prompt": "a", "tokens": [1]} | ({"messages": [USER]} if "chat" in path else {})
    assert call("POST", path, content=json.dumps(body).encode(), headers=json_type).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_model(call, pool: EchoPool, path):
    body = {"model": "nope", "prompt": "a", "tokens": [1], "messages": [USER]}
    if path == "/tokenize":
        del body["messages"]
    error = refused(call.post(path, body), 404)
    assert error["code"] == "model_not_found"
    assert "nope" in error["message"]
    assert not pool.submitted


def test_the_model_must_be_named_among_several(settings, make_model):
    call = Call(create_app(settings, [make_model(names=["a"]), make_model(names=["b"])]))
    assert refused(call.chat())["param"] == "model"
    assert call.chat(model="b").json()["model"] == "b"


def test_two_models_of_one_name(settings, make_model):
    with pytest.raises(ValueError, match="two models"):
        create_app(settings, [make_model(names=["a"]), make_model(names=["b", "a"])])


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("stream", [False, True])
def test_no_engine(call, pool: EchoPool, path, stream):
    pool.ready, pool.limits = False, None
    response = call.post(path, {"prompt": "a", "messages": [USER], "stream": stream})
    refused(response, 503)
    assert int(response.headers["retry-after"]) >= 1


def test_unknown_paths_and_methods(call):
    refused(call.get("/v1/nothing"), 404)
    refused(call.get("/"), 404)
    refused(call.get("/v1/chat/completions"), 405)
    refused(call("DELETE", "/v1/models"), 405)
    refused(call.get("/v1/models/none"), 404)
    refused(call.get("/v1/models/%ff%fe/%00"), 404)


def test_unsupported_fields_that_ask_for_nothing(call):
    nothing = {"tools": [], "tool_choice": "none", "functions": None, "guided_json": None, "audio": None}
    assert call.chat(**nothing, response_format={"type": "text"}, modalities=["text"]).status_code == 200
    assert call.complete(best_of=1, suffix="").status_code == 200


def test_fields_that_change_nothing(call):
    ignored = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "verbosity": "low",
        "prediction": None,
    }
    assert call.chat(**ignored).status_code == 200


def test_null_is_the_default(call):
    names = ["temperature", "top_p", "top_k", "n", "stop", "seed", "stream", "max_tokens", "logprobs", "logit_bias"]
    names += ["stream_options", "frequency_penalty", "user", "tools", "tool_choice", "response_format", "min_tokens"]
    assert call.chat(**dict.fromkeys(names)).status_code == 200
    assert call.complete(**dict.fromkeys(names)).status_code == 200


def test_unknown_fields_are_warned_of_once(call, caplog):
    for _ in range(3):
        assert call.chat(a_field_of_the_future=1).status_code == 200
    assert caplog.text.count("a_field_of_the_future") == 1


def test_of_unknown_fields_only_so_much_is_remembered(call):
    call.chat(**{"zz" + "f" * 100_000: 1})
    assert max(map(len, parsing._unknown_fields_seen)) <= 64


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_text_far_over_the_context_is_not_tokenized_whole(call, pool: EchoPool, path, monkeypatch):
    lengths: list[int] = []
    encode = pool.tokenizer.encode

    def watched(text: str, **options: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(pool.tokenizer, "encode", watched)
    text = "long " * 100_000
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    error = refused(call.post(path, body))
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in error["message"]
    assert str(lengths[0]) in error["message"]
    assert lengths == [16 * MAX_MODEL_LEN]
    # Where only its end is kept, all of it counts.
    assert call.post(path, body | {"truncate_prompt_tokens": 10, "max_tokens": 2}).status_code == 200


def test_more_choices_than_the_server_takes_in_one_request(make_model, pool: EchoPool):
    call = Call(create_app(FrontendSettings(model="echo", max_choices=6), [make_model()]))
    response = call.complete(prompt=["a", "b"], n=4)
    assert response.status_code == 400
    assert "2 prompts with n 4 are 8 choices" in response.json()["error"]["message"]
    assert pool.submitted == []
    assert call.complete(prompt=["a", "b"], n=3).status_code == 200
    assert call.chat(n=7).status_code == 400

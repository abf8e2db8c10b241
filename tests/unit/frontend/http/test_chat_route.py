"""/v1/chat/completions: whole answers, streams, choices, logprobs, reasoning, usage."""

import pytest
from echo_app import EOS, Call, EchoPool, events

from services.frontend.generation import GenerationError
from services.frontend.http.app import create_app
from services.frontend.http.schemas.responses import ChatCompletion
from services.frontend.output.processor import OutputProcessor
from services.frontend.settings import FrontendSettings

THOUGHT = "<think>so it\nseems</think>\n\nIt is."


def texts(stream, key="content"):
    """Each choice's text, from its deltas."""
    joined: dict[int, str] = {}
    for event in stream:
        for choice in event["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + (choice["delta"].get(key) or "")
    return joined


def finishes(stream):
    return [(c["index"], c["finish_reason"]) for event in stream for c in event["choices"] if c["finish_reason"]]


@pytest.mark.parametrize(
    "text", ["hello", "héllo wörld", "你好,世界", '👩‍👩‍👧 \u0000 \u2028 "quoted" \\ \x7f', "नमस्ते", ""]
)
def test_text_comes_back_whole_and_streamed(call, text):
    response = call.chat(text)
    assert response.status_code == 200
    answer = ChatCompletion.model_validate_json(response.content)
    expected = f"user:{text}|assistant:"
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"
    stream = events(call.chat(text, stream=True))
    assert texts(stream) == {0: expected}
    assert finishes(stream) == [(0, "stop")]
    assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in event for event in stream)


def test_the_answer_carries_the_name_that_was_asked_for(call):
    for name in ("echo", "echo/alias"):
        assert call.chat(model=name).json()["model"] == name
        assert {event["model"] for event in events(call.chat(model=name, stream=True))} == {name}
    assert call.chat().json()["model"] == "echo"
    assert call.chat().json()["id"].startswith("chatcmpl-")


def test_usage(call):
    usage = call.chat("abc").json()["usage"]
    prompt = len("user:abc|assistant:")
    assert usage == {
        "prompt_tokens": prompt,
        "completion_tokens": prompt + 1,
        "total_tokens": 2 * prompt + 1,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    stream = events(call.chat("abc", stream=True, stream_options={"include_usage": True}))
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"] == usage
    assert all("usage" not in event for event in stream[:-1])


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_where_it_was_not_asked_for(call, options):
    assert all("usage" not in event for event in events(call.chat(stream=True, stream_options=options)))


def test_usage_on_every_chunk(call):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = events(call.chat("abc", stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in stream]
    assert counts == sorted(counts)
    assert counts[-1] == len("user:abc|assistant:") + 1


def test_length_is_told(call):
    for field in ("max_tokens", "max_completion_tokens"):
        choice = call.chat("hello", **{field: 4}).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("user", "length")
        assert finishes(events(call.chat("hello", stream=True, **{field: 4}))) == [(0, "length")]


def test_several_choices(call, pool: EchoPool):
    answer = call.chat("abc", n=3, seed=7).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"user:abc|assistant:"}
    assert answer["usage"]["completion_tokens"] == 3 * 20
    assert answer["usage"]["prompt_tokens"] == 19
    assert [generation.sampling.seed for generation in pool.submitted] == [7, 8, 9]
    stream = events(call.chat("abc", n=3, stream=True))
    assert texts(stream) == dict.fromkeys(range(3), "user:abc|assistant:")
    assert sorted(finishes(stream)) == [(0, "stop"), (1, "stop"), (2, "stop")]


def test_seeds_are_drawn_where_none_is_given(call, pool: EchoPool):
    call.chat()
    call.chat(seed=-1)
    call.chat(seed=2**63 - 1, n=2)
    first, second, third, fourth = (generation.sampling.seed for generation in pool.submitted)
    assert first != second
    assert (third, fourth) == (2**63 - 1, 0)


@pytest.mark.parametrize("stop", ["ist", ["ist"], ["zzz", "ist"]])
def test_stop_strings(call, pool: EchoPool, stop):
    choice = call.chat("abc", stop=stop).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("user:abc|ass", "stop")
    assert choice["stop_reason"] == "ist"
    stream = events(call.chat("abc", stop=stop, stream=True))
    assert texts(stream) == {0: "user:abc|ass"}
    assert finishes(stream) == [(0, "stop")]


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop(call, stop):
    assert call.chat("abc", stop=stop).json()["choices"][0]["message"]["content"] == "user:abc|assistant:"


def test_sampling_parameters_reach_the_engine(call, pool: EchoPool):
    response = call.chat(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias={"5": -100, "6": 1.5},
        allowed_token_ids=[1, 2],
        bad_words=["ab", " c"],
        min_tokens=2.0,
        stop_token_ids=[9],
        ignore_eos=True,
        max_completion_tokens=5,
        max_tokens=50,
        priority=-3,
        cache_salt="tenant",
        timeout=60,
    )
    assert response.status_code == 200
    generation = pool.submitted[0]
    sampling = generation.sampling
    ids = pool.tokenizer.encode("abc", add_special_tokens=False)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.1)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.1, -2, 2)
    assert sampling.logit_bias == {5: -100.0, 6: 1.5}
    assert (sampling.allowed_token_ids, sampling.stop_token_ids) == ([1, 2], [9])
    assert sampling.bad_words_token_ids == [ids[:2], ids[2:]]
    assert (sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (2, 5, True)
    assert (generation.priority, generation.cache_salt) == (-3, "tenant")
    assert generation.deadline is not None
    assert generation.deadline == pytest.approx(generation.arrival_time + 60)


def test_all_that_fits_by_default(call, pool: EchoPool):
    call.chat("abc")
    assert pool.submitted[0].sampling.max_tokens == 512 - len("user:abc|assistant:")


def test_logprobs(call):
    choice = call.chat("é", logprobs=True, top_logprobs=2).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == f"user:é|assistant:{EOS}"
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert entries[0] == {
        "token": "u",
        "logprob": -0.25,
        "bytes": [117],
        "top_logprobs": [
            {"token": "u", "logprob": -0.25, "bytes": [117]},
            {"token": "!", "logprob": -0.75, "bytes": [33]},
        ],
    }
    stream = events(call.chat("é", logprobs=True, top_logprobs=2, stream=True))
    streamed = [e for event in stream for c in event["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == entries


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"logprobs": True, "top_logprobs": 0}])
def test_logprobs_of_the_chosen_alone(call, fields):
    for n in (1, 2):
        choices = call.chat(n=n, **fields).json()["choices"]
        assert all(entry["top_logprobs"] == [] for choice in choices for entry in choice["logprobs"]["content"])


def test_no_logprobs_unless_asked(call):
    assert call.chat(logprobs=False).json()["choices"][0]["logprobs"] is None


def test_prompt_logprobs(call):
    answer = call.chat("a", prompt_logprobs=1, max_tokens=1).json()
    entries = answer["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == answer["usage"]["prompt_tokens"]
    assert list(entries[1].values()) == [{"logprob": -0.25, "rank": 1, "decoded_token": "s"}]
    ChatCompletion.model_validate(answer)


def test_token_ids(call, pool: EchoPool):
    answer = call.chat("a", return_token_ids=True).json()
    ids = pool.submitted[0].prompt_token_ids
    assert answer["prompt_token_ids"] == ids
    assert answer["choices"][0]["token_ids"] == [*ids, pool.tokenizer.eos_token_id]
    ChatCompletion.model_validate(answer)
    stream = events(call.chat("a", return_token_ids=True, stream=True))
    assert stream[0]["prompt_token_ids"] == ids
    streamed = [token_id for event in stream for c in event["choices"] for token_id in c.get("token_ids", [])]
    assert streamed == [*ids, pool.tokenizer.eos_token_id]


def test_continue_final_message(call):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "So"}]
    fields = {"messages": talk, "add_generation_prompt": False, "continue_final_message": True}
    answer = call.post("/v1/chat/completions", fields).json()
    assert answer["choices"][0]["message"]["content"] == "user:a|assistant:So"
    answer = call.post("/v1/chat/completions", {**fields, "echo": True, "max_tokens": 4}).json()
    assert answer["choices"][0]["message"]["content"] == "Souser"
    stream = events(call.post("/v1/chat/completions", {**fields, "echo": True, "max_tokens": 4, "stream": True}))
    assert texts(stream) == {0: "Souser"}


def test_template_variables(call):
    for fields in ({"chat_template_kwargs": {"suffix": "!"}},):
        assert call.chat("a", **fields).json()["choices"][0]["message"]["content"] == "user:a|assistant:!"


@pytest.fixture
def thinking(settings, make_model, pool: EchoPool) -> Call:
    pool.reply = THOUGHT
    return Call(create_app(settings, [make_model(reasoning_parser="qwen3")]))


def test_reasoning_is_split(thinking):
    answer = thinking.chat().json()
    message = answer["choices"][0]["message"]
    assert message["content"] == "It is."
    assert message["reasoning"] == message["reasoning_content"] == "so it\nseems"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    ChatCompletion.model_validate(answer)
    stream = events(thinking.chat(stream=True, stream_options={"include_usage": True}))
    assert texts(stream) == {0: "It is."}
    assert texts(stream, "reasoning") == texts(stream, "reasoning_content") == {0: "so it\nseems"}
    assert stream[-1]["usage"] == answer["usage"]


def test_reasoning_can_be_left_out(thinking):
    message = thinking.chat(include_reasoning=False).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "It is.", "refusal": None}
    stream = events(thinking.chat(include_reasoning=False, stream=True))
    assert texts(stream) == {0: "It is."}
    assert "reasoning" not in str(stream)


def test_thinking_that_is_left_out_shows_in_no_logprobs_and_no_token_ids(thinking, pool: EchoPool):
    fields = {"include_reasoning": False, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole = thinking.chat(**fields).json()
    ChatCompletion.model_validate(whole)
    choice = whole["choices"][0]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == f"\n\nIt is.{EOS}"
    assert pool.tokenizer.decode(choice["token_ids"], skip_special_tokens=False) == f"\n\nIt is.{EOS}"
    options = {"include_usage": True, "continuous_usage_stats": True}
    for extra in ({}, {"stream_options": options}):
        stream = events(thinking.chat(stream=True, **fields, **extra))
        choices = [choice for event in stream for choice in event["choices"]]
        streamed = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
        assert streamed == choice["logprobs"]["content"]
        assert [token_id for c in choices for token_id in c.get("token_ids", [])] == choice["token_ids"]
    assert stream[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] > len(choice["token_ids"])


def test_an_answer_that_is_all_hidden_thinking_has_logprobs_of_nothing(thinking):
    fields = {"include_reasoning": False, "logprobs": True, "return_token_ids": True, "max_tokens": 12}
    choice = thinking.chat(**fields).json()["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["logprobs"] == {"content": [], "refusal": None}
    assert choice["token_ids"] == []
    stream = events(thinking.chat(stream=True, **fields))
    assert all(c["logprobs"] is None and "token_ids" not in c for event in stream for c in event["choices"])
    assert finishes(stream) == [(0, "length")]


def test_one_reasoning_field(settings, make_model, pool: EchoPool):
    pool.reply = THOUGHT
    settings.reasoning_fields = ["reasoning_content"]
    call = Call(create_app(settings, [make_model(reasoning_parser="qwen3")]))
    message = call.chat().json()["choices"][0]["message"]
    assert "reasoning" not in message
    assert message["reasoning_content"] == "so it\nseems"


def test_cut_off_while_thinking(thinking):
    choice = thinking.chat(max_tokens=10).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == "so "


def test_thinking_switched_off(thinking):
    answer = thinking.chat(chat_template_kwargs={"enable_thinking": False}).json()
    assert answer["choices"][0]["message"]["content"] == THOUGHT
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize(("status", "retry"), [(503, "5"), (429, "2"), (500, None)])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_refusal_has_its_status(call, pool: EchoPool, status, retry, stream):
    pool.refuse = GenerationError("not now", status, None if retry is None else float(retry) - 0.5)
    response = call.chat(stream=stream)
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry
    assert response.json()["error"]["message"] == "not now"


@pytest.mark.parametrize("stream", [False, True])
def test_all_choices_or_none(call, pool: EchoPool, stream):
    pool.refuse, pool.refuse_from = GenerationError("full", 429), 2
    assert call.chat(n=4, stream=stream).status_code == 429
    assert sorted(pool.aborted) == [generation.request_id for generation in pool.submitted]
    assert not pool.running


def test_an_error_before_the_first_token_has_its_status(call, pool: EchoPool):
    pool.fail_after = 0
    for stream in (False, True):
        response = call.chat(stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the engine died"


def test_a_first_token_that_cannot_be_decoded_has_its_status(call, monkeypatch):
    def broken(*arguments: object) -> str:
        raise ValueError("no such token")

    monkeypatch.setattr(OutputProcessor, "_take", broken)
    for stream in (False, True):
        response = call.chat(stream=stream, stop="x")
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the generated tokens could not be decoded"


def test_an_error_after_the_first_token_is_a_chunk(call, pool: EchoPool):
    pool.fail_after = 6
    assert call.chat().status_code == 500
    stream = events(call.chat(stream=True))
    assert stream[-1] == {"error": {"message": "the engine died", "type": "server_error", "param": None, "code": None}}
    assert texts(stream[:-1]) == {0: "user:h"}
    assert finishes(stream[:-1]) == [(0, "error")]


def test_an_error_ends_each_choice_once(call, pool: EchoPool):
    pool.hold_after = 3
    stream = events(call.chat(stream=True, n=3, timeout=0.3))
    assert stream[-1]["error"]["type"] == "timeout_error"
    assert finishes(stream[:-1]) == [(0, "error"), (1, "error"), (2, "error")]
    stream = events(call.complete(["a", "bcdef"], stream=True, timeout=0.3))
    assert "error" in stream[-1]
    assert finishes(stream[:-1]) == [(0, "stop"), (1, "error")]


def test_an_error_of_one_choice_ends_all(call, pool: EchoPool):
    pool.fail_after = 3
    assert call.chat(n=3).status_code == 500
    assert not pool.running
    assert len(pool.aborted) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_past_its_timeout(call, pool: EchoPool, stream):
    pool.hold = True
    response = call.chat(stream=stream, timeout=0.02)
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"
    assert not pool.running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [None, 60])
def test_a_request_past_the_servers_timeout(make_model, pool: EchoPool, stream, asked):
    pool.hold = True
    call = Call(create_app(FrontendSettings(model="echo", request_timeout=0.02), [make_model()]))
    for response in (call.chat(stream=stream, timeout=asked), call.complete(stream=stream, timeout=asked)):
        assert response.status_code == 504
        assert "timeout of 0.02 seconds" in response.json()["error"]["message"]
    assert not pool.running


def test_the_engines_abort_is_no_success(call, pool: EchoPool):
    pool.abort_after = 0
    assert call.chat().status_code == 503
    assert call.chat(timeout=50).status_code == 504
    pool.abort_after = 4
    stream = events(call.chat(stream=True))
    assert "error" in stream[-1]
    assert finishes(stream[:-1]) == [(0, "error")]


def test_a_choice_that_cannot_be_decoded_fails_alone(call, pool: EchoPool, monkeypatch):
    from services.frontend.http.chat_answer import ChatChunks

    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(ChatChunks, "_write_choice", broken)
    stream = events(call.chat(stream=True))
    assert stream[-1]["error"]["code"] == "internal_error"
    assert "a bug" not in str(stream)
    assert not pool.running

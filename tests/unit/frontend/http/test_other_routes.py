"""Models, tokenization, health, version, and the OpenAPI document."""

import http.client
import threading
from dataclasses import replace

import pytest
from echo_app import EOS, MAX_MODEL_LEN, Call, EchoPool, LiveServer

from services.frontend.engines.status import EngineStatus
from services.frontend.http.app import create_app
from services.frontend.http.routes import tokenization
from services.frontend.http.schemas.responses import Detokenized, EngineList, ModelCard, ModelList, Tokenized


def test_models(call):
    listed = ModelList.model_validate_json(call.get("/v1/models").content)
    assert [card.id for card in listed.data] == ["echo", "echo/alias"]
    assert listed.data[0].max_model_len == MAX_MODEL_LEN
    for path in ("/v1/models/echo/alias", "/v1/models/echo%2Falias"):
        assert ModelCard.model_validate_json(call.get(path).content).id == "echo/alias"


def test_tokenize_and_back(call, pool: EchoPool):
    for text in ("héllo 👩‍👧", "", EOS, "a" * 5000):
        tokenized = Tokenized.model_validate_json(call.post("/tokenize", {"prompt": text}).content)
        assert tokenized.count == len(tokenized.tokens)
        assert tokenized.max_model_len == MAX_MODEL_LEN
        back = Detokenized.model_validate_json(call.post("/detokenize", {"tokens": tokenized.tokens}).content)
        assert back.prompt == text


def test_tokenize_a_conversation(call, pool: EchoPool):
    body = {"messages": [{"role": "user", "content": "a"}], "return_token_strs": True}
    tokenized = call.post("/tokenize", body).json()
    assert "".join(tokenized["token_strs"]) == "user:a|assistant:"
    call.chat("a")
    assert pool.submitted[0].prompt_token_ids == tokenized["tokens"]


def test_tokenize_without_an_engine(call, pool: EchoPool):
    pool.ready, pool.limits = False, None
    assert call.post("/tokenize", {"prompt": "a"}).json()["max_model_len"] is None


def test_many_token_ids_are_looked_at_beside_the_event_loop(call, monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []
    real = tokenization.check_prompt_ids

    def watched(*arguments) -> None:
        threads.append(threading.current_thread())
        real(*arguments)

    monkeypatch.setattr(tokenization, "check_prompt_ids", watched)
    for number, is_beside in ((5, False), (200_000, True)):
        assert len(call.post("/detokenize", {"tokens": [97] * number}).json()["prompt"]) == number
        assert (threads.pop() is not threading.main_thread()) == is_beside
    answer = call.post("/detokenize", {"tokens": [97] * 200_000 + [99_999]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


def test_half_a_character_detokenized(call, pool: EchoPool):
    first, _ = pool.tokenizer.encode("é", add_special_tokens=False)
    assert call.post("/detokenize", {"tokens": [first]}).json()["prompt"] == "\ufffd"


def test_health(app, call, pool: EchoPool):
    assert call.get("/health/live").json() == {"status": "alive"}
    assert call.get("/health/ready").json() == {"status": "ready", "models": {"echo": True}}
    pool.ready = False
    for path in ("/health/ready", "/health"):
        response = call.get(path)
        assert (response.status_code, response.json()["status"]) == (503, "no engine")
    assert call.get("/health/live").status_code == 200
    pool.ready = True
    app.state.frontend.draining = True
    assert (call.get("/health").status_code, call.get("/health").json()["status"]) == (503, "draining")
    assert call.chat().status_code == 200  # while load balancers have not noticed yet


def test_ready_with_one_of_two_models(settings, make_model, tokenizer):
    dead = EchoPool(tokenizer)
    dead.ready = False
    call = Call(create_app(settings, [make_model(names=["a"]), make_model(names=["b"], engines=dead)]))
    response = call.get("/health/ready")
    assert response.status_code == 200
    assert response.json()["models"] == {"a": True, "b": False}
    assert call.chat(model="b").status_code == 503


def test_engines(call, pool: EchoPool):
    assert call.get("/engines").json() == {"object": "list", "data": []}
    busy = EngineStatus("10.0.0.7:5555", "ready", "ab12", 3, 1, 900, 40, 100, 16, 123.5, 2)
    pool.engine_statuses = [busy, replace(busy, address="10.0.0.8:5555", state="draining")]
    listed = EngineList.model_validate_json(call.get("/engines").content)
    assert [(card.model, card.address, card.state) for card in listed.data] == [
        ("echo", "10.0.0.7:5555", "ready"),
        ("echo", "10.0.0.8:5555", "draining"),
    ]
    assert (listed.data[0].running_requests, listed.data[0].kv_blocks_free, listed.data[0].in_flight) == (3, 40, 2)


def test_version(call):
    assert set(call.get("/version").json()) == {"version"}


READ = [
    *(("/health", 200), ("/health/live", 200), ("/health/ready", 200), ("/version", 200), ("/metrics", 200)),
    *(("/v1/models", 200), ("/v1/models/echo%2Falias", 200), ("/v1/models/none", 404), ("/engines", 200)),
    *(("/docs", 200), ("/openapi.json", 200)),
]


def test_head_is_answered_as_get_without_the_body(live: LiveServer):
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    for path, status in READ:
        heads = []
        for method in ("HEAD", "GET"):  # on one connection: what follows a head is the next head
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
            assert response.status == status
            length = int(response.headers["content-length"])
            assert len(body) == (0 if method == "HEAD" else length)
            assert length
            changing = {"date", "x-request-id"} | ({"content-length"} if path == "/metrics" else set())
            heads.append([(name, value) for name, value in response.getheaders() if name.lower() not in changing])
        assert heads[0] == heads[1]
    connection.close()


def test_head_of_what_is_not_ready(call, pool: EchoPool):
    pool.ready = False
    assert call("HEAD", "/health/ready").status_code == 503


@pytest.mark.parametrize("path", [path for path, status in READ if status == 200])
def test_what_a_route_takes_is_told_with_the_refusal(call, path):
    for method in ("POST", "DELETE", "OPTIONS"):
        response = call(method, path)
        assert response.status_code == 405
        assert {name.strip() for name in response.headers["allow"].split(",")} == {"GET", "HEAD"}
    assert call("HEAD", "/v1/completions").headers["allow"] == "POST"


def test_head_needs_a_key_where_get_does(settings, make_model):
    settings.api_key = ["k"]
    call = Call(create_app(settings, [make_model()]))
    assert call("HEAD", "/v1/models").status_code == 401
    assert call("HEAD", "/v1/models", headers={"authorization": "Bearer k"}).status_code == 200
    assert call("HEAD", "/health/ready").status_code == 200


def test_the_openapi_document_is_whole(call):
    document = call.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    fields = schemas["ChatCompletionRequest"]["properties"]
    assert {"messages", "temperature", "stop", "stream_options", "chat_template_kwargs"} <= set(fields)
    assert fields["max_completion_tokens"]["description"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    references = _references(document)
    assert references
    assert all(reference.removeprefix("#/components/schemas/") in schemas for reference in references)
    answers = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {method for path in document["paths"].values() for method in path} == {"get", "post"}
    assert {"400", "401", "404", "413", "415", "429", "503", "504"} <= set(answers)
    assert call.get("/docs").status_code == 200


def test_the_openapi_document_bounds_numbers(call):
    fields = call.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["top_k"]["anyOf"][0] == {"type": "integer", "minimum": -1, "exclusiveMaximum": 2**63}
    assert fields["n"]["anyOf"][0]["minimum"] == 1
    assert (fields["logprobs"]["anyOf"][0]["minimum"], fields["logprobs"]["anyOf"][0]["maximum"]) == (0, 20)
    for field in fields.values():
        assert not {"ge", "le", "gt", "lt"} & {name for branch in field.get("anyOf", [field]) for name in branch}


def _references(node) -> list[str]:
    if isinstance(node, dict):
        found = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return found + [ref for value in node.values() for ref in _references(value)]
    return [ref for item in node for ref in _references(item)] if isinstance(node, list) else []

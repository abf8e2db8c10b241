"""API keys, body limit, CORS, request ids, and what nobody caught."""

import asyncio
import logging

import pytest
from echo_app import Call, EchoPool, events

from services.frontend.http.app import create_app
from services.frontend.http.middleware.api_keys import configured_keys
from services.frontend.settings import FrontendSettings


@pytest.fixture
def keyed(make_model, tmp_path) -> Call:
    path = tmp_path / "keys"
    path.write_text("\nfrom-file\n\n  also-from-file \n")
    settings = FrontendSettings(model="echo", api_key=["first", "schlüssel"], api_key_file=path)
    return Call(create_app(settings, [make_model()]))


@pytest.mark.parametrize("key", ["first", "schlüssel", "from-file", "also-from-file"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_every_key_opens(keyed, key, scheme):
    headers = {"authorization": f"{scheme} {key}".encode()}
    assert keyed.get("/v1/models", headers=headers).status_code == 200
    assert keyed.chat().status_code == 401


def test_the_document_says_where_a_key_is_needed(keyed: Call, call: Call):
    document = keyed.get("/openapi.json").json()
    assert document["components"]["securitySchemes"] == {"api_key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            refused = keyed(method.upper(), path).status_code == 401
            assert refused == ("security" in operation), path
    document = call.get("/openapi.json").json()
    assert "securitySchemes" not in document["components"]
    assert not any("security" in operation for item in document["paths"].values() for operation in item.values())


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        b"Bearer firs",
        b"first",
        b"Basic first",
        b"Bearer first,",
        b"Bearer \xff\xfe",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/tokenize", "/nothing"])
def test_nothing_else_does(keyed, pool: EchoPool, header, path):
    headers = {} if header is None else {"authorization": header}
    response = keyed("POST", path, content=b"{}", headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/health/live", "/health/ready", "/health", "/metrics", "/version", "/docs", "/openapi.json"]
)
def test_probes_need_no_key(keyed, path):
    assert keyed.get(path).status_code == 200


def test_keys_that_would_open_to_all(tmp_path):
    empty = tmp_path / "keys"
    empty.write_text("\n \n")
    with pytest.raises(ValueError, match="holds no key"):
        configured_keys(FrontendSettings(api_key_file=empty))
    with pytest.raises(ValueError, match="cannot be read"):
        configured_keys(FrontendSettings(api_key_file=tmp_path / "none"))
    with pytest.raises(ValueError, match="empty"):
        configured_keys(FrontendSettings(api_key=["good", ""]))


@pytest.fixture
def small(make_model) -> Call:
    return Call(create_app(FrontendSettings(model="echo", max_body_bytes=1024), [make_model()]))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_over_the_limit(small, pool: EchoPool, path):
    body = b'{"prompt": "' + b"a" * 2000 + b'"}'

    async def pieces():
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    for content in (body, pieces()):
        response = small("POST", path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert "1024" in response.json()["error"]["message"]
        assert response.headers["connection"] == "close"
    assert not pool.submitted


def test_a_body_at_the_limit(small):
    for size, status in ((1024, 200), (1025, 413)):
        body = b'{"prompt": "a"}'
        body += b" " * (size - len(body))
        response = small("POST", "/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == status


def test_cors_is_off_unless_set(call, make_model):
    origin = {"origin": "https://a.example", "access-control-request-method": "POST"}
    response = call("OPTIONS", "/v1/chat/completions", headers=origin)
    assert response.status_code == 405
    assert "access-control-allow-origin" not in call.get("/v1/models", headers=origin).headers
    settings = FrontendSettings(model="echo", allowed_origins=["https://a.example"], api_key=["k"])
    opened = Call(create_app(settings, [make_model()]))
    response = opened("OPTIONS", "/v1/chat/completions", headers=origin)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    response = opened("OPTIONS", "/v1/models", headers={**origin, "access-control-request-method": "HEAD"})
    assert response.status_code == 200
    headers = {"origin": "https://b.example", "authorization": "Bearer k"}
    assert "access-control-allow-origin" not in opened.get("/v1/models", headers=headers).headers


def test_request_ids(call):
    assert call.get("/v1/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    drawn = call.get("/v1/models").headers["x-request-id"]
    assert len(drawn) == 32
    for hostile in ("a b", "ü", "x" * 129, "a\tb"):
        answered = call.get("/v1/models", headers={"x-request-id": hostile.encode()}).headers["x-request-id"]
        assert len(answered) == 32


def test_what_nobody_caught_is_a_plain_500(call, pool: EchoPool, monkeypatch):
    def broken(generation):
        raise KeyError("secret detail")

    monkeypatch.setattr(pool, "submit", broken)
    for stream in (False, True):
        response = call.chat(stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text
        assert response.headers["x-request-id"]


def test_one_access_line_a_request(call, caplog):
    caplog.set_level(logging.INFO, "tandem.access")
    call.chat()
    call.chat(stream=True)
    call.get("/health/live")
    call.get("/v1/models/a%0Ab")
    lines = [record.getMessage() for record in caplog.records if record.name == "tandem.access"]
    assert len(lines) == 3
    assert "POST /v1/chat/completions 200" in lines[0]
    assert "\n" not in lines[2]


def test_metrics(call):
    call.chat(stream=True)
    call.chat(temperature=-1)
    call.get("/made/up")
    text = call.get("/metrics").text
    assert 'tandem_frontend_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'tandem_frontend_requests_total{route="/v1/chat/completions",status="400"} 1.0' in text
    assert 'tandem_frontend_requests_total{route="other",status="404"} 1.0' in text
    assert "tandem_frontend_streams_in_flight 0.0" in text


def test_too_many_at_once(make_model, pool: EchoPool):
    app = create_app(FrontendSettings(model="echo", max_concurrent_requests=1), [make_model()])
    state = app.state.frontend
    with state.preparing():
        response = Call(app).chat()
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert Call(app).chat().status_code == 200


def test_lifespan_starts_and_stops_the_pool(app, pool: EchoPool):
    async def live() -> None:
        async with app.router.lifespan_context(app):
            assert pool.started
            assert not pool.stopped

    asyncio.run(live())
    assert pool.stopped


def test_all_in_flight_can_be_failed(app, pool: EchoPool):
    """What the server does when the grace period is over: streams still end in order."""
    from services.frontend.generation import GenerationError

    pool.hold_after = 2

    async def run():
        streamed = asyncio.create_task(
            Call(app).send("POST", "/v1/completions", json={"prompt": "abc", "stream": True})
        )
        whole = asyncio.create_task(Call(app).send("POST", "/v1/completions", json={"prompt": "abc"}))
        while sum(pool.delivered.values()) < 4:
            await asyncio.sleep(0.001)
        app.state.frontend.fail_all(GenerationError("shutting down", 503))
        return await streamed, await whole

    streamed, whole = asyncio.run(run())
    assert events(streamed)[-1]["error"]["message"] == "shutting down"
    assert whole.status_code == 503
    assert not pool.running

"""One key's requests at once: refused past the limit, counted until their end, and nobody else's business."""

import asyncio

import pytest
from echo_app import Call, EchoPool

from services.frontend.http.app import create_app
from services.frontend.settings import FrontendSettings


@pytest.fixture
def limited(make_model) -> Call:
    settings = FrontendSettings(model="echo", api_key=["one", "two"], max_requests_per_key=2)
    return Call(create_app(settings, [make_model()]))


def ask(call: Call, key: str, stream: bool = False):
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": stream}
    headers = {"authorization": f"Bearer {key}"}
    return call.send("POST", "/v1/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_over_its_limit_is_refused_and_others_are_not(limited: Call, pool: EchoPool, stream: bool):
    async def main() -> None:
        pool.hold = True
        running = [asyncio.create_task(ask(limited, "one", stream)) for _ in range(2)]
        while len(pool.running) < 2:
            await asyncio.sleep(0)
        refused = await ask(limited, "one")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_requests_of_key"
        assert (await limited.send("GET", "/health/live")).status_code == 200
        other = asyncio.create_task(ask(limited, "two", stream))
        while len(pool.running) < 3:
            await asyncio.sleep(0)
        # One that is given up counts no more.
        running.pop().cancel()
        while len(pool.running) == 3:
            await asyncio.sleep(0)
        running.append(asyncio.create_task(ask(limited, "one", stream)))
        while len(pool.running) < 3:
            await asyncio.sleep(0)
        pool.hold = False
        for answer in await asyncio.gather(other, *running):
            assert answer.status_code == 200
        assert (await ask(limited, "one")).status_code == 200

    asyncio.run(main())


def test_without_keys_there_is_nobody_to_limit(make_model):
    with pytest.raises(ValueError, match="--max-requests-per-key needs keys"):
        create_app(FrontendSettings(model="echo", max_requests_per_key=1), [make_model()])

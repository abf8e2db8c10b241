"""`tandem serve` with the simulated executor's echo: whatever text goes in as a prompt must come out, exactly."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from loadtest.server_process import ServerProcess, tandem_serve
from loadtest.stream_client import RequestFailed, run_closed_loop

MODEL = "SmolLM2-135M-Instruct"
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "北京是中国的首都，也是一座历史悠久的城市。",
    "naïve café — “quotes”, 3.14159 and £20\n\n\ttabs and lines\n",
    "👩‍👩‍👧‍👦 a family, 🇫🇷 a flag, 👍🏽 a thumb, and e\u0301 composed",
    'def main():\n    return {"a": [1, 2, 3]}  # 注释\n',
    "עברית, العربية, हिन्दी, ไทย, 한국어",
]


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--executor", "simulated", "--simulated-tokens", "echo")
    with tandem_serve(tmp_path_factory.mktemp("echo"), *flags) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("text", TEXTS)
def test_a_completion_is_the_prompt_whole_and_streamed(client: openai.OpenAI, text: str) -> None:
    whole = client.completions.create(model=MODEL, prompt=text, max_tokens=500)
    assert whole.choices[0].text == text
    assert whole.choices[0].finish_reason == "stop"

    chunks = list(
        client.completions.create(
            model=MODEL, prompt=text, max_tokens=500, stream=True, stream_options={"include_usage": True}
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == text
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens > 0


def test_a_chat_is_the_templated_prompt_whole_and_streamed(client: openai.OpenAI) -> None:
    question = TEXTS[1]
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_completion_tokens": 100,
        # The template ends each message with the eos token, where the echo would stop.
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    content = whole.choices[0].message.content
    assert content is not None
    assert f"user\n{question}\nassistant\n" in content
    assert "<|im_" not in content
    assert whole.choices[0].message.role == "assistant"

    choices = [
        choice
        for chunk in client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
        for choice in chunk.choices
    ]
    assert "".join(choice.delta.content or "" for choice in choices) == content
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]


def test_many_at_once_get_each_its_own_text(server: ServerProcess) -> None:
    async def ask(client: openai.AsyncOpenAI, index: int) -> None:
        text = f"{index}: {TEXTS[index % len(TEXTS)]}"
        if index % 2:
            answer = await client.completions.create(model=MODEL, prompt=text, max_tokens=500)
            assert answer.choices[0].text == text
        else:
            stream = await client.completions.create(model=MODEL, prompt=text, max_tokens=500, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == text

    async def ask_all() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            await asyncio.gather(*(ask(client, index) for index in range(64)))

    asyncio.run(ask_all())


def test_the_default_model_answers_to_its_names(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert MODEL in names
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")


def test_the_benchmarks_client_counts_what_came(server: ServerProcess) -> None:
    bodies = [{"model": MODEL, "prompt": f"{index} one", "max_tokens": 9, "ignore_eos": True} for index in range(20)]
    timings = asyncio.run(run_closed_loop("127.0.0.1", server.port, bodies, concurrency=4))
    assert [timing.completion_tokens for timing in timings] == [9] * 20
    assert all(0 < timing.first_token <= timing.seconds for timing in timings)
    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(run_closed_loop("127.0.0.1", server.port, [{"model": "another", "prompt": "x"}], concurrency=1))
    assert failed.group_contains(RequestFailed, match="404")

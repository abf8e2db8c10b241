"""`tandem serve` with the real model, as `make serve` runs it, asked by the real `openai` client."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from loadtest.server_process import ServerProcess, tandem_serve

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
PROMPTS = [
    "The three primary colours are",
    "def fibonacci(n):\n",
    "北京是",
    "Once upon a time, in a village by the sea,",
    "Water boils at",
    "The opposite of hot is",
]


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # float32: whether two nearly equal logits change places must not depend on the batch in this test.
    with tandem_serve(tmp_path_factory.mktemp("smollm2"), "--dtype", "float32", "--kv-cache-memory", "0.5") as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_a_chat_is_answered_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=32,
        stream=True,
    )
    assert "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices) == ANSWER


def test_at_once_as_one_by_one(server: ServerProcess, client: openai.OpenAI) -> None:
    settings = {"model": MODEL, "max_tokens": 24, "temperature": 0}
    alone = [client.completions.create(prompt=prompt, **settings).choices[0].text for prompt in PROMPTS]  # type: ignore[call-overload]
    assert all(alone)

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as at_once:
            answers = await asyncio.gather(
                *(at_once.completions.create(prompt=prompt, **settings) for prompt in PROMPTS)  # type: ignore[call-overload]
            )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask_all()) == alone


def test_a_seed_gives_the_same_text_again(client: openai.OpenAI) -> None:
    answers = {
        client.completions.create(model=MODEL, prompt=PROMPTS[3], max_tokens=16, temperature=1.0, seed=seed)
        .choices[0]
        .text
        for seed in (7, 7, 7)
    }
    assert len(answers) == 1


def test_length_and_stop_strings_end_an_answer(client: openai.OpenAI) -> None:
    cut = client.completions.create(model=MODEL, prompt=PROMPTS[3], max_tokens=5, temperature=0)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 5
    stopped = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stop=[" is"])  # type: ignore[arg-type]
    assert stopped.choices[0].message.content == "The capital of France"
    assert stopped.choices[0].finish_reason == "stop"

"""A server with SmolLM2, and the `openai` client."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from loadtest.server_process import ServerProcess, tandem_serve
from tests.integration.openai_options.options_client import KEY, MODEL, PROMPT, QUESTION, split


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

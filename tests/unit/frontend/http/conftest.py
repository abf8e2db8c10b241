"""Fixtures of the HTTP tests: the app over echo_app's fake pool, in process or on a real server."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from echo_app import OPEN_CALLS, Call, EchoPool, LiveServer, write_byte_tokenizer
from fastapi import FastAPI

from services.frontend.http.app import create_app
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.prompts.chat_template import ChatTemplate
from services.frontend.settings import FrontendSettings
from services.frontend.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def pool(tokenizer: Tokenizer) -> EchoPool:
    return EchoPool(tokenizer)


@pytest.fixture
def settings() -> FrontendSettings:
    return FrontendSettings(model="echo")


@pytest.fixture
def make_model(tokenizer: Tokenizer, pool: EchoPool, executor: ThreadPoolExecutor) -> Callable[..., LoadedModel]:
    def make(**changes: Any) -> LoadedModel:
        fields: dict[str, Any] = {
            "names": ["echo", "echo/alias"],
            "root": "some/folder",
            "tokenizer": tokenizer,
            "template": ChatTemplate(tokenizer.hf),
            "engines": pool,
            "executor": executor,
        }
        return LoadedModel(**(fields | changes))

    return make


@pytest.fixture
def app(settings: FrontendSettings, make_model: Callable[..., LoadedModel]) -> FastAPI:
    return create_app(settings, [make_model()])


@pytest.fixture(autouse=True)
def _calls_end() -> Iterator[None]:
    earlier = list(OPEN_CALLS)
    yield
    for call in list(OPEN_CALLS):
        if call not in earlier:
            call.close()


@pytest.fixture
def call(app: FastAPI) -> Call:
    return Call(app)


@pytest.fixture
def serve() -> Iterator[Callable[[FastAPI], LiveServer]]:
    servers: list[LiveServer] = []

    def start(app: FastAPI) -> LiveServer:
        servers.append(LiveServer(app))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def live(app: FastAPI, serve: Callable[[FastAPI], LiveServer]) -> LiveServer:
    return serve(app)

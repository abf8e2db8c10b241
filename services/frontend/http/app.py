"""The HTTP application: routes, errors and middleware put together. main.py serves it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from services.frontend.generation import GenerationError
from services.frontend.http.errors import (
    ApiError,
    ClientDisconnected,
    answer_disconnected,
    answer_error,
    answer_http_exception,
)
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.middleware.api_keys import ApiKeys, configured_keys
from services.frontend.http.middleware.body_limit import BodyLimit
from services.frontend.http.middleware.key_limit import KeyLimit
from services.frontend.http.middleware.request_log import RequestLog
from services.frontend.http.middleware.tracing import RequestTracing
from services.frontend.http.openapi import install_openapi
from services.frontend.http.routes import chat, completions, engines, health, models, tokenization
from services.frontend.http.state import FrontendState
from services.frontend.prompts.errors import InvalidPrompt
from services.frontend.settings import FrontendSettings
from shared.sampling_params import InvalidSamplingParams
from shared.tracing import Tracing
from shared.version import server_version


def create_app(
    settings: FrontendSettings,
    served_models: Sequence[LoadedModel],
    tracing: Tracing | None = None,
    *,
    check_grammars_at_once: bool = False,
) -> FastAPI:
    """The app that serves these models; its lifespan starts and stops their engine pools, and with
    `check_grammars_at_once` a process for grammars, which otherwise starts with the first of them. `tracing` takes
    the traces.

    `app.state.frontend` is its FrontendState. Raises ValueError where the settings contradict themselves.
    """
    state = FrontendState(settings, served_models)
    keys = configured_keys(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as started:
            started.enter_context(state.metrics.kept_up())
            started.push_async_callback(state.grammars.close)
            if check_grammars_at_once:
                state.grammars.start()
            for model in state.models:
                await model.engines.start()
                started.push_async_callback(model.engines.stop)
            yield

    app = FastAPI(
        title="Tandem",
        description="An OpenAI-compatible API for language models.",
        version=server_version(),
        lifespan=lifespan,
        middleware=_middleware(settings, state, keys, tracing),
        redoc_url=None,
        redirect_slashes=False,
        # RequestTracing makes the spans and RequestLog the metrics. FastAPI's would be a second set.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.frontend = state
    for routes in (chat, completions, models, tokenization, engines, health):
        # Not include_router, which has every request look for its route twice.
        app.router.routes.extend(routes.router.routes)
    for error in (ApiError, InvalidPrompt, InvalidSamplingParams, GenerationError):
        app.add_exception_handler(error, answer_error)
    for error in (ClientDisconnected, ClientDisconnect):
        app.add_exception_handler(error, answer_disconnected)
    app.add_exception_handler(HTTPException, answer_http_exception)
    install_openapi(app, with_api_keys=bool(keys))
    return app


def _middleware(
    settings: FrontendSettings, state: FrontendState, keys: Sequence[str], tracing: Tracing | None
) -> list[Middleware]:
    """Outermost first."""
    layers = [Middleware(RequestTracing, tracing=tracing, settings=settings)] if tracing is not None else []
    layers.append(Middleware(RequestLog, metrics=state.metrics))
    if settings.allowed_origins:
        # Before the keys: a browser's preflight carries none.
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "HEAD", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if keys:
        layers.append(Middleware(ApiKeys, keys=keys))
    if settings.max_requests_per_key is not None:
        if not keys:
            raise ValueError(
                "--max-requests-per-key needs keys to tell clients apart: give --api-key or --api-key-file"
            )
        layers.append(Middleware(KeyLimit, max_requests=settings.max_requests_per_key))
    layers.append(Middleware(BodyLimit, max_bytes=settings.max_body_bytes))
    return layers

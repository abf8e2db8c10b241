"""What the routes of one frontend process share: its models, what is in flight, and whether it drains."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from starlette.requests import Request

from services.frontend.generation import GenerationError
from services.frontend.http.arrivals import Arrivals
from services.frontend.http.choices import Choices
from services.frontend.http.errors import ApiError, bad_request
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.stream_writer import StreamPump
from services.frontend.metrics.frontend_metrics import FrontendMetrics
from services.frontend.settings import FrontendSettings
from services.frontend.structured import GrammarChecker
from services.frontend.tracing import current_trace


class FrontendState:
    """Raises ValueError where two models have one name."""

    def __init__(self, settings: FrontendSettings, models: Sequence[LoadedModel]) -> None:
        self.settings = settings
        self.models = list(models)
        self.pump = StreamPump()
        self.arrivals = Arrivals()
        self.metrics = FrontendMetrics(self.models, lambda: self.ready)
        self.grammars = GrammarChecker(settings.max_grammar_bytes, settings.grammar_compile_seconds)
        self.draining = False
        self._by_name: dict[str, LoadedModel] = {}
        self._preparing = 0
        self._running: set[Choices] = set()
        for model in models:
            for name in model.names:
                if name in self._by_name:
                    raise ValueError(f"two models are served under the name {name!r}: give them different names")
                self._by_name[name] = model

    @property
    def ready(self) -> bool:
        """Whether requests are welcome: not draining, and some model has an engine."""
        return not self.draining and any(model.engines.ready for model in self.models)

    def names(self) -> Iterable[tuple[str, LoadedModel]]:
        return self._by_name.items()

    def model(self, name: str | None) -> tuple[str, LoadedModel]:
        """The model that a client asks for, and the name under which it is answered. Raises ApiError."""
        if name is None:
            if len(self.models) > 1:
                raise bad_request(f"model is required: this server has {', '.join(self._by_name)}", "model")
            return self.models[0].names[0], self.models[0]
        model = self._by_name.get(name)
        if model is None:
            message = f"the model {name[:200]!r} does not exist; this server has {', '.join(self._by_name)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name, model

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Bounds the requests whose prompts are being made; beyond, as for those in flight, 429."""
        if self._preparing >= self.settings.max_concurrent_requests:
            raise ApiError(429, "too many requests at once; try again in a moment", retry_after=1.0)
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    async def begin(self, choices: Choices) -> None:
        """Submit a request's generations. Raises GenerationError; `end` must be called all the same."""
        self._running.add(choices)
        await choices.submit()

    def end(self, choices: Choices) -> None:
        """The request is over, however it ended."""
        choices.close()
        self._running.discard(choices)
        if choices.error is not None:
            current_trace().fail(choices.error.message, choices.error.status)

    def fail_all(self, error: GenerationError) -> None:
        """End every request in flight with an error, in order: streams still get their [DONE]."""
        for choices in list(self._running):
            choices.fail(error)


def frontend_state(request: Request) -> FrontendState:
    return request.app.state.frontend

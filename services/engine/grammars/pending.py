"""The requests that wait for their grammar: compiled in threads, so that the engine's loop never does."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from services.engine.grammars.compiler import GrammarCompiler, GrammarFault
from services.engine.grammars.matcher import GrammarMatcher
from services.engine.request import Request, RequestStatus


class PendingGrammars:
    """Used by the loop's thread alone. `on_ready` is called from any thread when `take_ready` has something new."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self._compiler = compiler
        self._waiting: dict[Request, Future[GrammarMatcher]] = {}
        self._ready: deque[tuple[Request, Future[GrammarMatcher]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    @property
    def requests(self) -> list[Request]:
        return list(self._waiting)

    @property
    def any_ready(self) -> bool:
        return bool(self._ready)

    def prepare(self) -> None:
        """Do what would hold the loop up when the first grammar comes. Before there is a loop, from any thread."""
        self._compiler.prepare()

    def add(self, request: Request) -> None:
        """Have this request's grammar made, and read the output it came with."""
        request.status = RequestStatus.PREPARING
        output = request.token_ids[request.num_prompt_tokens :]
        made = self._compiler.compile(request.sampling, output)

        self._waiting[request] = made

        def ready(made: Future[GrammarMatcher]) -> None:
            if made.cancelled():
                return
            self._ready.append((request, made))
            self.on_ready()

        made.add_done_callback(ready)

    def discard(self, request: Request) -> bool:
        """Wait no longer for this one. False: nobody did."""
        made = self._waiting.pop(request, None)
        if made is None:
            return False
        made.cancel()
        return True

    def take_ready(self) -> list[tuple[Request, str | None]]:
        """Those whose wait is over: their `grammar` is set, or the error says why it cannot be."""
        taken: list[tuple[Request, str | None]] = []
        while self._ready:
            request, made = self._ready.popleft()
            if not self.discard(request):
                continue  # aborted meanwhile
            error = made.exception()
            if error is None:
                request.grammar = made.result()
            elif not isinstance(error, GrammarFault):
                error = GrammarFault(f"the grammar could not be made: {error or type(error).__name__}")
            taken.append((request, None if error is None else str(error)))
        return taken

    def close(self) -> None:
        self._compiler.close()

"""Finds the request that kills its engines: one that has a last chance is tried on an engine without its like.

Whoever shared an engine with a poisoned request has lost as many engines as it, and looks as guilty. So the requests
that one more loss would end are run one at a time on each engine, until each has got past what may have killed its
engines. If an engine dies meanwhile, the one on trial is to blame, and nobody beside it. `dispatch` asks.
"""

from collections.abc import Callable, Sequence

from services.frontend.engines.connection import EngineConnection
from services.frontend.engines.in_flight import InFlight

# Some of what an engine made before it died never arrived: so many tokens further a request is past the place.
TOKENS_TO_ACQUIT = 16


class Trials:
    """`on_end` is called when an engine is free for the next trial because the last one was acquitted."""

    def __init__(self, max_failovers: int, on_end: Callable[[], None]) -> None:
        self._max_failovers = max_failovers
        self._on_end = on_end
        self._by_engine: dict[EngineConnection, InFlight] = {}

    def is_suspect(self, request: InFlight) -> bool:
        """Whether one more loss ends it."""
        return 0 < self._max_failovers <= request.losses

    def free_engines(self, engines: Sequence[EngineConnection]) -> list[EngineConnection]:
        """Those that try nobody now."""
        return [engine for engine in engines if engine not in self._by_engine]

    def begin(self, engine: EngineConnection, request: InFlight) -> None:
        """The engine has taken the suspect."""
        tokens_at_end = len(request.output_token_ids) + TOKENS_TO_ACQUIT

        def progressed() -> None:
            if len(request.output_token_ids) >= tokens_at_end:
                self.end(request)

        self._by_engine[engine] = request
        request.on_progress = progressed

    def end(self, request: InFlight) -> None:
        """It has got past the place, or is over, or has left its engine alive. Nothing where it is not on trial."""
        if request.on_progress is None:
            return
        request.on_progress = None
        for engine, on_trial in list(self._by_engine.items()):
            if on_trial is request:
                del self._by_engine[engine]
                self._on_end()

    def convict(self, engine: EngineConnection) -> InFlight | None:
        """The engine died: the one that was on trial there is to answer for it. None: nobody was."""
        culprit = self._by_engine.pop(engine, None)
        if culprit is not None:
            culprit.on_progress = None
        return culprit

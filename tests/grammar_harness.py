"""Constrained requests on an engine's core: run to their end, with grammars that are made in threads."""

import time
from typing import Any

from services.engine.core import EngineCore
from shared.structured_output import StructuredOutput
from tests.engine_harness import PEER, Result, make_add, take_step


def run_constrained(core: EngineCore, timeout: float = 60.0) -> dict[int, Result]:
    """Step until no request is left, check the accounts at every step, and return what each request got."""
    results: dict[int, Result] = {}
    until = time.monotonic() + timeout
    while core.num_requests or core.has_work:
        assert time.monotonic() < until, f"requests are left: {core.pending_grammars.requests}"
        if core.has_work:
            take_step(core, results)
            core.check()
        else:
            time.sleep(0.001)  # a grammar is being made
    core.check_when_idle()
    return results


def constrain(kind: str, value: str = "", **fields: Any) -> StructuredOutput:
    return StructuredOutput(kind=kind, value=value, **fields)


def generate_constrained(core: EngineCore, structured: StructuredOutput, **fields: Any) -> Result:
    """One request alone, to its end."""
    core.add(PEER, make_add(1, [1, 2, 3], structured_output=structured, **{"max_tokens": 200, **fields}))
    return run_constrained(core)[1]

"""A process that compiles grammars to see whether they can be served: it may be killed, its parent may not.

It reads and writes the frames of frames.py, a StructuredOutput in, a Verdict out, in order. A schema is its client's
text: whatever takes too long or too much memory here ends this process alone.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
from typing import Any

import msgspec

from services.frontend.structured.frames import Verdict, frame, read_frame
from services.frontend.structured.json_schema import SchemaFault, check_schema, subschemas
from shared.grammars import InvalidGrammar, llguidance_grammar, parser_limits
from shared.structured_output import GRAMMAR, JSON_SCHEMA, STRUCTURAL_TAG, StructuredOutput

MAX_MEMORY_BYTES = 1024**3  # of addresses; the processes share their pod's memory with the streams
# llguidance recurses as deep as a grammar nests, and ends the process where its stack is full. An engine's threads have
# 2 MiB at least: what was compiled on this stack cannot fill theirs.
STACK_BYTES = 1024**2
STEPS_INTO_GRAMMAR = 8
OPENING_BYTES = b'{["'
MAX_LOCATED = 200  # subschemas that are compiled one by one to find the one at fault


def judge(structured: StructuredOutput) -> Verdict:
    """Whether this can be served."""
    try:
        if structured.kind == GRAMMAR:
            structured = msgspec.structs.replace(structured, value=_as_lark(structured.value))
        schema = json.loads(structured.value) if structured.kind in (JSON_SCHEMA, STRUCTURAL_TAG) else None
        if structured.kind == JSON_SCHEMA:
            check_schema(schema)
        elif structured.kind == STRUCTURAL_TAG:
            _check_structures(schema)
        error = _compile(llguidance_grammar(structured))
    except SchemaFault as fault:
        return Verdict(error=fault.message, place=fault.place)
    except InvalidGrammar as fault:
        return Verdict(error=fault.message, place=fault.place)
    except RecursionError:
        return Verdict(error="is nested too deeply")
    except ValueError as fault:
        return Verdict(error=f"cannot be read: {fault}")
    if error:
        place = _locate(schema) if structured.kind == JSON_SCHEMA else ""
        return Verdict(error=f"cannot be compiled: {error}", place=place)
    return Verdict(value=structured.value)


def _compile(grammar: str) -> str:
    """Compile, and go a little way into the grammar: some limits show only then. Returns what is wrong."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_byte_table(), grammar, log_level=0, limits=parser_limits())
    for _ in range(STEPS_INTO_GRAMMAR):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if not allowed:
            break
        # What opens something has the most ahead of it.
        chosen = next((byte for byte in OPENING_BYTES if byte in allowed), allowed[0])
        for byte in allowed:
            if byte == chosen:
                continue
            other = matcher.deep_copy()
            if not other.consume_token(byte):
                return _error(other)
        matcher.consume_token(chosen)
    return _error(matcher) if matcher.is_error() else ""


def _error(matcher: Any) -> str:
    return matcher.get_error().strip().split("\n<state>")[0][:500]


def _byte_table() -> Any:
    from llguidance import LLTokenizer

    global _table
    if _table is None:
        _table = LLTokenizer("byte")
    return _table


_table: Any = None


def _as_lark(grammar: str) -> str:
    """llama.cpp's GBNF is taken too, as vLLM's clients send it."""
    from llguidance.gbnf_to_lark import any_to_lark

    return any_to_lark(grammar)


def _check_structures(value: object) -> None:
    structures = value.get("structures") if isinstance(value, dict) else None
    for index, structure in enumerate(structures if isinstance(structures, list) else []):
        try:
            check_schema(structure.get("schema") if isinstance(structure, dict) else True)
        except SchemaFault as fault:
            raise SchemaFault(f".structures[{index}].schema{fault.place}", fault.message) from fault


def _locate(schema: Any) -> str:
    """The place of the innermost subschema that cannot be compiled by itself; empty where all of them can."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for place, _, subschema in reversed(list(subschemas(schema))[:MAX_LOCATED]):
        if isinstance(subschema, dict) and place:
            alone = json.dumps({**definitions, **subschema})
            if _compile(llguidance_grammar(StructuredOutput(kind=JSON_SCHEMA, value=alone))):
                return place
    return ""


def main() -> None:
    """Serve until stdin ends. `argv[1]` is the CPU time, in seconds, after which the kernel ends this process."""
    seconds = float(sys.argv[1])
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)  # streams come first
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its parent's to answer
    threading.stack_size(STACK_BYTES)
    serving = threading.Thread(target=_serve, args=[seconds], name="compile")
    serving.start()
    serving.join()


def _serve(seconds: float) -> None:
    judge(StructuredOutput(kind=JSON_SCHEMA, value='{"type": "object"}'))  # loads what the first would wait for
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    answers.write(frame(b""))
    answers.flush()
    while (data := read_frame(requests)) is not None:
        # Not in Python's hands while llguidance works: the signal's default is to end the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        verdict = judge(msgspec.msgpack.decode(data, type=StructuredOutput))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(frame(msgspec.msgpack.encode(verdict)))
        answers.flush()


if __name__ == "__main__":
    main()

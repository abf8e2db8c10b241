"""A process that compiles grammars to see whether they can be served: what they do to it harms no stream.

It reads and writes the frames of frames.py, a StructuredOutput in, a Verdict out, in order. A schema is its client's
text: whatever takes too long or too much memory ends a copy of this process alone.
"""

import contextlib
import gc
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
TOO_COMPLEX = "is too complex: compiling it takes too much memory, or it nests too deeply"
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
    """llama.cpp's GBNF is taken too, as vLLM's clients send it. Raises ValueError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except IndexError as error:  # it reads past the end
        raise ValueError("the grammar ends too early") from error
    except (RecursionError, MemoryError):
        raise
    except Exception as error:  # its own errors are no more than that
        raise ValueError(str(error)) from error


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
    """Serve until stdin ends. `argv[1]` is the CPU time in seconds that a grammar may take, `argv[2]` how nice the
    process is to others."""
    seconds, niceness = float(sys.argv[1]), int(sys.argv[2])
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(niceness)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its parent's to answer
    threading.stack_size(STACK_BYTES)
    judge(StructuredOutput(kind=JSON_SCHEMA, value='{"type": "object"}'))  # loads what each would wait for
    gc.freeze()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    answers.write(frame(b""))
    answers.flush()
    while (data := read_frame(requests)) is not None:
        answers.write(frame(_judge_apart(data, seconds)))
        answers.flush()


def _judge_apart(data: bytes, seconds: float) -> bytes:
    """In a copy of this process, which ends with the grammar: to be killed costs it no start."""
    reading, writing = os.pipe()
    copy = os.fork()
    if copy == 0:
        os.close(reading)
        serving = threading.Thread(target=_answer, args=[data, seconds, writing], name="compile")
        serving.start()
        serving.join()
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        verdict = answer.read()
    _, status = os.waitpid(copy, 0)
    if status == 0 and verdict:
        return verdict
    timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    return msgspec.msgpack.encode(Verdict(error=TOO_COMPLEX, timed_out=timed_out))


def _answer(data: bytes, seconds: float, writing: int) -> None:
    # Not in Python's hands while llguidance works: the signal's default is to end the process.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    verdict = judge(msgspec.msgpack.decode(data, type=StructuredOutput))
    signal.setitimer(signal.ITIMER_PROF, 0)
    with open(writing, "wb") as answer:
        answer.write(msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    main()

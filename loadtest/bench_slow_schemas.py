"""How long a client's new small schema waits beside many large ones that another sends at once.

    python -m loadtest.bench_slow_schemas [--schemas 40] [--rounds 3]

A frontend's check and an engine's compilation, in this process and those of the check. Each large schema has 899
new patterns; the small ones come just behind them all, and half a second later.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Mapping

from services.engine.grammars import GrammarCompiler
from services.frontend.structured import GrammarChecker, GrammarRefused
from services.launcher.smollm2 import ensure_smollm2
from shared.sampling_params import SamplingParams
from shared.structured_output import StructuredOutput


def schema_of(properties: Mapping[str, Mapping[str, object]]) -> StructuredOutput:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return StructuredOutput(kind="json_schema", value=json.dumps(schema))


def large(number: int) -> StructuredOutput:
    patterns = {f"p{number}_{i}": {"type": "string", "pattern": f"^[a-f]{{1,{i}}}$"} for i in range(1, 900)}
    return schema_of(patterns)


def small(number: int) -> StructuredOutput:
    return schema_of({f"q{number}": {"type": "string", "maxLength": 20}, "n": {"type": "integer"}})


class Served:
    def __init__(self, checker: GrammarChecker, compiler: GrammarCompiler) -> None:
        self._checker, self._compiler = checker, compiler

    async def times(self, structured: StructuredOutput) -> str:
        began = time.perf_counter()
        try:
            sent = await self._checker.check(structured)
        except GrammarRefused:
            return "refused"
        checked = time.perf_counter()
        await asyncio.wrap_future(self._compiler.compile(SamplingParams(structured_output=sent), []))
        return f"{1000 * (checked - began):4.0f} + {1000 * (time.perf_counter() - checked):4.0f}"


async def measure(schemas: int, rounds: int) -> None:
    checker = GrammarChecker(128 * 1024, 0.5)
    compiler = GrammarCompiler(ensure_smollm2, 49_152, [2])
    compiler.prepare()
    served = Served(checker, compiler)
    for structured in (small(0), large(0)):
        await served.times(structured)
    print("ms to check, + to compile")
    print(f"  alone: a small schema {await served.times(small(1))}, a large one {await served.times(large(1))}")
    for number in range(2, rounds + 2):
        began = time.perf_counter()
        flood = [asyncio.create_task(served.times(large(1000 * number + i))) for i in range(schemas)]
        await asyncio.sleep(0.02)
        first = await served.times(small(2 * number))
        await asyncio.sleep(0.5)
        second = await served.times(small(2 * number + 1))
        refused = (await asyncio.gather(*flood)).count("refused")
        seconds = time.perf_counter() - began
        print(f"  small ones: {first}, then {second}; all {schemas} after {seconds:.1f} s, {refused} refused")
    await checker.close()
    compiler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.schemas, arguments.rounds))


if __name__ == "__main__":
    main()

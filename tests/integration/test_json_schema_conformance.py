"""SmolLM2 at temperature 1 writes JSON for a few hundred schemas, and what it finishes validates with `jsonschema`.

`make conformance` runs it with more seeds than `make test` (TANDEM_CONFORMANCE_SEEDS).
"""

import json
import os
from pathlib import Path

import jsonschema
import pytest
from jsonschema.validators import validator_for

from services.engine.core import EngineCore
from services.engine.executor.torch_executor import TorchExecutor
from services.engine.settings import EngineSettings
from services.frontend.structured.compile_process import judge
from services.frontend.tokenizer import Tokenizer
from shared.protocol import FinishReason
from shared.structured_output import StructuredOutput
from tests.conformance_schemas import all_schemas
from tests.engine_harness import PEER, make_add
from tests.grammar_harness import run_constrained

SCHEMAS = all_schemas()
SEEDS = int(os.environ.get("TANDEM_CONFORMANCE_SEEDS", "1"))
MAX_TOKENS = 72


def test_there_are_a_few_hundred() -> None:
    assert len(SCHEMAS) > 200


def test_every_schema_is_one_that_can_be_served() -> None:
    for name, schema in SCHEMAS.items():
        validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
        verdict = judge(StructuredOutput(kind="json_schema", value=json.dumps(schema)))
        assert not verdict.error, (name, verdict)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_is_finished_validates(smollm2: Path, seed: int) -> None:
    settings = EngineSettings(
        model=str(smollm2),
        dtype="float32",
        device="cpu",
        max_num_seqs=64,
        max_waiting_requests=10_000,
        kv_cache_memory=0.5,
    )
    core = EngineCore(TorchExecutor(settings), settings)
    tokenizer = Tokenizer.load(smollm2)
    prompt = tokenizer.encode("A short example in JSON:\n", add_special_tokens=False)
    for number, schema in enumerate(SCHEMAS.values()):
        structured = StructuredOutput(kind="json_schema", value=json.dumps(schema))
        core.add(
            PEER,
            make_add(number, prompt, structured_output=structured, max_tokens=MAX_TOKENS, seed=seed * 10_007 + number),
        )
    results = run_constrained(core, timeout=280)
    core.close()
    finished = 0
    wrong: list[str] = []
    for number, (name, schema) in enumerate(SCHEMAS.items()):
        result = results[number]
        text = tokenizer.decode(result.token_ids)
        if result.finish_reason is FinishReason.ERROR:
            wrong.append(f"{name}: {result.error} after {text!r}")
        elif result.finish_reason is FinishReason.STOP:
            finished += 1
            validator = validator_for(schema, default=jsonschema.Draft202012Validator)
            try:
                validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))
            except (ValueError, jsonschema.ValidationError) as error:
                wrong.append(f"{name}: {text!r}: {error}")
    assert not wrong, "\n\n".join(wrong)
    assert finished > 0.8 * len(SCHEMAS)

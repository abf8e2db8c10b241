"""lm-eval's own `local-completions` on a small local task: every score is the one that transformers computes.

It installs lm-eval into an environment of its own, so it runs only where asked to: `make eval-test`.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.likelihood_task import QUESTIONS, TEXTS, Reference, Scored
from tests.integration.lm_eval_environment import lm_eval_python
from tests.start_server import StartServer

MODEL = "SmolLM2-135M-Instruct"
TOLERANCE = 1e-3
# Of a sum over a text: float32 has seven digits, and a step rounds thousands of times.
RELATIVE_TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TANDEM_LM_EVAL") != "1", reason="installs lm-eval beside everything else: `make eval-test`"
    ),
    pytest.mark.timeout(1200),
]


def write_tasks(folder: Path) -> None:
    """Two tasks over local files: choices, which are scored one by one, and texts, which are scored whole."""
    questions = [
        {"context": question.context, "choices": list(question.choices), "answer": question.answer}
        for question in QUESTIONS
    ]
    write_task(
        folder,
        "tandem_choices",
        questions,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
    )
    write_task(
        folder,
        "tandem_texts",
        [{"text": text} for text in TEXTS],
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    )


def write_task(folder: Path, name: str, documents: list[dict[str, Any]], fields: dict[str, Any]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **fields,
    }
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")


def samples(output: Path, task: str) -> list[dict[str, Any]]:
    (file,) = output.rglob(f"samples_{task}_*.jsonl")
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted(found, key=lambda sample: sample["doc_id"])


@pytest.mark.parametrize(
    ("batch_size", "options"), [(1, "num_concurrent=1"), (4, "num_concurrent=3"), (4, "tokenized_requests=False")]
)
def test_lm_eval_scores_as_transformers_does(
    start_server: StartServer, smollm2: Path, tmp_path: Path, batch_size: int, options: str
) -> None:
    python = lm_eval_python()
    write_tasks(tmp_path)
    server = start_server("--dtype", "float32", "--kv-cache-memory", "0.5", "--max-model-len", "2048")
    url = f"{server.url}/v1/completions"
    command = [python, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", f"model={MODEL},base_url={url},tokenizer={smollm2},max_retries=1,{options}"]
    command += ["--batch_size", str(batch_size), "--tasks", "tandem_choices,tandem_texts", "--include_path", tmp_path]
    command += ["--output_path", tmp_path / "output", "--log_samples"]
    offline = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]

    reference = Reference(smollm2)
    for sample, question in zip(samples(tmp_path / "output", "tandem_choices"), QUESTIONS, strict=True):
        for (answer,), choice in zip(sample["resps"], question.choices, strict=True):
            expected = reference.score(*reference.pair(question.context, f" {choice}"))
            assert float(answer[0]) == pytest.approx(expected.logprob, abs=TOLERANCE, rel=RELATIVE_TOLERANCE)
            assert answer[1] in (expected.greedy, str(expected.greedy))
    for sample, text in zip(samples(tmp_path / "output", "tandem_texts"), TEXTS, strict=True):
        expected = whole_text(reference, text)
        ((answer,),) = sample["resps"]
        assert float(answer[0] if isinstance(answer, list) else answer) == pytest.approx(
            expected.logprob, abs=TOLERANCE, rel=RELATIVE_TOLERANCE
        )


def whole_text(reference: Reference, text: str) -> Scored:
    token_ids = reference.tokenizer(text, add_special_tokens=False).input_ids
    return reference.score([reference.tokenizer.bos_token_id], token_ids)

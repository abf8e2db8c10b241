"""Calls whose marks are special tokens, as Qwen's and Mistral's vocabularies have them, from a model that computes its
tokens: a tiny one with random weights, which writes what the grammar makes it write."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from process_fleet import ROOT
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from loadtest.server_process import ServerProcess, tandem_serve

MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]"]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "book", "parameters": PARAMETERS, "strict": True}}]
FIRST_MARKS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's vocabulary with the marks behind it."""
    folder = tmp_path_factory.mktemp("marks") / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=list(FIRST_MARKS))
def served(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[ServerProcess, int]]:
    """A server, and the id of the token that begins its calls."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = ["--model", str(model), "--served-model-name", "m", "--dtype", "float32", "--kv-cache-memory", "0.1"]
    template = shutil.copy(ROOT / "docs/chat-templates/chatml-hermes.jinja", folder / "template.jinja")
    flags += ["--chat-template", template, "--tool-call-parser", request.param, "--threads", "1"]
    with tandem_serve(folder, *flags) as server:
        yield server, AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(FIRST_MARKS[request.param])


def ask(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "Book it"}], "tools": TOOLS, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def check(call: dict[str, Any]) -> None:
    assert call["function"]["name"] == "book"
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_begins_with_the_special_token(served: tuple[ServerProcess, int], seed: int) -> None:
    server, mark = served
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed, "max_tokens": 200}
    choice = ask(server, **fields, return_token_ids=True)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["token_ids"][0] == mark
    (call,) = choice["message"]["tool_calls"]
    check(call)
    assert not choice["message"]["content"]


def test_a_strict_function_is_held_to_its_schema_from_the_special_token_on(served: tuple[ServerProcess, int]) -> None:
    server, mark = served
    # The model would write nothing else: between the calls, and wherever the grammar allows it.
    choice = ask(server, logit_bias={str(mark): 100}, seed=1, max_tokens=150, return_token_ids=True)
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"].count(mark) > 1
    calls = choice["message"]["tool_calls"]
    assert len(calls) > 1
    for call in calls[:-1]:
        check(call)


def test_without_a_call_the_text_is_free(served: tuple[ServerProcess, int]) -> None:
    server, mark = served
    choice = ask(server, logit_bias={str(mark): -100}, seed=2, max_tokens=40)
    assert choice["finish_reason"] in ("length", "stop")
    assert choice["message"]["content"]
    assert not choice["message"].get("tool_calls")

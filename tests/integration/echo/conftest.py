"""A server of each kind."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.server_process import tandem_serve
from tests import tokenizers_at_hand
from tests.integration.echo.echo_server import KINDS, VARIABLES, Echo, Kind


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def echo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Echo]:
    kind: Kind = request.param
    scratch = tmp_path_factory.mktemp(kind.name)
    if kind.name == "smollm2":
        folder: Path = request.getfixturevalue("smollm2")
        tokenizer = tokenizers_at_hand.load(folder)
    else:
        make = {
            "deepseek": tokenizers_at_hand.deepseek,
            "sentencepiece": tokenizers_at_hand.sentencepiece_like,
        }
        tokenizer = make[kind.name]()
        folder = tokenizers_at_hand.write_model_folder(tokenizer, scratch / "model")
    # The output is the message; what the turn's end hides from the parser is the prompt before it.
    template = scratch / "template.jinja"
    template.write_text(VARIABLES + "{{ messages[-1].content }}" + kind.turn + "{{ opened }}", encoding="utf-8")
    flags = ["--model", str(folder), "--executor", "simulated", "--simulated-tokens", "echo"]
    flags += ["--chat-template", str(template), "--reasoning-parser", kind.parser, "--served-model-name", "echo"]
    flags += ["--reasoning-tags", json.dumps(kind.tags)]
    with tandem_serve(scratch / "server", *flags) as server:
        yield Echo(kind, tokenizer, server)

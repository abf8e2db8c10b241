"""Every option that docs/api.md describes is run by a test beside this one, and every option is described there."""

import importlib
import re

from loadtest.server_process import ROOT
from services.frontend.http.schemas.chat import ChatCompletionRequest
from services.frontend.http.schemas.completion import CompletionRequest
from tests.integration.openai_options.options_client import RUN


def documented(heading: str) -> set[str]:
    """The options in the first column of the table under a heading of docs/api.md."""
    document = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    section = document.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|") and "---" not in line]
    return {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}


HEADINGS = ["Fields of both completions", "Chat only", "Completions only"]


def test_every_documented_option_is_run() -> None:
    for tests in ("test_options_of_both", "test_options_of_each_route"):
        importlib.import_module(tests)
    assert set().union(*map(documented, HEADINGS)) - RUN == set()


def test_every_option_is_documented() -> None:
    both, chat, completions = map(documented, HEADINGS)
    assert set(ChatCompletionRequest.model_fields) - (both | chat) == set()
    assert set(CompletionRequest.model_fields) - (both | completions) == set()
    assert both <= set(ChatCompletionRequest.model_fields) & set(CompletionRequest.model_fields)
    refused = set(ChatCompletionRequest.unsupported)
    document = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert {name for name in refused if f"`{name}`" not in document and not name.startswith("guided_")} == set()

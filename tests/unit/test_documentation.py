"""The documents say what the code does: every setting is described, and every path that they name is there."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", ["configuration", "scaling", "metrics"])
def test_generated_tables_are_what_the_code_gives(name: str) -> None:
    spec = importlib.util.spec_from_file_location(f"generate_{name}", ROOT / f"docs/generate_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = generator
    spec.loader.exec_module(generator)
    document = generator.DOCUMENT.read_text(encoding="utf-8")
    assert generator.with_tables(document) == document, f"`make docs` writes docs/{name}.md anew"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if not (document.parent / link).exists()]
    assert missing == []

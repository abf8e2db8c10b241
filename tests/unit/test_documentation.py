"""The documents say what the code does: every setting is described, and every path that they name is there."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_setting_is_in_the_configuration_document_as_it_is_in_the_code() -> None:
    spec = importlib.util.spec_from_file_location("generate_configuration", ROOT / "docs/generate_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    document = generator.DOCUMENT.read_text(encoding="utf-8")
    assert generator.with_tables(document) == document, "`make docs` writes docs/configuration.md anew"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if not (document.parent / link).exists()]
    assert missing == []

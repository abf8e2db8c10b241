"""Who may import whom: import-linter's contracts, and what really is loaded when a service starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Every line of it is one that a frontend's image would lack, or that an engine has no business with.
FORBIDDEN = {
    "services.frontend.main": ["torch", "services.engine", "services.launcher"],
    "services.engine.main": [
        "services.frontend",
        "services.launcher",
        "tokenizers",
        "sentencepiece",
        "fastapi",
        "starlette",
        "uvicorn",
        "transformers.models",
    ],
}


def test_import_linters_contracts_are_kept() -> None:
    # In a process of its own: it configures logging, and would silence the loggers of tests that come after.
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _loaded_by(module: str) -> set[str]:
    program = f"import {module}, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", FORBIDDEN)
def test_a_service_loads_nothing_that_is_the_others(module: str) -> None:
    loaded = _loaded_by(module)
    wrong = [name for name in FORBIDDEN[module] if name in loaded or any(x.startswith(f"{name}.") for x in loaded)]
    assert wrong == []


def test_the_frontend_starts_where_torch_is_not_installed() -> None:
    program = "import sys; sys.modules['torch'] = None; import services.frontend.main"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_loads_no_service_before_it_is_asked_for() -> None:
    loaded = _loaded_by("services.command")
    assert not loaded & {"torch", "transformers", "tokenizers", "fastapi", "services.frontend", "services.engine"}

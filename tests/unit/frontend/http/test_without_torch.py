"""The frontend's image has no torch: everything it imports and does must go without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] == "torch" else find(name, *rest)

import services.frontend.main
from services.frontend.prompts.chat_template import ChatTemplate
from services.frontend.prompts.messages import ChatMessage
from services.frontend.tokenizer import Tokenizer

tokenizer = Tokenizer.load(sys.argv[1])
text = ChatTemplate(tokenizer.hf).render([ChatMessage(role="user", content="hi")])
assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text == "user:hi|assistant:", text
assert "torch" not in sys.modules
"""

BESIDE_AN_ENGINE = """
import sys
from pathlib import Path

import services.frontend.main
from services.frontend.tokenizer import Tokenizer

services.frontend.main.leave_torch_out()
Tokenizer.load(Path(sys.argv[1]))
assert sys.modules["torch"] is None
assert not [name for name in sys.modules if name.startswith("torch.")]
"""


@pytest.mark.parametrize("script", [SCRIPT, BESIDE_AN_ENGINE])
def test_prompts_without_torch(tokenizer_folder: Path, script: str):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tokenizer_folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr

"""`tandem top` beside a real server."""

import os
import subprocess
import sys
from pathlib import Path

import openai

from tests.start_server import StartServer


def top(url: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.command", "top", "--url", url, "--interval", "0.2", *flags]
    return subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        env=os.environ | {"COLUMNS": "120", "PYTHONUTF8": "1"},
        check=False,
    )


def test_a_running_server_and_one_that_is_not_there(start_server: StartServer, smollm2: Path) -> None:
    server = start_server(
        "--model",
        str(smollm2),
        "--executor",
        "simulated",
        "--engines",
        "2",
        "--served-model-name",
        "model",
        "--api-key",
        "key",
    )
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key")
    client.completions.create(model="model", prompt="Hello", max_tokens=3)
    seen = top(server.url, "--api-key", "key")
    assert seen.returncode == 0, seen.stderr
    assert "1 frontend, 2 of 2 engines ready" in seen.stdout
    for engine in server.engines:
        assert f"127.0.0.1:{engine['link_port']}" in seen.stdout
    assert "first token" in seen.stdout
    without_key = top(server.url)
    assert (without_key.returncode, "give --api-key" in " ".join(without_key.stdout.split())) == (1, True)
    assert top("http://127.0.0.1:9").returncode == 1

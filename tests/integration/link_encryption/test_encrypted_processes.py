"""Keys given to real processes: they serve, or say what is wrong without showing a key."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_harness import wait_until

from tests.free_port import free_port
from tests.start_server import StartServer


def test_a_server_with_keys_serves(start_server: StartServer, smollm2: Path, keys: Path) -> None:
    server = start_server("--executor", "simulated", "--engines", "2", "--link-keys", str(keys))
    body = {"model": smollm2.name, "prompt": "Once", "max_tokens": 5}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert server.log.count("The link is encrypted") == 2
    for engine in server.engines:
        metrics = httpx.get(f"http://127.0.0.1:{engine['probe_port']}/metrics").text
        assert "tandem_engine_frontends 1.0" in metrics
        assert 'tandem_engine_handshake_failures_total{reason="unknown_key"} 0.0' in metrics
    assert "engines_without_link" not in httpx.get(f"{server.url}/health").json()


@pytest.mark.parametrize("service", ["engine", "frontend"])
def test_a_malformed_key_ends_the_start_and_is_not_shown(smollm2: Path, keys: Path, service: str) -> None:
    secret = "not-a-key-but-still-a-secret"
    (keys / f"{service}.secret").write_text(secret)
    command = [sys.executable, "-m", "services.command", service, "--model", str(smollm2), "--link-keys", str(keys)]
    done = subprocess.run([*command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"{service}.secret, line 1: {len(secret)} characters where a key has 40" in done.stderr
    assert "Traceback" not in done.stderr
    assert secret not in done.stdout + done.stderr


def test_a_frontend_with_another_key_says_so_in_its_health(
    start_server: StartServer, smollm2: Path, keys: Path, other_keys: Path
) -> None:
    server = start_server("--executor", "simulated", "--link-keys", str(keys))
    (engine,) = server.engines
    port = free_port()
    flags = ["--model", str(smollm2), "--port", str(port), "--link-keys", str(other_keys)]
    flags += ["--engine-addresses", f"127.0.0.1:{engine['link_port']}"]
    command = [sys.executable, "-m", "services.command", "frontend", *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            name = str(smollm2)

            def health() -> Any:
                try:
                    return httpx.get(f"http://127.0.0.1:{port}/health/ready")
                except httpx.TransportError:
                    return None

            wait_until(
                lambda: (answer := health()) is not None and "engines_without_link" in answer.json(),
                "the health tells of it",
                timeout=60,
            )
            answer = health()
            assert answer.status_code == 503
            assert answer.json() == {
                "status": "no engine",
                "models": {name: False},
                "engines_without_link": {name: 1},
            }
        finally:
            process.kill()
    assert "it takes this engine for one with another key" in server.log
    probes = httpx.get(f"http://127.0.0.1:{engine['probe_port']}/health/ready")
    assert probes.status_code == 200, "a stranger's key must not make an engine unready"

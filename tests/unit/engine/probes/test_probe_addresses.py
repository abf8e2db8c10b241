"""The probes answer on either kind of address."""

import socket
import urllib.request

import pytest

from services.engine.probes import Probes


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_probes_answer(host: str) -> None:
    if ":" in host:
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 here")
    probes = Probes(host, 0, lambda: None, lambda: "loading", lambda accept: (b"", "text/plain"))
    probes.start()
    try:
        address = f"[{host}]" if ":" in host else host
        with urllib.request.urlopen(f"http://{address}:{probes.port}/health/live", timeout=10) as response:
            assert response.status == 200
    finally:
        probes.close()

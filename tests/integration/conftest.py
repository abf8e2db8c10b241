"""Fixtures for tests with real processes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.server_process import ServerProcess, tandem_serve
from tests.start_server import StartServer


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Start `tandem serve` with these flags, as often as the test likes; all of them end with the test."""
    with contextlib.ExitStack() as servers:
        count = 0

        def start(*flags: str, **options: object) -> ServerProcess:
            nonlocal count
            count += 1
            return servers.enter_context(tandem_serve(tmp_path / f"server-{count}", *flags, **options))  # type: ignore[arg-type]

        yield start

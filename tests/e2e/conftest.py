"""The run in containers takes minutes: `make e2e` asks for it. It is skipped, with the reason, where it cannot be."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _containers() -> None:
    if os.environ.get("TANDEM_E2E") != "1":
        pytest.skip("runs containers for minutes: `make e2e`")
    from tests.e2e.podman import why_not

    if reason := why_not():
        pytest.skip(reason)

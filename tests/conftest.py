"""Fixtures that every kind of test shares. Models are tiny and random, or SmolLM2 from the user's cache."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched once into the user's cache."""
    from services.launcher.smollm2 import ensure_smollm2

    return ensure_smollm2()

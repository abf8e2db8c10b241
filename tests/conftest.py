"""Fixtures that every kind of test shares. Models are tiny and random, or SmolLM2 from the user's cache."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, however slow the machine; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched once into the user's cache."""
    from services.launcher.smollm2 import ensure_smollm2

    return ensure_smollm2()


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, which is put back as it was: for tests that run in process what configures it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: known.level for name, known in root.manager.loggerDict.items() if isinstance(known, logging.Logger)}
    yield root
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, known in levels.items():
        logging.getLogger(name).setLevel(known)

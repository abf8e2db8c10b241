"""Keys of two deployments, and engines' sides of the link."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_harness import make_settings, write_model

from services.engine.executor.interface import ModelDescription
from services.engine.link import Link
from services.engine.link_items import FromPeer
from services.engine.mailbox import Inbox
from shared.link_keys import read_link_keys
from shared.protocol import Load
from tests.integration.link_encryption.encrypted_link import LIMITS, OpenEngine, close, make_keys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


@pytest.fixture
def other_keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "other-keys")


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[OpenEngine]:
    """Starts a Link with the keys of a folder. Its loop is nobody: what frontends send is left where it is."""
    model = write_model(tmp_path / "model")
    links: list[Link] = []

    def open_one(keys: Path | None, port: int = 0) -> Link:
        inbox: Inbox[FromPeer] = Inbox(1 << 20)
        link = Link(
            make_settings(model, link_port=port, heartbeat_interval=0.2, heartbeat_timeout=30.0),
            ModelDescription("a-model-name-to-look-for", "print", LIMITS),
            LIMITS,
            b"engine",
            inbox,
            is_alive=lambda: True,
            on_end=lambda error: None,
            keys=None if keys is None else read_link_keys(keys, "engine"),
        )
        link.start(Load(free_blocks=7))
        links.append(link)
        return link

    yield open_one
    for link in links:
        close(link)

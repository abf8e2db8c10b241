"""A started link whose loop is the test."""

import time
from pathlib import Path
from typing import Any

from engine_harness import make_settings

from services.engine.executor.interface import ModelDescription
from services.engine.link import Link
from services.engine.link_items import FromPeer
from services.engine.mailbox import Inbox
from shared.protocol import Load, ModelLimits

LIMITS = ModelLimits(100, 50, [2], 4, 9)


class LinkEnd:
    """Take what came from `inbox`; `ended` says how its thread did."""

    def __init__(self, model: Path, **overrides: Any) -> None:
        self.inbox: Inbox[FromPeer] = Inbox(overrides.pop("max_inbox_bytes", 1 << 20))
        self.alive = True
        self.ended: list[BaseException | None] = []
        self.link = Link(
            make_settings(model, **{"heartbeat_interval": 0.05, "heartbeat_timeout": 30.0, **overrides}),
            ModelDescription("model", "print", LIMITS),
            LIMITS,
            b"engine",
            self.inbox,
            is_alive=lambda: self.alive,
            on_end=self.ended.append,
        )
        self.link.start(Load(free_blocks=7))

    @property
    def port(self) -> int:
        return self.link.port

    def next_items(self, count: int = 1) -> list[FromPeer]:
        items: list[FromPeer] = []
        until = time.monotonic() + 10
        while len(items) < count and time.monotonic() < until:
            items += self.inbox.take_all(0.1)
        assert len(items) == count
        return items

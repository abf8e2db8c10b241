"""A real engine core (scheduler, KV cache, simulated model) behind the in-process transport, without a process."""

from pathlib import Path
from typing import Any

from engine_harness import make_core

from services.engine.kv_cache import BlockEvents
from services.frontend.engines.in_process_engine import InProcessEngine
from shared.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    Outputs,
    Welcome,
    decode_to_engine,
)


class CoreEngine(InProcessEngine):
    """Publishes its cache as `services.engine.link` does: the whole of it to a newcomer, then what changes."""

    def __init__(self, model: Path, **settings: Any) -> None:
        super().__init__()
        self.core = make_core(model, **settings)
        self.events: dict[bytes, BlockEvents] = {}

    @property
    def num_requests(self) -> int:
        return self.core.num_requests

    @property
    def load(self) -> Load:
        return self.core.load()

    def receive(self, identity: bytes, data: bytes) -> None:
        message = decode_to_engine(data)
        if isinstance(message, Hello):
            self.core.abort_peer(identity)
            self.events[identity] = BlockEvents()
            self.post(
                identity,
                Welcome(PROTOCOL_VERSION, self.boot_id, "model", self.fingerprint, self.core.limits, self.load),
            )
            self.events[identity].replace(self.core.stored_block_hashes())
        elif isinstance(message, Add):
            self.core.add(identity, message)
        elif isinstance(message, Abort):
            self.core.abort(identity, message.request_ids)
        elif isinstance(message, Goodbye):
            self.core.abort_peer(identity)
            del self.events[identity]

    def step(self) -> None:
        outputs = self.core.step() if self.core.has_work else {}
        changes = self.core.take_block_events()
        for identity, events in self.events.items():
            events.add(changes)
            if identity in outputs:
                self.post(identity, Outputs(outputs[identity], self.load, *events.take(1000)))

    def heartbeat(self) -> None:
        for identity, events in self.events.items():
            self.post(identity, Heartbeat(self.load, *events.take(1000)))

"""An engine for tests: a model folder without weights, a core driven by hand, a frontend that speaks the link."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from services.engine.core import EngineCore
from services.engine.executor.simulated import SimulatedExecutor
from services.engine.settings import EngineSettings
from shared.protocol import (
    PROTOCOL_VERSION,
    Add,
    FinishReason,
    Hello,
    Outputs,
    RequestOutput,
    ToFrontend,
    Welcome,
    decode_to_frontend,
    encode,
    new_boot_id,
    pack_token_ids,
)
from shared.sampling_params import SamplingParams

EOS = 2
PEER = b"frontend"


def write_model(folder: Path, **config: Any) -> Path:
    """A folder that the simulated executor can serve."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"vocab_size": 1000, "max_position_embeddings": 4096, "eos_token_id": EOS, **config}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def make_settings(model: Path, **overrides: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "model": str(model),
        "executor": "simulated",
        "block_size": 4,
        "num_kv_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "link_port": 0,
        "probe_port": 0,
    }
    return EngineSettings(**{**values, **overrides})


def make_core(model: Path, **overrides: Any) -> EngineCore:
    settings = make_settings(model, **overrides)
    return EngineCore(SimulatedExecutor(settings), settings)


def make_add(request_id: int, prompt: list[int], *, output: list[int] | None = None, **fields: Any) -> Add:
    """An ADD; what SamplingParams knows goes there, the rest into ADD itself."""
    sampling = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
    return Add(
        request_id,
        pack_token_ids(prompt),
        SamplingParams(**sampling),
        output_token_ids=pack_token_ids(output or []),
        **fields,
    )


@dataclass
class Result:
    """Everything that one request got."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    stop_token_id: int | None = None
    cached_tokens: int | None = None

    def take(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output came after the last one"
        self.outputs.append(output)
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self.error = output.error
        self.stop_token_id = output.stop_token_id
        if output.cached_tokens is not None:
            assert self.cached_tokens is None, "cached_tokens came twice"
            self.cached_tokens = output.cached_tokens


def take_step(core: EngineCore, results: dict[int, Result]) -> None:
    for outputs in core.step().values():
        for output in outputs:
            results.setdefault(output.request_id, Result()).take(output)


def run_to_end(core: EngineCore, max_steps: int = 10_000) -> dict[int, Result]:
    """Step until nothing is left, check the accounts at every step, and return what each request got."""
    results: dict[int, Result] = {}
    for _ in range(max_steps):
        if not core.has_work:
            core.check_when_idle()
            core.check()
            return results
        take_step(core, results)
        core.check()
    raise AssertionError(f"work is left after {max_steps} steps")


def generate(core: EngineCore, prompt: list[int], **fields: Any) -> Result:
    """One request alone, to its end."""
    core.add(PEER, make_add(1, prompt, **fields))
    return run_to_end(core)[1]


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 20.0) -> None:
    """Poll for a condition that another thread or process brings about."""
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, f"not within {timeout:g} s: {what}"
        time.sleep(0.002)


class LinkFrontend:
    """A frontend's end of the link, blocking."""

    def __init__(self, port: int, identity: bytes | None = None, *, immediate: bool = False) -> None:
        self.identity = identity or new_boot_id()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.IMMEDIATE, immediate)
        self.socket.set(zmq.ROUTING_ID, self.identity)
        self.socket.set(zmq.LINGER, 500)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def __enter__(self) -> "LinkFrontend":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self.context.destroy(linger=500)

    def send(self, message: Any) -> None:
        self.socket.send(message if isinstance(message, bytes) else encode(message))

    def receive(self, timeout: float = 10.0) -> ToFrontend:
        assert self.socket.poll(int(timeout * 1000)), f"nothing came within {timeout:g} s"
        return decode_to_frontend(self.socket.recv())

    def receive_a(self, kind: type, timeout: float = 10.0) -> Any:
        """The next message of a kind; others are passed over."""
        until = time.monotonic() + timeout
        while True:
            message = self.receive(until - time.monotonic())
            if isinstance(message, kind):
                return message

    def hello(self) -> Welcome:
        self.send(Hello(PROTOCOL_VERSION, self.identity))
        return self.receive_a(Welcome)

    def collect(self, request_ids: list[int], timeout: float = 10.0) -> dict[int, Result]:
        """Read until each of these requests has ended."""
        results = {request_id: Result() for request_id in request_ids}
        while any(result.finish_reason is None for result in results.values()):
            for output in self.receive_a(Outputs, timeout).outputs:
                if output.request_id in results:
                    results[output.request_id].take(output)
        return results

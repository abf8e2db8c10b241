"""An engine that needs no model and no process, for tests: `in_process` carries its messages, or any socket.

It speaks the link's protocol as a real one does. Its tokens are a pure function of the sequence so far, so
that a stream which moved can be compared with one that did not. It makes a step only when told to.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    ModelLimits,
    Outputs,
    RequestOutput,
    ToFrontend,
    TokenLogprobs,
    Welcome,
    decode_to_engine,
    encode,
    new_boot_id,
    pack_token_ids,
    unpack_token_ids,
)

EOS_TOKEN_ID = 0


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """The token that follows, eos among them about once in `vocab_size`."""
    return zlib.crc32(pack_token_ids(token_ids)) % vocab_size


def undisturbed_run(prompt_token_ids: list[int], max_tokens: int, vocab_size: int = 50) -> list[int]:
    """What one engine makes of a prompt from its beginning to its end."""
    token_ids = list(prompt_token_ids)
    while len(token_ids) < len(prompt_token_ids) + max_tokens:
        token_ids.append(next_token(token_ids, vocab_size))
        if token_ids[-1] == EOS_TOKEN_ID:
            break
    return token_ids[len(prompt_token_ids) :]


@dataclass(slots=True)
class _Running:
    add: Add
    token_ids: list[int]
    num_prompt_tokens: int
    is_first: bool = True


@dataclass(slots=True)
class _Peer:
    requests: dict[int, _Running] = field(default_factory=dict)
    seen_ids: set[int] = field(default_factory=set)


class InProcessEngine:
    """An engine's side of the protocol. `send` takes its messages to a peer; whoever carries them sets it."""

    def __init__(self, fingerprint: str = "weights", vocab_size: int = 50, max_model_len: int = 4096) -> None:
        self.boot_id = new_boot_id()
        self.protocol_version = PROTOCOL_VERSION
        self.fingerprint = fingerprint
        self.limits = ModelLimits(max_model_len, vocab_size, [EOS_TOKEN_ID], 16)
        self.peers: dict[bytes, _Peer] = {}
        self.draining = False
        self.overloaded = False
        self.answers_hello = True
        self.drops_at_hello = True  # or leave it to the frontend to abort what it had here before
        self.added: list[Add] = []
        self.quarantined: dict[int, float] = {}  # seconds, as a frontend said them last
        self.violations: list[str] = []  # what a frontend must never do
        self.send: Callable[[bytes, bytes], None] = lambda peer, data: None

    @property
    def num_requests(self) -> int:
        return sum(len(peer.requests) for peer in self.peers.values())

    @property
    def load(self) -> Load:
        waiting = sum(running.num_prompt_tokens for peer in self.peers.values() for running in peer.requests.values())
        return Load(running_requests=self.num_requests, waiting_tokens=waiting)

    def receive(self, identity: bytes, data: bytes) -> None:
        """Take one message of the frontend of that identity."""
        message = decode_to_engine(data)
        if isinstance(message, Hello):
            if message.boot_id != identity:
                self.violations.append("the identity is not the boot id")
            if self.answers_hello:
                peer = self.peers.setdefault(identity, _Peer())
                if self.drops_at_hello:
                    peer.requests.clear()
                self.post(identity, self._welcome())
        elif identity not in self.peers:
            if isinstance(message, Add):
                output = RequestOutput(message.request_id, finish_reason=FinishReason.HANDED_OVER)
                self.post(identity, Outputs([output], self.load))
        elif isinstance(message, Add):
            self._add(identity, self.peers[identity], message)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.peers[identity].requests.pop(request_id, None)
        elif isinstance(message, Heartbeat):
            self.quarantined.update((each.fingerprint, each.seconds) for each in message.quarantined)
        elif isinstance(message, Goodbye):
            del self.peers[identity]

    def post(self, identity: bytes, message: ToFrontend) -> None:
        """Send one message."""
        self.send(identity, encode(message))

    def step(self) -> None:
        """One token for every request, in one message for each frontend."""
        for identity, peer in list(self.peers.items()):
            outputs = [self._generate(request_id, running) for request_id, running in peer.requests.items()]
            for output in outputs:
                if output.finish_reason is not None:
                    del peer.requests[output.request_id]
            if outputs:
                self.post(identity, Outputs(outputs, self.load))

    def heartbeat(self) -> None:
        for identity in list(self.peers):
            self.post(identity, Heartbeat(self.load))

    def forget_frontends(self) -> None:
        """Take every frontend for dead, as after a long silence."""
        self.peers.clear()

    def drain(self) -> None:
        """Say GOODBYE, and take nothing new."""
        self.draining = True
        for identity in list(self.peers):
            self.post(identity, Goodbye("it was told to stop"))

    def hand_over(self) -> None:
        """Give every request back."""
        for identity, peer in list(self.peers.items()):
            outputs = [RequestOutput(id_, finish_reason=FinishReason.HANDED_OVER) for id_ in peer.requests]
            peer.requests.clear()
            if outputs:
                self.post(identity, Outputs(outputs, self.load))

    def _welcome(self) -> Welcome:
        return Welcome(
            self.protocol_version, self.boot_id, "model", self.fingerprint, self.limits, self.load, self.draining
        )

    def _add(self, identity: bytes, peer: _Peer, add: Add) -> None:
        if add.request_id in peer.seen_ids:
            self.violations.append(f"request {add.request_id} came twice")
        peer.seen_ids.add(add.request_id)
        self.added.append(add)
        if self.overloaded or self.draining:
            reason = FinishReason.OVERLOADED if self.overloaded else FinishReason.HANDED_OVER
            self.post(identity, Outputs([RequestOutput(add.request_id, finish_reason=reason)], self.load))
            return
        prompt = unpack_token_ids(add.prompt_token_ids)
        output = unpack_token_ids(add.output_token_ids)
        peer.requests[add.request_id] = _Running(add, prompt + output, len(prompt))

    def _generate(self, request_id: int, running: _Running) -> RequestOutput:
        sampling = running.add.sampling
        output = RequestOutput(request_id)
        if running.is_first:
            running.is_first = False
            output.cached_tokens = len(self.added)
            if sampling.prompt_logprobs is not None:
                output.prompt_logprobs = [TokenLogprobs(id_, -1.0, 1) for id_ in running.token_ids[1:]]
        if len(running.token_ids) - running.num_prompt_tokens >= sampling.max_tokens:
            output.finish_reason = FinishReason.LENGTH
            return output
        token_id = next_token(running.token_ids, self.limits.vocab_size)
        running.token_ids.append(token_id)
        output.token_ids = [token_id]
        if sampling.logprobs is not None:
            output.logprobs = [TokenLogprobs(token_id, -1.0, 1)]
        if token_id == EOS_TOKEN_ID:
            output.finish_reason, output.stop_token_id = FinishReason.STOP, token_id
        elif len(running.token_ids) - running.num_prompt_tokens >= sampling.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        return output

"""Whether an engine can be used at all, and beside the others of its pool. `pool` asks, at every WELCOME."""

from collections.abc import Iterable

from services.frontend.engines.connection import EngineConnection
from shared.protocol import PROTOCOL_VERSION, Welcome


def protocol_refusal(welcome: Welcome) -> str | None:
    """Why this process cannot speak with the engine, or None."""
    if abs(welcome.protocol_version - PROTOCOL_VERSION) > 1:
        return (
            f"it speaks version {welcome.protocol_version} of the link's protocol and this frontend "
            f"{PROTOCOL_VERSION}; run releases that are next to each other"
        )
    limits = welcome.limits
    if min(limits.max_model_len, limits.vocab_size, limits.block_size) < 1:
        return (
            f"its limits make no sense: max_model_len {limits.max_model_len}, vocab_size {limits.vocab_size}, "
            f"block_size {limits.block_size}"
        )
    return None


def weights_refusal(model: str, welcome: Welcome, others: Iterable[EngineConnection]) -> str | None:
    """Why the engine must not serve the model beside the others, or None: a stream may move to any of them."""
    for other in others:
        if other.fingerprint != welcome.fingerprint:
            return (
                f"it serves other weights ({welcome.fingerprint}) than engine {other.address} "
                f"({other.fingerprint}) under the name {model!r}; it is used once no engine serves those"
            )
    return None

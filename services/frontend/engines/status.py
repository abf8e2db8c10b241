"""What a pool says of each of its engines to people: `GET /engines` and `tandem top`.

Read from the connections when somebody asks; nothing is kept for it.
"""

from dataclasses import dataclass

from services.frontend.engines.connection import EngineConnection
from services.frontend.engines.connection_state import ConnectionState


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine as this process sees it. The load is what the engine last said, and is nought before its WELCOME."""

    address: str
    state: str  # connecting, ready, draining, refused; leaving: discovery no longer names it
    boot_id: str  # hexadecimal: another one is another process; empty before the first WELCOME
    running_requests: int
    waiting_requests: int
    waiting_tokens: int  # prompt tokens that no step has computed yet
    kv_blocks_free: int
    kv_blocks_total: int
    block_size: int  # tokens
    tokens_per_second: float  # generated, over the last few seconds
    in_flight: int  # choices that this frontend has there


def status_of(connection: EngineConnection) -> EngineStatus:
    load, welcome = connection.load.reported, connection.welcome
    state = connection.state
    # Whether it still has something of this frontend's shows in in_flight.
    name = "draining" if state is ConnectionState.PARTED else state.name.lower()
    leaving = connection.retired and state is not ConnectionState.REFUSED
    return EngineStatus(
        address=connection.address,
        state="leaving" if leaving else name,
        boot_id="" if welcome is None else welcome.boot_id.hex(),
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        waiting_tokens=load.waiting_tokens,
        kv_blocks_free=load.free_blocks,
        kv_blocks_total=load.total_blocks,
        block_size=connection.block_size,
        tokens_per_second=load.tokens_per_second,
        in_flight=len(connection.in_flight),
    )

"""The life of a set of children: start them, say when all are ready, stop them at a signal or a failure for good."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable

from services.launcher.supervisor import Child, Supervisor, say


async def run_until_stopped(
    stop_order: list[list[Child]],
    until_ready: Callable[[], Awaitable[None]],
    announce: Callable[[], None],
    http_socket: socket.socket,
) -> int:
    """Run the children until SIGINT, SIGTERM or SIGHUP (returns 0), or until they cannot go on (1). A second signal
    kills them. `announce` is called once `until_ready` has returned. Closes `http_socket` when it stops."""
    supervisor = Supervisor(stop_order)
    stop_asked = asyncio.Event()
    stops = 0

    def on_signal() -> None:
        nonlocal stops
        stops += 1
        stop_asked.set()
        if stops > 1:
            supervisor.kill()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)

    stopped = asyncio.create_task(stop_asked.wait(), name="stop asked")
    ready = asyncio.ensure_future(until_ready())
    try:
        await supervisor.start()
        await asyncio.wait({ready, stopped, supervisor.failure}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and not supervisor.failure.done():
            ready.result()
            supervisor.everything_is_ready()
            announce()
            await asyncio.wait({stopped, supervisor.failure}, return_when=asyncio.FIRST_COMPLETED)
        if not supervisor.failure.done():
            say("stopping; running streams may finish (a second Ctrl-C ends them)")
    finally:
        for task in (ready, stopped):
            task.cancel()
        http_socket.close()  # else clients would wait for ever on a socket that no frontend accepts from
        await supervisor.stop()
        await asyncio.gather(ready, stopped, return_exceptions=True)
    if supervisor.failure.done():
        say(supervisor.failure.result())
        return 1
    say("stopped")
    return 0

"""TCP proxies between frontends and engines that can be cut, or swallow everything, as a network does.

They run on an event loop in a thread of their own, so that a test may stop and start processes beside them.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable

CHUNK_BYTES = 65_536


class LinkProxy:
    """One listening port that leads to `target`, a port of this machine. Every method is for any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: int) -> None:
        self.port = 0
        self._loop = loop
        self._target = target
        self._open = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        asyncio.run_coroutine_threadsafe(self._listen(), loop).result(10)

    def cut(self) -> None:
        """Close every connection; new ones are taken."""
        self._call(self._close_connections)

    def swallow(self) -> None:
        """From now on nothing gets through, and nobody is told: what a pulled cable looks like."""
        self._call(self._open.clear)

    def heal(self) -> None:
        """Bytes flow again: new connections work, those of before are closed."""
        self._call(lambda: (self._close_connections(), self._open.set()))

    def _call(self, action: Callable[[], object]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (action(), done.set()))
        assert done.wait(10)

    def _close_connections(self) -> None:
        for connection in self._connections:
            connection.cancel()

    async def _listen(self) -> None:
        self._open.set()
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._server = server

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        was_cut = True
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._open.wait()
                there, back = await asyncio.open_connection("127.0.0.1", self._target)
                with contextlib.closing(back):
                    pumps = [asyncio.ensure_future(self._pump(*ends)) for ends in ((reader, back), (there, writer))]
                    try:
                        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                        was_cut = False
                    finally:
                        for pump in pumps:
                            pump.cancel()
                        await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._connections.discard(task)
            if was_cut:
                # Not `close`, which would still deliver what lies in the buffer.
                writer.transport.abort()
            else:
                # One side has closed, and what it said before is still the other's.
                writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._open.wait()
            writer.write(data)
            await writer.drain()


class LinkProxies:
    """A context manager that runs the loop; `to(port)` makes a proxy."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def to(self, port: int) -> LinkProxy:
        return LinkProxy(self._loop, port)

    def close(self) -> None:
        async def cancel_all() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

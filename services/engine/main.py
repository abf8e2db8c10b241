"""One engine process, from its settings to its exit code: loads the model, starts the threads, watches over them."""

import gc
import json
import logging
import os
import signal
import threading
from pathlib import Path
from types import FrameType

from services.engine.core import EngineCore
from services.engine.executor.interface import Executor
from services.engine.link import Link
from services.engine.link_items import FromPeer
from services.engine.loop import EngineLoop
from services.engine.mailbox import Inbox
from services.engine.metrics import EngineMetrics, Serving
from services.engine.probes import Probes, ProbesBindError
from services.engine.router_socket import LinkBindError
from services.engine.settings import EngineSettings
from services.engine.timelines import Timelines
from shared.link_keys import LinkKeysError, read_link_keys
from shared.logging import adopt_libraries, configure_logging
from shared.model_source import ModelSourceError
from shared.protocol import new_boot_id
from shared.tracing import Tracing, TracingConfigError, start_tracing

logger = logging.getLogger(__name__)

MAX_INBOX_BYTES = 256 * 1024 * 1024
# How long the threads may take beyond the grace: a step that has begun, and what the link still has to send.
END_SECONDS = 10.0


class EngineStartError(Exception):
    """The engine cannot serve with these settings. The message is one line that says what to do."""


def run(settings: EngineSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code. To be called from the main thread.

    0: drained and ended. 1: could not start, or a thread failed or hung. A second signal, or one while the model
    loads, ends the process at once with 128 and the signal's number.
    """
    configure_logging(settings.log_level, "engine")
    engine = _Engine(settings)
    signal.signal(signal.SIGTERM, engine.on_signal)
    signal.signal(signal.SIGINT, engine.on_signal)
    try:
        return engine.run()
    except (
        EngineStartError,
        ModelSourceError,
        LinkBindError,
        LinkKeysError,
        ProbesBindError,
        TracingConfigError,
    ) as error:
        logger.critical("%s", error)
        return 1
    finally:
        engine.close()


class _Engine:
    """What the main thread owns. Everything else tells it of its end through `_ended`."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._serving: Serving | None = None
        self._loop: EngineLoop | None = None
        self._signal: int | None = None
        self._wake = threading.Event()
        self._failed = False
        self._tracing: Tracing | None = None
        self._metrics = EngineMetrics(settings, lambda: self._serving, self._not_ready)

    def run(self) -> int:
        settings = self._settings
        # Before the model, which takes minutes to load.
        self._tracing = start_tracing("engine")
        self._link_keys = None if settings.link_keys is None else read_link_keys(settings.link_keys, "engine")
        probes = Probes(
            settings.probe_host, settings.probe_port, self._unhealthy, self._not_ready, self._metrics.exposition
        )
        probes.start()
        if settings.ready_file is not None:
            settings.ready_file.unlink(missing_ok=True)  # an earlier run's would deceive
        try:
            executor = _load(settings)
            adopt_libraries()
            try:
                return self._serve(executor, probes.port)
            finally:
                executor.close()
        finally:
            probes.close()

    def close(self) -> None:
        if self._tracing is not None:
            self._tracing.close()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._loop is None or self._signal is not None:
            # Nothing to finish, or no patience: no lock, no flush that something else may hold.
            os.write(2, f"engine: ended at once by {signal.Signals(number).name}\n".encode())
            os._exit(128 + number)
        self._signal = number
        self._wake.set()

    def _serve(self, executor: Executor, probe_port: int) -> int:
        settings = self._settings
        core = EngineCore(executor, settings)
        if settings.max_model_len is not None and core.limits.max_model_len < settings.max_model_len:
            raise EngineStartError(
                f"--max-model-len {settings.max_model_len} does not fit into the KV cache of {executor.num_blocks} "
                f"blocks of {core.limits.block_size} tokens: lower it to {core.limits.max_model_len}, or give the "
                "cache more memory."
            )
        if core.limits.max_model_len < executor.description.limits.max_model_len:
            logger.warning(
                "The KV cache holds %d tokens: requests are limited to that, not to the model's %d",
                core.limits.max_model_len,
                executor.description.limits.max_model_len,
            )
        if settings.executor != "simulated":  # which has no streams that a client would miss
            core.pending_grammars.prepare()
        inbox: Inbox[FromPeer] = Inbox(MAX_INBOX_BYTES)
        loop = EngineLoop(core, inbox, settings, on_end=self._on_thread_end, on_step=self._metrics.observe_step)
        # Bound only now: a frontend that connects while the model loads is refused, and tries again, instead of
        # taking an engine that accepts and then says nothing for one that hangs.
        link = Link(
            settings,
            executor.description,
            core.limits,
            new_boot_id(),
            inbox,
            is_alive=lambda: self._unhealthy() is None,
            on_end=self._on_thread_end,
            keys=self._link_keys,
        )
        if self._tracing is not None:
            core.timelines = Timelines(self._tracing.samples)
            link.export_spans = self._tracing.export
        # What was loaded stays: the garbage collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        link.start(core.load())
        loop.start(link)
        self._loop = loop
        self._serving = Serving(core, link, inbox)
        logger.info(
            "Serving %s: %d KV blocks of %d tokens, link on port %d, probes on port %d",
            executor.description.name,
            executor.num_blocks,
            core.limits.block_size,
            link.port,
            probe_port,
        )
        if settings.ready_file is not None:
            _write_ready_file(settings.ready_file, {"link_port": link.port, "probe_port": probe_port})
        try:
            return self._watch(loop, link)
        finally:
            # The process would wait for all that are still to be compiled before it ends.
            core.pending_grammars.close()

    def _watch(self, loop: EngineLoop, link: Link) -> int:
        """Wait for a signal or for the end of a thread, and take everything down in order."""
        self._wake.wait()
        if self._failed or self._signal is None:
            link.stop(linger=0.0)
            return 1
        logger.info("%s: draining", signal.Signals(self._signal).name)
        loop.drain()
        drained = loop.join(self._settings.shutdown_grace + END_SECONDS)
        if not drained:
            logger.critical("The running step does not end; the engine ends without it")
        # Where requests are left, their frontends would not say GOODBYE.
        link.stop(linger=END_SECONDS / 2 if drained else 0.0)
        stopped = link.join(END_SECONDS)
        if not stopped:
            logger.critical("The link's thread does not end; the engine ends without it")
        if drained and stopped and not self._failed:
            logger.info("Drained; the engine ends")
            return 0
        return 1

    def _on_thread_end(self, error: BaseException | None) -> None:
        if error is not None:
            self._failed = True
            self._wake.set()

    def _unhealthy(self) -> str | None:
        if self._failed:
            return "a thread of the engine failed"
        # While the model loads, the process is alive and not ready.
        if self._loop is not None and self._signal is None:
            seconds = self._loop.seconds_since_progress
            if seconds > self._settings.step_timeout:
                return f"a step has run for {seconds:.0f} s"
        return None

    def _not_ready(self) -> str | None:
        if self._serving is None:
            return "the model is being loaded"
        if self._signal is not None:
            return "draining"
        return self._unhealthy()


def _load(settings: EngineSettings) -> Executor:
    logger.info("Loading %s", settings.model or "no model")
    try:
        if settings.executor == "simulated":
            from services.engine.executor.simulated import SimulatedExecutor

            return SimulatedExecutor(settings)
        # Imports torch: not where it is not needed.
        from services.engine.executor.torch_executor import TorchExecutor

        return TorchExecutor(settings)
    except ModelSourceError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        # These are raised with a message for people; of any other the line alone would not tell where to look.
        expected = isinstance(error, (ValueError, OSError, ImportError))
        logger.log(logging.DEBUG if expected else logging.ERROR, "Loading failed here:", exc_info=True)
        raise EngineStartError(f"The model {settings.model} could not be loaded: {reason}") from error


def _write_ready_file(path: Path, content: dict[str, int]) -> None:
    # Whoever waits for the file must never see half of it.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content))
        temporary.replace(path)
    except OSError as error:
        raise EngineStartError(f"--ready-file {path} cannot be written: {error}") from error

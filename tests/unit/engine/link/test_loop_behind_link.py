"""The engine's loop behind its link, with real sockets: what frontends send and do, and what is left of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_harness import LinkFrontend, make_add, make_settings, wait_until, write_model

from services.engine.core import EngineCore
from services.engine.executor.simulated import SimulatedExecutor
from services.engine.link import Link
from services.engine.link_items import FromPeer
from services.engine.loop import EngineLoop
from services.engine.mailbox import Inbox
from services.engine.settings import EngineSettings
from shared.protocol import Abort, FinishReason, Heartbeat, Outputs, Quarantined, pack_token_ids
from shared.quarantine import prompt_fingerprint
from shared.structured_output import JSON_OBJECT
from tests.grammar_harness import constrain


def settings_of(tmp_path: Path) -> EngineSettings:
    return make_settings(write_model(tmp_path / "model"), heartbeat_interval=0.05, simulated_step_ms=2.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[EngineCore, Link]]:
    settings = settings_of(tmp_path)
    with running(SimulatedExecutor(settings), settings) as engine:
        yield engine


@contextmanager
def running(executor: SimulatedExecutor, settings: EngineSettings) -> Iterator[tuple[EngineCore, Link]]:
    core = EngineCore(executor, settings)
    inbox: Inbox[FromPeer] = Inbox(1 << 20)
    ended: list[BaseException | None] = []
    loop = EngineLoop(core, inbox, settings, on_end=ended.append, on_step=lambda seconds: None)
    link = Link(settings, executor.description, core.limits, b"engine", inbox, lambda: True, ended.append)
    link.start(core.load())
    loop.start(link)
    yield core, link
    loop.drain()
    assert loop.join(30)
    link.stop(linger=0.1)
    assert link.join(10)
    assert ended == [None, None]


def all_free(core: EngineCore) -> bool:
    return core.num_requests == 0 and core.num_free_blocks == core.num_blocks


def test_requests_of_two_frontends_with_equal_ids(engine: tuple[EngineCore, Link]) -> None:
    core, link = engine
    with LinkFrontend(link.port) as one, LinkFrontend(link.port) as two:
        one.hello()
        two.hello()
        one.send(make_add(1, [5, 6], max_tokens=5))
        two.send(make_add(1, [7, 8], max_tokens=7))
        assert len(one.collect([1])[1].token_ids) == 5
        assert len(two.collect([1])[1].token_ids) == 7
        wait_until(lambda: all_free(core), "everything is free")


def test_an_abort_is_acted_on_and_the_rest_goes_on(engine: tuple[EngineCore, Link]) -> None:
    core, link = engine
    with LinkFrontend(link.port) as frontend:
        frontend.hello()
        frontend.send(make_add(1, [5], max_tokens=200))
        frontend.send(make_add(2, [5], max_tokens=30))
        frontend.receive_a(Outputs)
        frontend.send(Abort([1, 77]))
        assert len(frontend.collect([2])[2].token_ids) >= 28
        wait_until(lambda: all_free(core), "everything is free")
        assert core.statistics.finished["abort"] == 1


def test_an_abort_right_behind_its_add_leaves_no_work(engine: tuple[EngineCore, Link]) -> None:
    core, link = engine
    with LinkFrontend(link.port) as frontend:
        frontend.hello()
        for request_id in range(50):
            frontend.send(make_add(request_id, [5], max_tokens=200))
            frontend.send(Abort([request_id]))
        wait_until(lambda: core.statistics.finished.get("abort") == 50, "all are aborted")
        assert all_free(core)


def test_a_vanished_frontend_leaves_no_work(engine: tuple[EngineCore, Link]) -> None:
    core, link = engine
    frontend = LinkFrontend(link.port)
    frontend.hello()
    for request_id in range(5):
        frontend.send(make_add(request_id, [5], max_tokens=250))
    frontend.receive_a(Outputs)
    frontend.close()
    wait_until(lambda: all_free(core), "everything is free", timeout=5)
    assert core.statistics.finished == {"abort": 5}


def test_a_frontend_that_says_hello_again_starts_over(engine: tuple[EngineCore, Link]) -> None:
    core, link = engine
    with LinkFrontend(link.port) as frontend:
        frontend.hello()
        frontend.send(make_add(1, [5] * 9, max_tokens=250))
        frontend.receive_a(Outputs)
        frontend.hello()
        wait_until(lambda: all_free(core), "the old request is gone")
        stored: set[int] = set()
        until = time.monotonic() + 10
        while stored != set(core.stored_block_hashes()):
            assert time.monotonic() < until
            stored |= set(frontend.receive_a(Heartbeat).stored_block_hashes)
        assert len(stored) >= 2


def test_what_one_frontend_puts_into_quarantine_is_refused_to_all(engine: tuple[EngineCore, Link]) -> None:
    _, link = engine
    with LinkFrontend(link.port) as one, LinkFrontend(link.port) as two:
        one.hello()
        two.hello()
        one.send(Heartbeat(quarantined=[Quarantined(prompt_fingerprint(pack_token_ids([5, 6])), 60.0)]))
        one.send(make_add(1, [5, 6], max_tokens=3))
        assert one.collect([1])[1].finish_reason is FinishReason.ERROR
        two.send(make_add(1, [5, 6], max_tokens=3))
        assert two.collect([1])[1].finish_reason is FinishReason.ERROR
        two.send(make_add(2, [6, 6], max_tokens=3))
        assert two.collect([2])[2].finish_reason is FinishReason.LENGTH


def test_a_grammar_that_is_being_made_is_nothing_left_over(engine: tuple[EngineCore, Link]) -> None:
    core, link = engine
    with LinkFrontend(link.port) as frontend:
        frontend.hello()
        for number in range(1, 5, 2):
            frontend.send(make_add(number, [5], max_tokens=3))
            frontend.collect([number])
            # The engine has just become idle, and looks whether anything is left.
            frontend.send(make_add(number + 1, [5], max_tokens=3, structured_output=constrain(JSON_OBJECT)))
            frontend.collect([number + 1])
        wait_until(lambda: all_free(core), "everything is free")


class ExecutorWithMemory(SimulatedExecutor):
    """Has so many pieces of memory to take, and counts those that it took while there was work."""

    def __init__(self, settings: EngineSettings, pieces: int) -> None:
        super().__init__(settings)
        self.pieces = pieces
        self.taken_at_work = 0
        self.core: EngineCore | None = None

    def take_memory(self) -> bool:
        if self.core is not None:
            self.taken_at_work += self.core.has_work
        self.pieces -= 1
        return self.pieces > 0


def test_an_idle_engine_takes_all_its_memory_and_then_asks_no_more(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    executor = ExecutorWithMemory(settings, pieces=1000)
    with running(executor, settings) as (_, link), LinkFrontend(link.port) as frontend:
        frontend.hello()
        wait_until(lambda: executor.pieces == 0, "all is taken")
        for _ in range(3):
            frontend.receive_a(Heartbeat)  # the loop turns on
        assert executor.pieces == 0


def test_requests_go_before_memory_that_is_left_to_take(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    executor = ExecutorWithMemory(settings, pieces=10**9)
    with running(executor, settings) as (core, link), LinkFrontend(link.port) as frontend:
        executor.core = core
        frontend.hello()
        for number in range(1, 6):
            frontend.send(make_add(number, [5], max_tokens=20))
            assert len(frontend.collect([number])[number].token_ids) == 20
            left = executor.pieces
            wait_until(lambda left=left: executor.pieces < left, "it takes memory again")
        frontend.receive_a(Heartbeat)  # it still says how it is
    assert executor.taken_at_work == 0

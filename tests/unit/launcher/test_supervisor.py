"""The launcher's children, with small Python programs in the services' place: start, death, restart, stop."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from services.launcher import supervisor as supervisor_module
from services.launcher.supervisor import Child, Supervisor, describe_exit

WAIT_FOR_EVER = "import signal; signal.pause()"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "MAX_BACKOFF", 0.01)


def child(tmp_path: Path, program: str, name: str = "engine 0", grace: float = 10.0) -> Child:
    # The ready file is named to the program, which writes it once it is up.
    ready_file = tmp_path / name
    command = [sys.executable, "-S", "-c", f"READY = {str(ready_file)!r}\n{program}"]
    return Child(name, command, dict(os.environ), ready_file, grace)


def drive(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_child_that_ends_before_all_is_ready_ends_the_whole(tmp_path: Path) -> None:
    async def test() -> None:
        broken = child(tmp_path, "raise SystemExit(3)")
        healthy = child(tmp_path, WAIT_FOR_EVER, "frontend 0")
        supervisor = Supervisor([[healthy], [broken]])
        await supervisor.start()
        assert "engine 0 ended with exit code 3 before it was ready" in await supervisor.failure
        await supervisor.stop()
        assert not healthy.running

    drive(test)


def test_a_child_that_dies_later_is_started_again_until_it_has_died_too_often(tmp_path: Path) -> None:
    async def test() -> None:
        dying = child(tmp_path, "open(READY, 'w').close()\n" + WAIT_FOR_EVER)
        supervisor = Supervisor([[dying]])
        await supervisor.start()
        supervisor.everything_is_ready()
        for _ in range(supervisor_module.MAX_RESTARTS + 1):
            await until(lambda: dying.running and dying.ready_file.exists())
            assert not supervisor.failure.done()
            assert dying.process is not None
            process = dying.process
            process.kill()
            await process.wait()
            await until(lambda process=process: dying.process is not process or supervisor.failure.done())
        assert "was killed by SIGKILL" in await supervisor.failure
        await supervisor.stop()

    drive(test)


def test_stopping_asks_first_and_in_order(tmp_path: Path) -> None:
    async def test() -> None:
        log = tmp_path / "log"
        program = f"""
import signal, sys
def leave(*_):
    open({str(log)!r}, "a").write(NAME + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open(READY, "w").close()
signal.pause()
"""
        first = child(tmp_path, "NAME = 'frontend'\n" + program, "frontend 0")
        second = child(tmp_path, "NAME = 'engine'\n" + program, "engine 0")
        supervisor = Supervisor([[first], [second]])
        await supervisor.start()
        await until(lambda: first.ready_file.exists() and second.ready_file.exists())
        await supervisor.stop()
        assert log.read_text() == "frontend\nengine\n"
        assert not supervisor.failure.done()

    drive(test)


def test_one_that_does_not_listen_is_killed_with_what_it_started(tmp_path: Path) -> None:
    async def test() -> None:
        grandchild = tmp_path / "grandchild"
        stubborn = child(
            tmp_path,
            f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
started = subprocess.Popen([sys.executable, "-S", "-c", {WAIT_FOR_EVER!r}])
open({str(grandchild)!r}, "w").write(str(started.pid))
open(READY, "w").close()
while True:
    signal.pause()
""",
            grace=0.2,
        )
        supervisor = Supervisor([[stubborn]])
        await supervisor.start()
        await until(stubborn.ready_file.exists)
        await supervisor.stop()
        assert not stubborn.running
        pid = int(grandchild.read_text())
        await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)

    drive(test)


def test_children_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"""
import asyncio, os, sys
from pathlib import Path
from services.launcher.supervisor import Child, Supervisor

CHILD = '''
from services.launcher.parent_death import end_with_parent
end_with_parent()
open("{tmp_path}/up", "w").close()
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    signal.pause()
'''

async def main():
    child = Child("engine 0", [sys.executable, "-c", CHILD], dict(os.environ), Path("{tmp_path}/ready"), 10.0)
    await Supervisor([[child]]).start()
    while not os.path.exists("{tmp_path}/up"):
        await asyncio.sleep(0.01)
    Path("{pids}.partial").write_text(str(child.process.pid))
    os.rename("{pids}.partial", "{pids}")
    await asyncio.sleep(60)

asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        drive(lambda: until(pids.exists))
        orphan = psutil.Process(int(pids.read_text()))
        launcher.kill()
        launcher.wait()
        orphan.wait(timeout=10)
    finally:
        launcher.kill()
        launcher.wait()


def test_an_exit_is_told_in_words() -> None:
    assert describe_exit(1) == "ended with exit code 1"
    assert describe_exit(-9) == "was killed by SIGKILL"


def test_a_child_that_gives_no_sign_of_life_is_killed_and_one_that_does_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor_module, "HANG_POLL_INTERVAL", 0.02)
    lively = "import os, pathlib, time\npathlib.Path(READY).touch()\nwhile True: os.utime(READY); time.sleep(0.01)"

    async def test() -> None:
        hung = child(tmp_path, f"import pathlib\npathlib.Path(READY).touch()\n{WAIT_FOR_EVER}", "frontend 0")
        well = child(tmp_path, lively, "frontend 1")
        slow = child(tmp_path, WAIT_FOR_EVER, "frontend 2")  # not ready yet: it is not judged
        ended: list[int] = []
        hung.on_end = ended.append
        hung.hang_timeout = well.hang_timeout = slow.hang_timeout = 2.0
        supervisor = Supervisor([[hung, well, slow]])
        await supervisor.start()
        supervisor.everything_is_ready()
        assert hung.process is not None
        first = hung.process.pid
        await until(lambda: hung.process is not None and hung.process.pid != first)
        assert ended == [first]
        assert well.running
        assert not well.restarts
        assert slow.running
        assert not slow.restarts
        await supervisor.stop()

    drive(test)
    assert "frontend 0 has given no sign of life for 2 s: it is killed" in capfd.readouterr().err

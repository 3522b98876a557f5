"""Start, restart and stop, with real processes that stand in for SGLang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import sglang_ext.cluster.supervisor as supervisor_module
from sglang_ext.cluster.config import LivenessSettings
from sglang_ext.cluster.process_tree import send_signal, session_processes
from sglang_ext.cluster.supervisor import ProgramPhase, StartError, SupervisedProgram, Supervisor
from support.stand_in_cluster import TESTS, is_alive, stand_in_plan, stand_in_supervisor, wait_until_gone


class Events:
    """A listener that keeps what it was notified of."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, member: SupervisedProgram, line: str) -> None:
        self.lines.append((member.program.name, line))

    def of(self, name: str) -> list[str]:
        return [line for who, line in self.lines if who == name]


def tick_until(supervisor: Supervisor, done: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_s, [(m.program.name, m.phase) for m in supervisor.members]
        supervisor.tick()
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins are up within a tenth of a second."""
    monkeypatch.setattr(supervisor_module, "PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr(supervisor_module, "TICK_S", 0.02)


def pids_of(supervisor: Supervisor) -> list[int]:
    return [member.pid for member in supervisor.members if member.pid is not None]


@pytest.mark.slow
def test_all_become_ready_and_all_end(tmp_path: Path) -> None:
    events = Events()
    supervisor = stand_in_supervisor(stand_in_plan({"long-0": ["--say", "hello log"]}), tmp_path, listener=events)
    assert supervisor.start()
    pids = pids_of(supervisor)
    assert len(pids) == 4
    names = [name for name, line in events.lines if line.startswith("started")]
    assert names[0] == "router"  # together with its instances
    ready = [name for name, line in events.lines if line.startswith("ready")]
    assert sorted(ready) == ["decode-0", "long-0", "router", "short-0"]
    supervisor.stop()
    assert wait_until_gone(pids, 0) == []
    assert {member.phase for member in supervisor.members} == {ProgramPhase.STOPPED}
    stops = [name for name, line in events.lines if line == "stopped"]
    assert stops[0] == "router"  # it drains before the instances go
    assert (tmp_path / "long-0.log").read_text() == "hello log\n"
    assert sorted(log.name for log in tmp_path.iterdir()) == [
        "decode-0.log",
        "long-0.log",
        "router.log",
        "short-0.log",
    ]


@pytest.mark.slow
def test_starts_are_bounded(tmp_path: Path) -> None:
    most = 0
    supervisor = stand_in_supervisor(stand_in_plan(start_parallel=1), tmp_path)

    def count() -> None:
        nonlocal most
        most = max(most, sum(member.phase is ProgramPhase.STARTING for member in supervisor.backends))

    assert supervisor.start(count)
    supervisor.stop()
    assert most == 1


@pytest.mark.slow
def test_death_during_start_stops_everything_and_shows_the_log(tmp_path: Path) -> None:
    plan = stand_in_plan({"long-0": ["--say", "no such model", "--die-after-s", "0.3", "--unhealthy"]})
    supervisor = stand_in_supervisor(plan, tmp_path)
    with pytest.raises(StartError, match="long-0 exited with status 3 during start") as caught:
        supervisor.start()
    assert caught.value.log_lines == ["no such model"]
    pids = pids_of(supervisor)
    supervisor.stop()
    assert wait_until_gone(pids, 0) == []


@pytest.mark.slow
def test_an_instance_that_never_gets_healthy(tmp_path: Path) -> None:
    supervisor = stand_in_supervisor(stand_in_plan({"short-0": ["--unhealthy"]}), tmp_path, start_timeout_s=1.0)
    with pytest.raises(StartError, match=r"short-0 was not healthy within 1 s"):
        supervisor.start()
    supervisor.stop()


@pytest.mark.slow
def test_cancelled_start(tmp_path: Path) -> None:
    plan = stand_in_plan({"short-0": ["--unhealthy"]})
    supervisor = Supervisor(
        plan,
        tmp_path,
        start_timeout_s=60,
        drain_s=1,
        grace_s=1,
        restarts=True,
        liveness=LivenessSettings(),
        listener=lambda member, line: None,
        is_cancelled=lambda: any(m.phase is ProgramPhase.READY for m in supervisor.backends),
    )
    assert supervisor.start() is False
    pids = pids_of(supervisor)
    supervisor.stop()
    assert wait_until_gone(pids, 0) == []


@pytest.mark.slow
def test_a_killed_instance_comes_back_at_its_address(tmp_path: Path) -> None:
    events = Events()
    supervisor = stand_in_supervisor(stand_in_plan({"decode-0": ["--child"]}), tmp_path, listener=events)
    assert supervisor.start()
    decode = supervisor.backends[2]
    before = decode.pid
    assert before is not None
    left_behind = [pid for pid in session_processes(before) if pid != before]
    assert len(left_behind) == 1
    os.kill(before, signal.SIGKILL)
    tick_until(supervisor, lambda: decode.phase is ProgramPhase.BACKING_OFF)
    assert not is_alive(left_behind[0])  # nothing of the dead instance holds its port or memory
    tick_until(supervisor, lambda: decode.phase is ProgramPhase.READY)
    assert decode.pid != before
    assert decode.restarts == 1
    assert "was ended by SIGKILL; starting again in 1 s" in events.of("decode-0")
    supervisor.stop()


QUICK = LivenessSettings(interval_s=0.1, timeout_s=0.5, misses=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode-0", pytest.param("router", marks=pytest.mark.full)])
def test_a_frozen_program_is_killed_and_comes_back(tmp_path: Path, name: str) -> None:
    events = Events()
    supervisor = stand_in_supervisor(stand_in_plan({name: ["--child"]}), tmp_path, listener=events, liveness=QUICK)
    assert supervisor.start()
    (frozen,) = [member for member in supervisor.members if member.program.name == name]
    before = frozen.pid
    assert before is not None
    everything = session_processes(before)
    send_signal(everything, signal.SIGSTOP)
    tick_until(supervisor, lambda: frozen.phase is ProgramPhase.BACKING_OFF)
    assert wait_until_gone(everything, 0) == []
    assert "answered nothing in 2 checks of 0.5 s, and was killed; starting again in 1 s" in events.of(name)
    tick_until(supervisor, lambda: frozen.phase is ProgramPhase.READY)
    assert frozen.pid != before
    supervisor.stop()


@pytest.mark.full
def test_a_restart_that_hangs_times_out_and_is_tried_again(tmp_path: Path) -> None:
    marker = tmp_path / "hang"
    events = Events()
    plan = stand_in_plan({"decode-0": ["--stop-when-exists", str(marker)]})
    supervisor = stand_in_supervisor(plan, tmp_path / "logs", listener=events)
    assert supervisor.start()
    supervisor._start_timeout_s = 2.0  # for restarts alone: a loaded machine may take longer for all at once
    decode = supervisor.backends[2]
    marker.touch()
    assert decode.pid is not None
    os.kill(decode.pid, signal.SIGKILL)
    tick_until(supervisor, lambda: decode.phase is ProgramPhase.READY and decode.restarts >= 2)
    assert "was not healthy within 2 s, and was killed; starting again in 2 s" in events.of("decode-0")
    supervisor.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("pause_s", "misses"), [(1.2, 4), pytest.param(2.5, 0, marks=pytest.mark.full)])
def test_a_program_that_is_slow_is_left_alone(tmp_path: Path, pause_s: float, misses: int) -> None:
    """Fewer misses than asked for, or none that count."""
    liveness = LivenessSettings(interval_s=0.1, timeout_s=0.5, misses=misses)
    supervisor = stand_in_supervisor(stand_in_plan(), tmp_path, liveness=liveness)
    assert supervisor.start()
    before = pids_of(supervisor)
    for _ in range(2):
        send_signal(before, signal.SIGSTOP)
        end_s = time.monotonic() + pause_s
        while time.monotonic() < end_s:
            supervisor.tick()
            time.sleep(0.02)
        send_signal(before, signal.SIGCONT)
        tick_until(supervisor, lambda: all(member.misses == 0 for member in supervisor.members))
    assert pids_of(supervisor) == before
    supervisor.stop()


@pytest.mark.slow
def test_restart_never(tmp_path: Path) -> None:
    supervisor = stand_in_supervisor(stand_in_plan(), tmp_path, restarts=False)
    assert supervisor.start()
    short = supervisor.backends[0]
    assert short.pid is not None
    os.kill(short.pid, signal.SIGKILL)
    tick_until(supervisor, lambda: short.phase is ProgramPhase.STOPPED)
    supervisor.tick()
    assert short.phase is ProgramPhase.STOPPED
    supervisor.stop()


@pytest.mark.slow
def test_a_stubborn_instance_is_killed_after_the_grace(tmp_path: Path) -> None:
    events = Events()
    plan = stand_in_plan({"short-0": ["--ignore-term"]})
    supervisor = stand_in_supervisor(plan, tmp_path, listener=events, grace_s=0.5)
    assert supervisor.start()
    began_s = time.monotonic()
    supervisor.stop()
    assert 0.5 <= time.monotonic() - began_s < 5
    assert events.of("short-0")[-1] == "killed"
    assert events.of("long-0")[-1] == "stopped"


@pytest.mark.slow
def test_hurry_cuts_the_grace_short(tmp_path: Path) -> None:
    plan = stand_in_plan({"router": ["--slow-term-s", "60"], "short-0": ["--ignore-term"]})
    supervisor = stand_in_supervisor(plan, tmp_path, grace_s=60)
    assert supervisor.start()
    pids = pids_of(supervisor)
    began_s = time.monotonic()
    supervisor.stop(hurry=lambda: time.monotonic() - began_s > 0.3)
    assert time.monotonic() - began_s < 10
    assert wait_until_gone(pids, 0) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_nothing_outlives_a_supervisor_that_dies(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "support.stand_in_cluster", str(tmp_path / "logs")]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        own, *programs = map(int, words)
        processes = [pid for program in programs for pid in session_processes(program)]
        assert len(processes) == 4 + 2  # two have a child
        os.kill(own, number)
    left = wait_until_gone(processes, 15)
    send_signal(left, signal.SIGKILL)
    assert left == []


@pytest.mark.full
def test_a_killed_watchdog_is_replaced_and_knows_every_session(tmp_path: Path) -> None:
    supervisor = stand_in_supervisor(stand_in_plan({"short-0": ["--child"]}), tmp_path)
    assert supervisor.start()
    processes = [pid for member_pid in pids_of(supervisor) for pid in session_processes(member_pid)]
    first = supervisor._watchdog
    os.kill(first.pid, signal.SIGKILL)
    tick_until(supervisor, lambda: supervisor._watchdog is not first)
    # Closing the new one's input is what a dead supervisor looks like to it.
    supervisor._watchdog.close()
    assert wait_until_gone([pid for pid in processes if pid not in pids_of(supervisor)], 0) == []
    assert all(member.running is not None and member.running.exit_status is not None for member in supervisor.members)

"""Starts a cluster's programs, keeps them running, and ends them.

One thread owns everything; only health and liveness probes run on others, since a program that is busy may leave a
connection waiting.

A program that is ready and answers nothing any more is frozen: it is killed and started again like a program that
died. So is a program that was started again and does not become ready in time.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from sglang_ext.cluster.config import LivenessSettings
from sglang_ext.cluster.fork_client import IMPORT_TIMEOUT_S, ForkClient
from sglang_ext.cluster.plan import ClusterPlan, Program
from sglang_ext.cluster.process import RunningProgram, answers_anything, answers_ok, describe_exit, log_tail
from sglang_ext.cluster.process_tree import CLUSTER_ID_VARIABLE, Watchdog, cluster_processes, end_processes

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
STEADY_AFTER_S = 60.0  # an instance that served this long starts again with the first delay


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """Failures in a row of one instance."""

    failures: int = 0

    def after_death(self, served_s: float | None) -> RestartRecord:
        """Return the record after a death; `served_s` is how long it had been healthy, None if never."""
        if served_s is not None and served_s >= STEADY_AFTER_S:
            return RestartRecord(1)
        return RestartRecord(self.failures + 1)

    @property
    def delay_s(self) -> float:
        """Wait before the next start: doubled with every failure in a row, within bounds."""
        # The exponent is bounded too: a float overflows after a thousand doublings.
        return min(FIRST_DELAY_S * 2.0 ** min(max(self.failures - 1, 0), 16), LONGEST_DELAY_S)


TICK_S = 0.1
PROBE_INTERVAL_S = 0.5
LOG_TAIL_LINES = 20
REFUSALS = (2, 3)  # exit statuses of `sglang-ext worker`: of its own options, and of an engine


class ProgramPhase(StrEnum):
    """Describes where a program is in its life."""

    WAITING = "waiting"  # for its turn to start
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"  # died, will be started again
    STOPPING = "stopping"
    STOPPED = "stopped"


class RefusedArgumentsError(ValueError):
    """An engine refuses its arguments, with one line that names the option."""

    def __init__(self, program: Program, problem: str) -> None:
        super().__init__(f"{program.name}: {problem}")
        self.program = program
        self.problem = problem


class StartError(RuntimeError):
    """The cluster did not come up; `log_lines` are the last lines of the log of the program that failed."""

    def __init__(self, message: str, log: Path, log_lines: list[str]) -> None:
        super().__init__(message)
        self.log = log
        self.log_lines = log_lines


@dataclass(slots=True)
class SupervisedProgram:
    """A program and what became of it."""

    program: Program
    log: Path
    phase: ProgramPhase = ProgramPhase.WAITING
    running: RunningProgram | None = None
    started_s: float = 0.0  # of the latest start
    ready_s: float | None = None  # None: not healthy since the latest start
    start_again_s: float = 0.0
    restarts: int = 0
    record: RestartRecord = field(default_factory=RestartRecord)
    probe: Future[bool] | None = None
    next_probe_s: float = 0.0
    misses: int = 0  # liveness probes in a row without an answer

    @property
    def pid(self) -> int | None:
        return self.running.pid if self.running is not None else None


Listener = Callable[[SupervisedProgram, str], None]


class Supervisor:
    """A cluster's programs. Call `start`, then `tick` often, then `stop`; or `stop` at any time.

    `listener` hears of every change, with a line that says what happened. `is_cancelled` is asked while
    `start` waits. Times are of `time.monotonic`.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        logs: Path,
        *,
        start_timeout_s: float,
        drain_s: float,
        grace_s: float,
        restarts: bool,
        liveness: LivenessSettings,
        listener: Listener,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.backends = [SupervisedProgram(program, logs / f"{program.name}.log") for program in plan.backends]
        self.router = SupervisedProgram(plan.router, logs / f"{plan.router.name}.log")
        self._start_parallel = plan.start_parallel
        self._start_timeout_s = start_timeout_s
        self._drain_s = drain_s
        self._grace_s = grace_s
        self._restarts = restarts
        self._liveness = liveness
        self._listener = listener
        self._is_cancelled = is_cancelled
        self._cluster_id = uuid.uuid4().hex
        self._watchdog = Watchdog(self._cluster_id)
        self._forks: ForkClient | None = None
        self._execute_after_s = 0.0  # instances are executed where the fork server has no imports by then
        self._fork_environment = plan.fork_environment
        self._probes = ThreadPoolExecutor(max_workers=max(8, len(self.members)), thread_name_prefix="health")
        logs.mkdir(parents=True, exist_ok=True)
        for member in self.members:
            member.log.unlink(missing_ok=True)  # one log is one run
        self._logs = logs
        self._fork_log = logs / "fork-server.log"
        self._fork_log.unlink(missing_ok=True)

    @property
    def members(self) -> list[SupervisedProgram]:
        """Every program, the router last."""
        return [*self.backends, self.router]

    def start(self, on_tick: Callable[[], None] = lambda: None) -> bool:
        """Start everything; return whether all are ready (False: cancelled).

        Raises StartError as soon as one dies or takes too long; the caller then calls `stop`.
        """
        self._start_fork_server()
        self._launch(self.router, time.monotonic())  # it is ready when its instances are
        while not self._all_ready():
            if self._is_cancelled():
                return False
            now_s = time.monotonic()
            starting = sum(member.phase is ProgramPhase.STARTING for member in self.backends)
            for member in self.backends:
                if (
                    member.phase is ProgramPhase.WAITING
                    and starting < self._start_parallel
                    and self._can_launch(member)
                ):
                    self._launch(member, now_s)
                    starting += 1
            for member in self.members:
                self._check_start(member, now_s)
            on_tick()
            time.sleep(TICK_S)
        return True

    def check(self, checks: Sequence[Program], on_tick: Callable[[], None] = lambda: None) -> bool:
        """Run programs that check arguments and end; return whether all have passed (False: cancelled).

        Raises RefusedArgumentsError for a program that refuses, StartError for one that fails otherwise; the caller
        then calls `stop`.
        """
        if not checks:
            return True
        self._start_fork_server()
        members = [SupervisedProgram(program, self._logs / f"{program.name}.log") for program in checks]
        for member in members:
            member.log.unlink(missing_ok=True)
        deadline_s = time.monotonic() + self._start_timeout_s
        while any(member.phase is not ProgramPhase.READY for member in members):
            if self._is_cancelled():
                return False
            for member in members:
                if member.running is None and self._can_launch(member):
                    member.running = RunningProgram(member.program, member.log, self._cluster_id, self._forks)
                    self._inform_watchdog(member.running.pid)
                elif member.running is not None and member.phase is ProgramPhase.WAITING:
                    self._check_end(member, member.running)
            if time.monotonic() > deadline_s:
                late = next(member for member in members if member.phase is not ProgramPhase.READY)
                raise self._start_error(late, f"{late.program.name} did not end within {self._start_timeout_s:g} s")
            on_tick()
            time.sleep(TICK_S)
        return True

    def _check_end(self, member: SupervisedProgram, running: RunningProgram) -> None:
        status = running.exit_status
        if status in REFUSALS:
            raise RefusedArgumentsError(member.program, "".join(log_tail(member.log, 1)))
        if status:
            raise self._start_error(member, f"{member.program.name} {describe_exit(status)}")
        if status == 0:
            member.phase = ProgramPhase.READY
            self._clear(member, running)

    def _start_fork_server(self) -> None:
        if self._fork_environment is None or self._forks is not None:
            return
        environment = {**os.environ, **self._fork_environment, CLUSTER_ID_VARIABLE: self._cluster_id}
        self._forks = ForkClient(self._fork_log, environment)
        self._execute_after_s = time.monotonic() + min(IMPORT_TIMEOUT_S, self._start_timeout_s / 2)
        self._inform_watchdog(self._forks.process.pid)
        for member in self.backends:
            if member.program.role is not None:
                self._listener(member, "waits until SGLang has been imported, once for all instances")

    def tick(self) -> None:
        """Look once at every program: note deaths, start again what is due, note recoveries."""
        now_s = time.monotonic()
        for member in self.members:
            running = member.running
            if running is not None and running.exit_status is not None:
                self._record_death(member, running, now_s, describe_exit(running.exit_status))
            elif self._is_due(member, now_s) and self._can_launch(member):
                member.restarts += 1
                self._launch(member, now_s)
            elif member.phase is ProgramPhase.STARTING:
                self._probe(member, now_s)
                if running is not None and member.phase is ProgramPhase.STARTING and self._is_overdue(member, now_s):
                    why = f"was not healthy within {self._start_timeout_s:g} s, and was killed"
                    self._record_death(member, running, now_s, why)
            elif member.phase is ProgramPhase.READY and running is not None and self._probe_liveness(member, now_s):
                asked = f"{self._liveness.misses} checks of {self._liveness.timeout_s:g} s"
                self._record_death(member, running, now_s, f"answered nothing in {asked}, and was killed")
        if not self._watchdog.is_alive:
            self._replace_watchdog()

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """End everything: the router drains, then the instances end. Once `hurry` is true, kill at once."""
        self._end([self.router], self._drain_s, hurry)
        self._end(self.backends, self._grace_s, hurry)
        if self._forks is not None:
            self._forks.close()
        end_processes(lambda: cluster_processes(self._cluster_id, ()), grace_s=0.0)
        self._watchdog.close()
        self._probes.shutdown(wait=False, cancel_futures=True)

    def _can_launch(self, member: SupervisedProgram) -> bool:
        """Return whether `member` can start without waiting for the fork server; drop a fork server that has failed."""
        forks = self._forks
        if member.program.role is None or forks is None or forks.is_ready:
            return True
        if forks.is_alive and time.monotonic() < self._execute_after_s:
            return False
        forks.close()
        self._forks = self._fork_environment = None
        return True

    def _is_due(self, member: SupervisedProgram, now_s: float) -> bool:
        return member.phase is ProgramPhase.BACKING_OFF and now_s >= member.start_again_s

    def _all_ready(self) -> bool:
        return all(member.phase is ProgramPhase.READY for member in self.members)

    def _launch(self, member: SupervisedProgram, now_s: float) -> None:
        member.running = RunningProgram(member.program, member.log, self._cluster_id, self._forks)
        member.started_s = now_s
        member.ready_s = None
        member.misses = 0
        member.next_probe_s = now_s
        self._inform_watchdog(member.running.pid)
        self._set(member, ProgramPhase.STARTING, f"started as process {member.running.pid}")

    def _check_start(self, member: SupervisedProgram, now_s: float) -> None:
        if member.running is None:
            return
        status = member.running.exit_status
        if status is not None:
            raise self._start_error(member, f"{member.program.name} {describe_exit(status)} during start")
        if member.phase is ProgramPhase.STARTING:
            self._probe(member, now_s)
            if member.phase is ProgramPhase.STARTING and self._is_overdue(member, now_s):
                raise self._start_error(
                    member, f"{member.program.name} was not healthy within {self._start_timeout_s:g} s"
                )

    def _start_error(self, member: SupervisedProgram, message: str) -> StartError:
        return StartError(message, member.log, log_tail(member.log, LOG_TAIL_LINES))

    def _probe(self, member: SupervisedProgram, now_s: float) -> None:
        if member.probe is None:
            if now_s >= member.next_probe_s:
                member.probe = self._probes.submit(answers_ok, member.program.url, member.program.ready_path)
            return
        if not member.probe.done():
            return
        is_ready = member.probe.result()
        member.probe = None
        member.next_probe_s = now_s + PROBE_INTERVAL_S
        if is_ready:
            member.ready_s = now_s
            self._set(member, ProgramPhase.READY, f"ready after {now_s - member.started_s:.1f} s")

    def _is_overdue(self, member: SupervisedProgram, now_s: float) -> bool:
        since_s = member.started_s
        if member is self.router:  # it cannot be ready before its instances
            since_s = max(since_s, *(now_s if one.ready_s is None else one.ready_s for one in self.backends))
        return now_s - since_s > self._start_timeout_s

    def _probe_liveness(self, member: SupervisedProgram, now_s: float) -> bool:
        """Take the answer to the last liveness probe, or send the next one; whether enough were missed."""
        settings = self._liveness
        if member.probe is None:
            if settings.misses and now_s >= member.next_probe_s:
                member.next_probe_s = now_s + settings.interval_s
                member.probe = self._probes.submit(answers_anything, member.program.url, settings.timeout_s)
            return False
        if not member.probe.done():
            return False
        member.misses = 0 if member.probe.result() else member.misses + 1
        member.probe = None
        return member.misses >= settings.misses

    def _record_death(self, member: SupervisedProgram, running: RunningProgram, now_s: float, how: str) -> None:
        """End what is left of it, all of it if need be, and see when it starts again."""
        self._clear(member, running)
        served_s = None if member.ready_s is None else now_s - member.ready_s
        if not self._restarts:
            self._set(member, ProgramPhase.STOPPED, f"{how}; not started again (restart: never)")
            return
        member.record = member.record.after_death(served_s)
        member.start_again_s = now_s + member.record.delay_s
        self._set(member, ProgramPhase.BACKING_OFF, f"{how}; starting again in {member.record.delay_s:g} s")

    def _end(self, members: list[SupervisedProgram], grace_s: float, hurry: Callable[[], bool]) -> None:
        for member in members:
            if member.running is not None:
                member.running.ask_to_end()
                self._set(member, ProgramPhase.STOPPING, "stopping")
        deadline_s = time.monotonic() + grace_s
        waiting = [member for member in members if member.running is not None]
        while waiting and time.monotonic() < deadline_s and not hurry():
            time.sleep(TICK_S / 2)
            waiting = [m for m in waiting if m.running is not None and m.running.exit_status is None]
        for member in members:
            if member.running is not None:
                was_killed = member.running.exit_status is None
                self._clear(member, member.running)
                self._set(member, ProgramPhase.STOPPED, "killed" if was_killed else "stopped")

    def _clear(self, member: SupervisedProgram, running: RunningProgram) -> None:
        """End what a program left behind; its session's number is free afterwards."""
        running.end_now()
        member.running = None
        member.probe = None
        try:
            self._watchdog.forget_session(running.pid)
        except BrokenPipeError:
            self._replace_watchdog()

    def _inform_watchdog(self, session_id: int) -> None:
        try:
            self._watchdog.watch_session(session_id)
        except BrokenPipeError:
            self._replace_watchdog()

    def _replace_watchdog(self) -> None:
        self._watchdog.close()
        self._watchdog = Watchdog(self._cluster_id)
        if self._forks is not None:
            self._watchdog.watch_session(self._forks.process.pid)
        for member in self.members:
            if member.running is not None:
                self._watchdog.watch_session(member.running.pid)

    def _set(self, member: SupervisedProgram, phase: ProgramPhase, line: str) -> None:
        member.phase = phase
        self._listener(member, line)

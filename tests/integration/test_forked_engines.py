"""Engines that are forked from a process with their imports behave as those that are executed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.cluster import fork_client
from sglang_ext.cluster.fork_client import ForkClient, ForkServerError
from sglang_ext.cluster.process_tree import session_processes
from sglang_ext.engine.launch_plan import shared_cpu_environment
from sglang_ext.types import Role
from support import engines
from support.engines import FLEET, EngineSpec, free_port
from support.pd import greedy
from support.reference import greedy_reference, random_prompt
from support.stand_in_cluster import is_alive, wait_until_gone
from support.tiny_model import tiny_model

pytestmark = pytest.mark.integration

OWN_IMPORTS = "sglang-ext: imports SGLang again, for another "


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ForkClient]:
    """A fork server of the test's own."""
    with ForkClient(
        tmp_path / "server.log", {**engines.ENVIRONMENT, **shared_cpu_environment(is_offline=True)}
    ) as client:
        yield client


def worker_arguments(*options: str) -> list[str]:
    port, bootstrap_port = free_port(), free_port()
    return [
        *("--role", "short", "--model-path", str(tiny_model()), "--port", str(port)),
        *("--bootstrap-port", str(bootstrap_port), "--threads", "1", *options),
    ]


def refused(client: ForkClient, log: Path, arguments: list[str], **environment: str) -> tuple[int, str]:
    """Exit status and output of an engine that does not start."""
    with log.open("wb") as output:
        process = client.start(
            arguments,
            output=output.fileno(),
            environment={**engines.ENVIRONMENT, **environment},
            cores=os.sched_getaffinity(0),
        )
        return process.wait(180), log.read_text()


@pytest.mark.full
def test_a_server_that_hangs_is_ended_and_its_late_answer_is_not_taken_for_another(
    client: ForkClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    while not client.is_ready:
        time.sleep(0.05)
    monkeypatch.setattr(fork_client, "START_TIMEOUT_S", 0.5)
    os.kill(client.process.pid, signal.SIGSTOP)
    with (tmp_path / "engine.log").open("wb") as output:
        for _ in range(2):
            with pytest.raises(ForkServerError):
                client.start(worker_arguments(), output=output.fileno(), environment=engines.ENVIRONMENT, cores={0})
    assert not client.is_alive
    assert not client.is_ready
    assert wait_until_gone([client.process.pid], 5) == []


def test_an_engine_is_a_child_of_its_client_and_says_what_it_is() -> None:
    (engine,) = FLEET.get(EngineSpec(Role.SHORT, name="forked"))
    stat = Path(f"/proc/{engine.process.pid}/stat").read_text().rpartition(")")[2].split()
    assert (int(stat[1]), int(stat[3])) == (os.getpid(), engine.process.pid)  # parent, session
    assert len(engine.process_ids("sglang_ext.engine.launch --model-path")) == 1
    assert len(engine.process_ids("sglang::scheduler")) == 1
    assert len(engine.process_ids("sglang::detokenizer")) == 1
    assert OWN_IMPORTS not in engine.log_path.read_text()
    pids = engine.process_ids()
    engine.process.terminate()
    assert engine.process.wait(20) == 0
    assert wait_until_gone(pids, 5) == []


@pytest.mark.full
def test_kill_9_takes_its_children_along_and_is_reported() -> None:
    (engine,) = FLEET.get(EngineSpec(Role.SHORT, name="forked"))
    pids = engine.process_ids()
    assert len(pids) >= 3
    engine.process.kill()
    assert engine.process.wait(10) == -signal.SIGKILL
    assert wait_until_gone(pids, 5) == []


def test_nothing_of_the_fork_server_is_left_in_an_engine() -> None:
    (engine,) = FLEET.get(EngineSpec(Role.SHORT, name="forked"))
    peers = {os.readlink(link) for link in Path(f"/proc/{engine.process.pid}/fd").iterdir() if link.is_symlink()}
    sockets = {peer for peer in peers if peer.startswith("socket:")}
    server = Path(f"/proc/{engines._CLIENTS[-1].process.pid}/fd")
    assert not sockets & {os.readlink(link) for link in server.iterdir()}


@pytest.mark.full
def test_what_refuses_to_start_says_so_and_sets_the_exit_status(client: ForkClient, tmp_path: Path) -> None:
    status, output = refused(client, tmp_path / "usage.log", ["--role", "short", "--port", "0"])
    assert (status, "sglang-ext worker: error:" in output) == (2, True)
    status, output = refused(client, tmp_path / "hooks.log", worker_arguments(), SGLANG_PLUGINS="another")
    assert status == 3
    assert output.strip().splitlines()[-1].startswith("sglang-ext: refusing to start, because not every hook")


@pytest.mark.full
def test_the_end_of_the_fork_server_touches_no_engine_and_starts_no_more(client: ForkClient, tmp_path: Path) -> None:
    with (tmp_path / "engine.log").open("wb") as output:
        arguments = [*worker_arguments("--exit-with-parent")]
        cores = {min(os.sched_getaffinity(0))}
        process = client.start(arguments, output=output.fileno(), environment=engines.ENVIRONMENT, cores=cores)
        client.process.kill()
        client.process.wait()
        with pytest.raises(ForkServerError):
            client.start(arguments, output=output.fileno(), environment=engines.ENVIRONMENT, cores=cores)
    assert os.sched_getaffinity(process.pid) == cores
    time.sleep(0.5)
    assert process.poll() is None
    process.kill()
    assert process.wait(10) == -signal.SIGKILL


CLIENT = """
import os, sys, time
from pathlib import Path
from sglang_ext.cluster.fork_client import ForkClient
from sglang_ext.engine.launch_plan import shared_cpu_environment
folder = Path(sys.argv[1])
client = ForkClient(folder / "server.log", {**os.environ, **shared_cpu_environment(is_offline=True)})
with (folder / "engine.log").open("wb") as output:
    process = client.start(sys.argv[2:], output=output.fileno(), environment=os.environ, cores=os.sched_getaffinity(0))
print(process.pid, client.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.full
@pytest.mark.chaos
@pytest.mark.parametrize("is_serving", [pytest.param(False, marks=pytest.mark.full), True])
def test_an_engine_ends_with_its_client(tmp_path: Path, is_serving: bool) -> None:
    command = [sys.executable, "-c", CLIENT, str(tmp_path), *worker_arguments()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert all(is_alive(pid) for pid in pids)
        deadline_s = time.monotonic() + 60
        while is_serving and "The server is fired up" not in (tmp_path / "engine.log").read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        processes = {pid for leader in pids for pid in session_processes(leader)}
        assert not is_serving or len(processes) >= 4  # server, scheduler, detokenizer, fork server
        process.kill()
    assert wait_until_gone(processes, 15) == []


@pytest.mark.full
def test_an_engine_with_settings_that_imports_read_makes_its_own() -> None:
    """Under the same process id, so that the process that started it need not know."""
    spec = EngineSpec(Role.SHORT, environment=(("OMP_WAIT_POLICY", "ACTIVE"),), name="own")
    engine, decode = FLEET.get(spec, EngineSpec(Role.DECODE))
    assert f"{OWN_IMPORTS}OMP_WAIT_POLICY" in engine.log_path.read_text()
    prompt = random_prompt(40, seed=3)
    assert greedy(engine, decode, prompt, 8) == greedy_reference(prompt, 8)


@pytest.mark.parametrize(
    "method", [pytest.param("fork", marks=pytest.mark.full), pytest.param("spawn", marks=pytest.mark.full)]
)
def test_a_worker_that_is_executed_serves(method: str) -> None:
    """As a user starts it: with one import where its processes are forked, with three where they are spawned."""
    spec = EngineSpec(Role.SHORT, worker_options=("--start-method", method), has_own_imports=True)
    engine, decode = FLEET.get(spec, EngineSpec(Role.DECODE))
    assert engine.get("/server_info").body["sglang_ext"]["start_method"] == method
    assert len(engine.process_ids("sglang::")) == 2, engine.process_ids()
    prompt = random_prompt(40, seed=4)
    assert greedy(engine, decode, prompt, 8) == greedy_reference(prompt, 8)


@pytest.mark.full
def test_engines_do_not_share_their_random_seed() -> None:
    drawing = FLEET.get(EngineSpec(Role.SHORT, name="draw-0"), EngineSpec(Role.SHORT, name="draw-1"))
    seeds = {engine.get("/server_info").body["random_seed"] for engine in drawing}
    assert len(seeds) == 2

"""Ports, restarts, state file and processes: the small parts of a supervisor."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.cluster.process import describe_exit, log_tail
from sglang_ext.cluster.process_tree import CLUSTER_ID_VARIABLE, cluster_processes, read_stat
from sglang_ext.cluster.state import (
    ClusterInUseError,
    ClusterState,
    ProgramState,
    lock_folder,
    remove_state,
    write_state,
)
from sglang_ext.cluster.supervisor import LONGEST_DELAY_S, STEADY_AFTER_S, RestartRecord
from sglang_ext.ports import PORTS, NoFreePortError, is_port_free, pick_free_ports
from support.up_process import read_state


def is_bound(one: socket.socket, port: int) -> bool:
    try:
        one.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def test_ports_that_are_taken_are_not_picked() -> None:
    with socket.socket() as taken:
        port = next(number for number in PORTS if is_bound(taken, number))  # other tests pick ports at the same time
        taken.listen()
        assert not is_port_free("127.0.0.1", port)
        with pytest.raises(NoFreePortError):
            pick_free_ports("127.0.0.1", 1, avoid=set(PORTS) - {port}, draw=random.Random(1))


def test_picked_ports_differ_and_stay_reserved() -> None:
    ports = pick_free_ports("127.0.0.1", 50, draw=random.Random(7))
    assert len(set(ports)) == 50
    assert set(ports) < set(PORTS)
    assert not {*pick_free_ports("127.0.0.1", 50, draw=random.Random(7))} & set(ports)


def test_ports_that_another_process_picked_are_not_picked() -> None:
    script = (
        "import random, sys; from sglang_ext.ports import pick_free_ports;"
        "print(pick_free_ports('127.0.0.1', 1, draw=random.Random(1))[0], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        port = int(other.stdout.readline())
        with pytest.raises(NoFreePortError):
            pick_free_ports("127.0.0.1", 1, avoid=set(PORTS) - {port}, draw=random.Random(1))
        other.stdin.close()
        other.wait()
    assert pick_free_ports("127.0.0.1", 1, avoid=set(PORTS) - {port}, draw=random.Random(1)) == [port]


def test_restart_delays_double_and_a_steady_instance_starts_over() -> None:
    record, delays = RestartRecord(), []
    for _ in range(7):
        record = record.after_death(None)
        delays.append(record.delay_s)
    assert delays == [1, 2, 4, 8, 16, 30, 30]
    assert record.after_death(STEADY_AFTER_S).delay_s == 1
    assert record.after_death(STEADY_AFTER_S - 1).delay_s == LONGEST_DELAY_S


@given(st.integers(0, 10**6))
def test_restart_delay_is_always_bounded(failures: int) -> None:
    assert 1 <= RestartRecord(failures).delay_s <= LONGEST_DELAY_S


def example_state(key: str = "secret") -> ClusterState:
    program = ProgramState("short-0", "short", "ready", "http://127.0.0.1:1", 2, 3, 0, "/logs/short-0.log")
    return ClusterState("c", 1, "http://127.0.0.1:9", "m", key, (program,))


def test_state_file_is_private_whole_and_read_back(tmp_path: Path) -> None:
    write_state(tmp_path, example_state("old"))
    write_state(tmp_path, example_state())
    path = tmp_path / "state.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_state(tmp_path) == example_state()
    assert json.loads(path.read_text())["admin_api_key"] == "secret"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]
    remove_state(tmp_path)
    remove_state(tmp_path)
    assert not path.exists()


def test_a_folder_belongs_to_one_cluster(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "c")
    with pytest.raises(ClusterInUseError, match=rf"\(process {os.getpid()}\); .* --set name=NAME"):
        lock_folder(tmp_path / "c")
    lock.close()
    lock_folder(tmp_path / "c").close()


def test_exits_in_words() -> None:
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-9) == "was ended by SIGKILL"
    assert describe_exit(-250) == "was ended by signal 250"


def test_log_tail(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert log_tail(log, 3) == []
    log.write_bytes(b"first\n" + b"x" * 100_000 + b"\nloading 1%\rloading 99%\n\n\xff broken\nlast")
    assert log_tail(log, 3) == ["loading 99%", "� broken", "last"]


def test_stat_of_a_process_with_a_strange_name() -> None:
    code = "open('/proc/self/comm', 'w').write('a) R 1 (b'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = read_stat(process.pid)
        assert found is not None
        assert (found.parent_pid, found.session_id, found.is_zombie) == (os.getpid(), process.pid, False)
        process.kill()
        time.sleep(0.1)
        dead = read_stat(process.pid)
        assert dead is not None
        assert dead.is_zombie
    assert read_stat(process.pid) is None


def test_processes_are_found_by_environment_or_by_session() -> None:
    environment = {**os.environ, CLUSTER_ID_VARIABLE: "this-one"}
    sleep = ["sleep", "60"]
    with (
        subprocess.Popen(sleep, env=environment) as marked,
        subprocess.Popen(sleep, start_new_session=True) as own_session,
        subprocess.Popen(sleep) as stranger,
    ):
        found = set(cluster_processes("this-one", {own_session.pid}))
        assert found == {marked.pid, own_session.pid}
        assert cluster_processes("this-on", ()) == []
        for process in (marked, own_session, stranger):
            process.kill()

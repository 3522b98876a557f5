"""A real coordinator, real members and a real mesh, killed and stopped: prompts come back right, nothing leaks."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.long_pool import Coordinator
from support.pool_member import MemberProcess, MemberProcesses, MemberSpec
from support.settings import sets

STEP_TIMEOUT_S = 2.0
PROMPT = 400


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two instances take half as long as one, three a third."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    sizes = [
        {"size": size, "a_s": 0.0, "b_s_per_token": 0.01 / size, "c_s_per_token2": 0.0, "d_s_per_token2": 0.0}
        for size in (1, 2, 3)
    ]
    content = {"format": "sglang-ext engine profile", "version": 1, "model": "toy", "sp": sizes}
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def running(profile: Path) -> Iterator[Coordinator]:
    options = (
        *("--sp-sizes", "1,2,3", "--profile", str(profile), "--min-chunk-tokens", "16"),
        *sets("pool.member_timeout_ms=2000", f"pool.step_timeout_ms={1000 * STEP_TIMEOUT_S}"),
    )
    with Coordinator.running(*options) as one:
        yield one


@pytest.fixture
def coordinator(running: Coordinator) -> Coordinator:
    """Without members."""
    running.wait_for(lambda status: not status["members"])
    return running


def start(members: MemberProcesses, coordinator: Coordinator, *specs: MemberSpec) -> list[MemberProcess]:
    started = [members.start(spec) for spec in specs]
    wait_for_members(coordinator, len(specs))
    return started


def wait_for_members(coordinator: Coordinator, count: int) -> None:
    coordinator.wait_for(lambda status: len(status["members"]) == count)


def prompt(seed: int, tokens: int = PROMPT) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(50) for _ in range(tokens)]


def check_clean(members: list[MemberProcess], free_tokens: int = 8192) -> None:
    """No member holds anything."""
    deadline_s = time.monotonic() + 10
    while True:
        states = [member.state() for member in members]
        if all(state.free_tokens == free_tokens and not state.is_busy for state in states):
            return
        assert time.monotonic() < deadline_s, states
        time.sleep(0.05)


@pytest.mark.full
@pytest.mark.parametrize("page_tokens", [1, 4])
def test_prompts_of_several_members_at_once(coordinator: Coordinator, page_tokens: int) -> None:
    before = coordinator.status()["requests_collected"]
    with MemberProcesses(coordinator.address) as processes:
        members = start(processes, coordinator, *(MemberSpec(name, page_tokens) for name in "abc"))
        offered = [
            (member, member.offer(prompt(seed), cached_tokens))
            for seed, cached_tokens in enumerate((0, 100, 0, 60))
            for member in members
        ]
        for member, request in offered:
            assert member.outcome(request).kind in {"collected", "alone_is_best"}
        status = coordinator.status()
        assert status["requests_collected"] >= before + 3
        assert any(len(step["members"]) > 1 for one in status["recent"] for step in one["steps"])
        check_clean(members)


@pytest.mark.slow
def test_a_member_is_killed_in_a_chunk(coordinator: Coordinator) -> None:
    with MemberProcesses(coordinator.address) as processes:
        members = start(processes, coordinator, *(MemberSpec(name, layer_s=0.3) for name in "abc"))
        members[1].watch()
        request = members[0].offer(prompt(1))
        members[1].wait_for_layer()
        members[1].signal(signal.SIGKILL)
        began_s = time.monotonic()
        assert members[0].outcome(request).kind == "collected"
        assert time.monotonic() - began_s < 3 * STEP_TIMEOUT_S + 5
        status = coordinator.status()
        assert [one["has_failed"] for one in status["recent"][-1]["steps"]].count(True) >= 1
        assert {member["name"] for member in status["members"]} == {"a", "c"}
        check_clean([members[0], members[2]])
        again = processes.start(MemberSpec("b"))
        wait_for_members(coordinator, 3)
        assert again.outcome(again.offer(prompt(2))).kind == "collected"


@pytest.mark.full
def test_a_member_stops_in_a_chunk_and_comes_back(coordinator: Coordinator) -> None:
    with MemberProcesses(coordinator.address) as processes:
        members = start(processes, coordinator, *(MemberSpec(name, layer_s=0.3) for name in "abc"))
        members[1].watch()
        request = members[0].offer(prompt(3))
        members[1].wait_for_layer()
        members[1].signal(signal.SIGSTOP)
        try:
            assert members[0].outcome(request).kind == "collected"
            assert len(coordinator.status()["members"]) == 2
        finally:
            members[1].signal(signal.SIGCONT)
        wait_for_members(coordinator, 3)
        check_clean(members)
        assert members[1].outcome(members[1].offer(prompt(4))).kind == "collected"
        check_clean(members)


@pytest.mark.slow
def test_members_wait_no_longer_for_a_stopped_member_than_the_coordinator(coordinator: Coordinator) -> None:
    with MemberProcesses(coordinator.address) as processes:
        # Far longer than this test waits for an outcome.
        members = start(processes, coordinator, *(MemberSpec(name, layer_s=0.3, step_timeout_s=300) for name in "abc"))
        members[1].watch()
        request = members[0].offer(prompt(3))
        members[1].wait_for_layer()
        members[1].signal(signal.SIGSTOP)
        try:
            assert members[0].outcome(request).kind == "collected"
        finally:
            members[1].signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_coordinator_is_killed_or_stopped_in_a_chunk(coordinator: Coordinator, how: signal.Signals) -> None:
    with MemberProcesses(coordinator.address) as processes:
        members = start(processes, coordinator, *(MemberSpec(name, layer_s=0.2) for name in "ab"))
        members[1].watch()
        request = members[0].offer(prompt(5))
        members[1].wait_for_layer()
        coordinator.signal(how)
        assert members[0].outcome(request).kind == "not_a_member"
        check_clean(members)
        assert not members[1].state().is_joined
        coordinator.kill()
        coordinator.start_again()
        wait_for_members(coordinator, 2)
        assert members[0].outcome(members[0].offer(prompt(6))).kind == "collected"
        check_clean(members)


@pytest.mark.slow
def test_a_request_is_withdrawn_in_a_chunk(coordinator: Coordinator) -> None:
    with MemberProcesses(coordinator.address) as processes:
        members = start(processes, coordinator, *(MemberSpec(name, layer_s=0.1) for name in "ab"))
        members[1].watch()
        request = members[0].offer(prompt(7), 50)
        members[1].wait_for_layer()
        members[0].withdraw(request)
        check_clean(members)
        coordinator.wait_for(lambda status: status["recent"][-1]["outcome"] == "cancelled")


@pytest.mark.slow
def test_a_member_joins_in_a_chunk(coordinator: Coordinator) -> None:
    """The chunk goes on over the mesh that it began on."""
    with MemberProcesses(coordinator.address) as processes:
        members = start(processes, coordinator, *(MemberSpec(name, layer_s=0.4) for name in "ab"))
        members[1].watch()
        request = members[0].offer(prompt(8))
        members[1].wait_for_layer()
        members.append(processes.start(MemberSpec("c")))
        assert members[0].outcome(request).kind == "collected"
        assert not any(step["has_failed"] for step in coordinator.status()["recent"][-1]["steps"])
        wait_for_members(coordinator, 3)
        check_clean(members)


@pytest.mark.slow
def test_a_full_pool_of_one_member_is_known_to_the_others_at_once(coordinator: Coordinator) -> None:
    step_timeout_s = 30.0
    with MemberProcesses(coordinator.address) as processes:
        roomy, full = (MemberSpec(name, step_timeout_s=step_timeout_s) for name in "ab")
        members = start(processes, coordinator, roomy, full._replace(pool_tokens=64))
        began_s = time.monotonic()
        # It says what is free there: nothing is tried with it again.
        assert members[0].outcome(members[0].offer(prompt(9))).kind == "alone_is_best"
        assert [step["has_failed"] for step in coordinator.status()["recent"][-1]["steps"]] == [True]
        assert time.monotonic() - began_s < step_timeout_s / 2
        check_clean(members[:1])
        check_clean(members[1:], free_tokens=64)


@pytest.mark.slow
def test_another_model_waits_until_the_pool_is_empty(coordinator: Coordinator) -> None:
    with MemberProcesses(coordinator.address) as processes:
        (old,) = start(processes, coordinator, MemberSpec("a"))
        new = processes.start(MemberSpec("b", page_tokens=4))
        time.sleep(1.0)
        assert not new.state().is_joined
        old.signal(signal.SIGKILL)
        coordinator.wait_for(lambda status: [member["name"] for member in status["members"]] == ["b"])

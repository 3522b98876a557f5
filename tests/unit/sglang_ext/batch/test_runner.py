"""Dispatch against an endpoint that fails in every way."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.batch.database import StoreFullError
from sglang_ext.batch.decide.in_flight_cap import CapSettings
from sglang_ext.batch.decide.rate_limit import RateLimit
from sglang_ext.batch.decide.retries import FailureKind
from sglang_ext.batch.endpoint import EndpointClient
from sglang_ext.batch.lines import LineOptions, parse_line
from sglang_ext.batch.runner import JobRunner, RunnerSettings
from sglang_ext.batch.store import BatchStore, StoredResult
from support.faulty_endpoint import FaultyEndpoint

LOAD: dict[str, Any] = {
    "length_boundary_tokens": 100,
    "classes": {"short": {"online_wait_s": None, "backlog_s": 0.0}, "long": {"online_wait_s": None, "backlog_s": 0.0}},
}


PLAIN = RunnerSettings()


def add(store: BatchStore, prompts: list[str], name: str = "job") -> int:
    job = store.create_job(name, {})
    options = LineOptions(model="m")
    store.add_lines(job, [parse_line({"prompt": text}, options, name, at) for at, text in enumerate(prompts)])
    store.make_ready(job)
    return job


def run_jobs(
    store: BatchStore,
    url: str,
    jobs: list[int],
    settings: RunnerSettings = PLAIN,
    on_start: Callable[[JobRunner], None] | None = None,
    **options: Any,
) -> tuple[bool, JobRunner]:
    async def run() -> tuple[bool, JobRunner]:
        async with EndpointClient(url) as client:
            runner = JobRunner(store, client, settings, **options)
            for job in jobs:
                runner.add_job(job)
            if on_start is not None:
                on_start(runner)
            return await asyncio.wait_for(runner.run(), 60), runner

    return asyncio.run(run())


def by_id(store: BatchStore, job: int) -> dict[str, StoredResult]:
    found = list(store.results(job))
    assert len({one.custom_id for one in found}) == len(found)
    return {one.custom_id: one for one in found}


@pytest.mark.slow
def test_every_line_gets_its_own_answer(tmp_path: Path) -> None:
    prompts = [f"prompt {number}" for number in range(700)]
    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        job = add(store, prompts)
        finished, runner = run_jobs(store, endpoint.url, [job])
        assert finished
        results = by_id(store, job)
        assert len(results) == 700
        for number, text in enumerate(prompts):
            assert f"reply to {text}".encode() in results[f"job:{number}"].body
        assert set(endpoint.asked.values()) == {1}
        assert runner.progress.succeeded == 700
        assert (store.job(job).prompt_tokens, store.job(job).completion_tokens) == (2800, 1400)


@pytest.mark.slow
def test_failures_are_retried_or_final(tmp_path: Path) -> None:
    prompts = ["fine", "status=400", "status=503*1", "status=500*2", "status=500", "lost*1", "status=429*1"]
    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        job = add(store, prompts)
        run_jobs(store, endpoint.url, [job], RunnerSettings(max_retries=2))
        results = [by_id(store, job)[f"job:{number}"] for number in range(len(prompts))]
        assert [one.is_ok for one in results] == [True, False, True, True, False, True, True]
        assert results[1].error == results[1].error == "HTTP 400: as asked"
        assert (results[4].status_code, results[4].error) == (500, "HTTP 500: as asked")
        assert endpoint.asked["status=400"] == 1
        assert endpoint.asked["status=500"] == 3
        assert endpoint.asked["lost*1"] == 2


@pytest.mark.slow
def test_retry_after_is_waited_for(tmp_path: Path) -> None:
    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        job = add(store, ["status=429*1 after"])
        run_jobs(store, endpoint.url, [job])
        assert store.job(job).succeeded == 1
        assert endpoint.times_s[1] - endpoint.times_s[0] >= 1.0


@pytest.mark.slow
def test_an_endpoint_that_is_away_costs_no_line_a_try(tmp_path: Path) -> None:
    notes: list[str] = []
    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        job = add(store, [f"slow=0.05 {number}" for number in range(300)])

        def leave_and_return(runner: JobRunner) -> None:
            async def go() -> None:
                await asyncio.sleep(0.4)
                await asyncio.to_thread(endpoint.stop)
                await asyncio.sleep(2.0)
                await asyncio.to_thread(endpoint.start)

            runner._start(go())

        finished, _ = run_jobs(
            store, endpoint.url, [job], RunnerSettings(max_retries=1), leave_and_return, on_note=notes.append
        )
        assert finished
        told = store.job(job)
        assert (told.succeeded, told.failed) == (300, 0)
        assert any("is down, waiting" in note for note in notes)
        assert any("is up again" in note for note in notes)


@pytest.mark.slow
def test_an_endpoint_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        endpoint.stop()
        job = add(store, ["one"])

        def come(runner: JobRunner) -> None:
            asyncio.get_running_loop().call_later(1.0, endpoint_start)

        def endpoint_start() -> None:
            asyncio.run_coroutine_threadsafe(endpoint._start(), endpoint._loop)

        assert run_jobs(store, endpoint.url, [job], on_start=come)[0]
        assert store.job(job).succeeded == 1


@pytest.mark.slow
def test_no_more_in_flight_than_allowed(tmp_path: Path) -> None:
    with FaultyEndpoint(load=LOAD) as endpoint, BatchStore.open(tmp_path / "s") as store:
        job = add(store, [f"slow=0.01 {number} " + "long " * 100 * (number % 2) for number in range(200)])
        run_jobs(store, endpoint.url, [job], RunnerSettings(CapSettings(max_in_flight=7)))
        assert store.job(job).succeeded == 200
        assert 2 <= endpoint.most_in_flight <= 7


@pytest.mark.slow
def test_both_classes_are_in_flight_from_the_start(tmp_path: Path) -> None:
    with FaultyEndpoint(load=LOAD) as endpoint, BatchStore.open(tmp_path / "s") as store:
        job = add(store, [f"slow=0.01 {number} " + "long " * 100 * (number >= 150) for number in range(200)])
        run_jobs(store, endpoint.url, [job], RunnerSettings(CapSettings(start=4, max_in_flight=8)))
        is_long = [len(body["prompt"]) > 400 for body in endpoint.bodies[:100]]
        assert 40 <= sum(is_long) <= 60
        assert store.job(job).succeeded == 200


@pytest.mark.slow
def test_it_yields_to_online_requests_that_wait(tmp_path: Path) -> None:
    waiting = {**LOAD, "classes": {"short": {"online_wait_s": 3.0, "backlog_s": 0}, "long": LOAD["classes"]["long"]}}
    with FaultyEndpoint(load=waiting) as endpoint, BatchStore.open(tmp_path / "s") as store:
        job = add(store, [f"slow=0.05 {number}" for number in range(150)])
        _, runner = run_jobs(store, endpoint.url, [job], RunnerSettings(CapSettings(start=16, settle_s=0.1)))
        assert runner._classes[next(iter(runner._classes))].cap.cap <= 4
        assert store.job(job).succeeded == 150


@pytest.mark.slow
def test_jobs_take_turns(tmp_path: Path) -> None:
    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        large = add(store, [f"slow=0.01 large {number}" for number in range(300)], "large")
        small = add(store, [f"slow=0.01 small {number}" for number in range(40)], "small")
        ended: list[int] = []
        run_jobs(
            store,
            endpoint.url,
            [],
            RunnerSettings(CapSettings(max_in_flight=4)),
            lambda runner: [runner.add_job(job, on_end=ended.append) for job in (large, small)] and None,
        )
        assert ended == [small, large]
        first = Counter("large" in body["prompt"] for body in endpoint.bodies[:80])
        assert 30 <= first[True] <= 50


@pytest.mark.slow
def test_a_cancelled_job_ends_and_the_other_goes_on(tmp_path: Path) -> None:
    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        slow = add(store, [f"slow=30 {number}" for number in range(50)], "slow")
        quick = add(store, [f"quick {number}" for number in range(50)], "quick")
        ended: list[int] = []

        def begin(runner: JobRunner) -> None:
            runner.add_job(slow, on_end=ended.append)
            runner.add_job(quick, on_end=ended.append)
            asyncio.get_running_loop().call_later(0.5, runner.cancel_job, slow)

        began_s = time.monotonic()
        run_jobs(store, endpoint.url, [], RunnerSettings(CapSettings(max_in_flight=64, start=64)), begin)
        assert time.monotonic() - began_s < 20
        assert sorted(ended) == [slow, quick]
        assert store.job(slow).remaining == 50
        assert store.job(quick).succeeded == 50
        assert len(store.lease(slow, 100)) == 50


@pytest.mark.slow
def test_stopping_keeps_what_came_and_the_rest_is_done_later(tmp_path: Path) -> None:
    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        job = add(store, [f"slow=0.1 {number}" for number in range(400)])

        def begin(runner: JobRunner) -> None:
            asyncio.get_running_loop().call_later(0.7, runner.stop)

        finished, _ = run_jobs(store, endpoint.url, [job], RunnerSettings(CapSettings(max_in_flight=8)), begin)
        assert not finished
        done = store.job(job).succeeded
        assert 0 < done < 400
        assert sum(endpoint.asked.values()) == done  # what was in flight was waited for
        assert run_jobs(store, endpoint.url, [job])[0]
        assert store.job(job).succeeded == 400
        assert set(endpoint.asked.values()) == {1}


@pytest.mark.slow
def test_limits_per_second(tmp_path: Path) -> None:
    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        job = add(store, [f"prompt {number}" for number in range(60)])
        began_s = time.monotonic()
        run_jobs(store, endpoint.url, [job], requests_limit=RateLimit(20.0))
        assert endpoint.times_s[-1] - began_s >= 1.8
        job = add(store, ["word " * 80] * 12, "tokens")
        began_s = time.monotonic()
        run_jobs(store, endpoint.url, [job], tokens_limit=RateLimit(400.0))  # 102 tokens each
        assert endpoint.times_s[-1] - began_s >= 1.5


def test_an_encoder_can_refuse_an_answer(tmp_path: Path) -> None:
    def refuse(line: object, answer: object) -> bytes:
        raise ValueError("not what was asked for")

    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        job = add(store, ["one"])
        run_jobs(store, endpoint.url, [], on_start=lambda runner: runner.add_job(job, refuse))
        (result,) = store.results(job)
        assert (result.is_ok, result.error) == (False, "not what was asked for")


@pytest.mark.slow
def test_a_full_store_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    prompts = [f"{'x' * 2000} {number}" for number in range(200)]
    with FaultyEndpoint() as endpoint:
        with BatchStore.open(tmp_path / "s", limit_bytes=1_300_000) as store:
            job = add(store, prompts)
            with pytest.raises(StoreFullError):
                run_jobs(store, endpoint.url, [job])
            done = store.job(job).succeeded
            assert done < 200
        with BatchStore.open(tmp_path / "s") as store:
            assert run_jobs(store, endpoint.url, [job])[0]
            assert len(by_id(store, job)) == 200


def test_a_request_cancelled_before_its_first_step_is_not_counted_for_ever(tmp_path: Path) -> None:
    """Cancelled in the very iteration of the loop in which it was sent."""

    def cancel_at_once(runner: JobRunner) -> None:
        send = runner._send

        def send_and_cancel(*arguments: Any) -> None:
            send(*arguments)
            runner.cancel_job(cancelled)

        runner._send = send_and_cancel  # type: ignore[method-assign]

    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        cancelled = add(store, [f"prompt {number}" for number in range(40)])
        finished, runner = run_jobs(store, endpoint.url, [cancelled], on_start=cancel_at_once)
        assert finished
        assert runner.progress.in_flight == 0
        assert (runner._probes, runner._reply_bytes) == (0, 0)


@pytest.mark.slow
def test_replies_in_flight_are_bounded_by_what_they_may_be(tmp_path: Path) -> None:
    """Each is expected to be as large as all of them may be together: one at a time."""
    settings = RunnerSettings(CapSettings(max_in_flight=16), reply_bytes_per_token=1 << 30)
    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        job = add(store, [f"slow=0.01 {number}" for number in range(20)])
        finished, _ = run_jobs(store, endpoint.url, [job], settings)
        assert finished
        assert len(by_id(store, job)) == 20
        assert endpoint.most_in_flight == 1


@pytest.mark.slow
def test_a_request_that_hangs_from_before_an_outage_holds_up_no_other(tmp_path: Path) -> None:
    """The endpoint goes and comes back; one request of before never gets its answer."""
    with FaultyEndpoint() as endpoint, BatchStore.open(tmp_path / "s") as store:
        job = add(store, [f"slow=0.02 {number}" for number in range(60)])

        def break_down(runner: JobRunner) -> None:
            runner._in_flight += 1  # one that hangs
            runner._outage.on_failure(FailureKind.UNREACHABLE, 0, time.monotonic())

        finished, runner = run_jobs(store, endpoint.url, [job], RunnerSettings(CapSettings(start=2)), break_down)
        assert finished
        assert store.job(job).succeeded == 60
        assert runner.progress.in_flight == 1

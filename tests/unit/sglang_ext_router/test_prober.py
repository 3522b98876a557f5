"""Instances come and go: health, identity, load, and what is forgotten when one is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.instances.registry import WorkerRegistry
from sglang_ext_router.instances.workers import PRIOR_TOKENS_PER_S, PrefillRate, Worker
from support.router_process import Cluster, cluster
from support.scripted_engine import BOOTSTRAP_PORT, ScriptedEngine

PROMPT = {"text": "x"}
NOT_INFO: list[object] = [[], None, "text", 5, True, [{}]]


def decode_worker(served: Cluster) -> Worker:
    return served.worker(served.decode[0].url)


def with_info(engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    assert isinstance(engine.info, dict)
    return {**engine.info, **fields}


@pytest.mark.slow
async def test_an_instance_takes_requests_once_it_is_healthy() -> None:
    async with cluster(health_failure_threshold=2, queue_timeout_secs=0.1) as served:
        engine, worker = served.decode[0], decode_worker(served)
        engine.health_status = 503
        await served.until(lambda: not worker.is_healthy)
        assert worker.last_error == "/health answered 503"
        assert (await served.ask("POST", "/generate", PROMPT)).status == 503
        engine.health_status = 200
        await served.until(lambda: worker.is_healthy)
        assert worker.last_error == ""
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200


@pytest.mark.slow
async def test_one_failed_check_is_forgiven() -> None:
    async with cluster(health_failure_threshold=3, health_check_interval_secs=0.05) as served:
        engine, worker = served.decode[0], decode_worker(served)
        for _ in range(3):
            engine.health_status = 500
            await served.until(lambda: worker.failed_checks >= 1)
            engine.health_status = 200
            await served.until(lambda: worker.failed_checks == 0)
            assert worker.is_healthy


@pytest.mark.slow
async def test_an_instance_that_does_not_answer_is_taken_out_where_another_one_does() -> None:
    async with cluster(
        decode=2, health_check_timeout_secs=0.1, health_failure_threshold=2, health_check_interval_secs=0.05
    ) as served:
        served.decode[0].health_status = None
        await served.until(lambda: not decode_worker(served).is_healthy, 2.0)
        assert decode_worker(served).last_error


async def test_an_instance_whose_port_is_closed_is_taken_out_at_once() -> None:
    async with cluster(health_failure_threshold=50, health_check_interval_secs=0.1) as served:
        await served.decode[0].stop()
        await served.until(lambda: not decode_worker(served).is_healthy, 1.0)


async def test_what_a_lost_instance_had_cached_is_forgotten() -> None:
    async with cluster(health_check_interval_secs=0.1) as served:
        await served.ask("POST", "/generate", {"text": "word " * 300})
        index = served.router.planner.prefixes.index
        worker = served.worker(served.short[0].url)
        assert index.worker_block_count(worker.id) > 0
        await served.short[0].stop()
        await served.until(lambda: not worker.is_healthy)
        assert index.worker_block_count(worker.id) == 0


@pytest.mark.slow
async def test_a_restarted_instance_is_asked_again_who_it_is() -> None:
    async with cluster(health_check_interval_secs=0.1) as served:
        short, worker = served.short[0], served.worker(served.short[0].url)
        assert worker.bootstrap_port == BOOTSTRAP_PORT
        await short.stop()
        await served.until(lambda: not worker.is_healthy)
        short.info = with_info(short, disaggregation_bootstrap_port=9999, context_length=4096)
        await short.start()
        await served.until(lambda: worker.is_healthy)
        assert (worker.bootstrap_port, worker.max_prompt_tokens) == (9999, 4096)
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200
        assert short.requests[-1].json["bootstrap_port"] == 9999


@pytest.mark.slow
@pytest.mark.parametrize(("role", "mode"), [(Role.DECODE, "prefill"), (Role.SHORT, "decode"), (Role.LONG, "null")])
async def test_an_instance_in_the_wrong_mode_is_refused(role: Role, mode: str) -> None:
    async with cluster() as served:
        engine = await served.extra_engine(role)
        engine.info = with_info(engine, disaggregation_mode=mode)
        await served.ask("GET", "/health")
        served.router.add_worker(worker_address(engine))
        worker = served.worker(engine.url)
        await served.until(lambda: worker.failed_checks >= 2)
        assert not worker.is_healthy
        assert mode in worker.last_error
        shown = (await served.ask("GET", f"/workers/127.0.0.1:{engine.port}")).json
        assert (shown["state"], shown["last_error"]) == ("refused", worker.last_error)
        assert engine.requests == []


def worker_address(engine: ScriptedEngine) -> Any:
    from sglang_ext_router.config import WorkerAddress

    return WorkerAddress(engine.url, engine.role)


@pytest.mark.slow
@pytest.mark.parametrize("info", NOT_INFO)
async def test_an_odd_description_does_not_end_the_watching(info: object) -> None:
    async with cluster() as served:
        engine = await served.extra_engine(Role.DECODE)
        good, engine.info = engine.info, info
        served.router.add_worker(worker_address(engine))
        worker = served.worker(engine.url)
        await served.until(lambda: worker.failed_checks >= 2)
        engine.info = good
        await served.until(lambda: worker.is_healthy)


@pytest.mark.full
@pytest.mark.parametrize(
    "loads",
    [
        *NOT_INFO,
        {"loads": None},
        {"loads": [None]},
        {"loads": ["x"]},
        {"loads": [{}]},
        {"loads": [{"num_running_reqs": "many", "num_used_tokens": 0, "max_total_num_tokens": 1}]},
        {"loads": [{"num_running_reqs": None, "num_used_tokens": 0, "max_total_num_tokens": 1}]},
        {"loads": [{"num_running_reqs": 1, "num_used_tokens": [], "max_total_num_tokens": 1}]},
    ],
)
async def test_an_odd_load_report_does_not_end_the_watching(loads: object) -> None:
    async with cluster(health_check_interval_secs=0.05, load_poll_interval_secs=0.02) as served:
        engine, worker = served.decode[0], decode_worker(served)
        engine.loads = loads
        await asyncio.sleep(0.1)
        engine.loads = {"loads": [{"num_running_reqs": 42, "num_used_tokens": 0, "max_total_num_tokens": 10}]}
        await served.until(lambda: worker.reported_running == 42)
        assert worker.is_healthy


async def test_loads_of_all_ranks_are_added_up() -> None:
    rank = {"num_running_reqs": 3, "num_used_tokens": 100, "max_total_num_tokens": 1000}
    async with cluster(load_poll_interval_secs=0.02) as served:
        served.decode[0].loads = {"loads": [rank, rank]}
        served.short[0].loads = {"loads": [{**rank, "num_waiting_uncached_tokens": 70}] * 2}
        worker = decode_worker(served)
        await served.until(lambda: worker.reported_running == 6)
        assert worker.reported_free_kv_tokens == 1800
        prefill = served.worker(served.short[0].url)
        await served.until(lambda: prefill.foreign_tokens == 140)
        assert prefill.prefill_load(0, 0.0).pending_tokens == 140


async def test_kv_on_its_way_is_told_from_kv_that_is_used() -> None:
    """300 in use, 200 with slots that wait for their KV, 100 that have no slots yet."""
    rank = {"num_running_reqs": 1, "num_used_tokens": 500, "max_total_num_tokens": 1000}
    async with cluster(load_poll_interval_secs=0.02) as served:
        served.decode[0].loads = {"loads": [{**rank, "num_total_tokens": 600, "num_active_tokens": 300}]}
        worker = decode_worker(served)
        await served.until(lambda: worker.reported_running == 1)
        assert (worker.reported_free_kv_tokens, worker.reported_awaiting_tokens) == (700, 300)
        assert worker.decode_load()[1:3] == (700, 300)


async def test_kv_on_its_way_counts_once_from_dispatch_to_first_token() -> None:
    rank = {"num_running_reqs": 0, "num_used_tokens": 0, "max_total_num_tokens": 10_000}
    waiting = {**rank, "num_running_reqs": 1, "num_used_tokens": 400, "num_total_tokens": 400, "num_active_tokens": 0}
    done = {**rank, "num_running_reqs": 2, "num_used_tokens": 400, "num_total_tokens": 400, "num_active_tokens": 400}
    async with cluster(load_poll_interval_secs=0.02) as served:
        decode, worker = served.decode[0], decode_worker(served)
        decode.loads = {"loads": [rank]}
        await served.until(lambda: worker.reported_free_kv_tokens == 10_000)
        worker.reserved_tokens += 400  # dispatched; the instance does not know yet
        assert worker.decode_load()[1:3] == (10_000, 400)
        decode.loads = {"loads": [waiting]}
        await served.until(lambda: worker.reported_running == 1)
        assert worker.decode_load()[1:3] == (10_000, 400), "its slots are taken: not to be counted twice"
        worker.reserved_tokens += 50  # another one, since the report
        assert worker.decode_load()[1:3] == (10_000, 450)
        worker.reserved_tokens -= 450  # the first tokens have come
        decode.loads = {"loads": [done]}
        await served.until(lambda: worker.reported_running == 2)
        assert worker.decode_load()[1:3] == (9600, 0)


async def test_the_prefill_rate_is_learned_from_the_reports() -> None:
    async with cluster(load_poll_interval_secs=0.02) as served:
        worker = served.worker(served.short[0].url)
        rank = {"num_running_reqs": 0, "num_used_tokens": 0, "max_total_num_tokens": 1}
        # The first report is what later ones are compared with.
        served.short[0].loads = {"loads": [{**rank, "num_running_reqs": 7}]}
        await served.until(lambda: worker.reported_running == 7)
        counters = {"total_prefill_uncached_tokens": 1000, "total_prefill_busy_us": 1_000_000}
        served.short[0].loads = {"loads": [{**rank, **counters}]}
        await served.until(lambda: worker.rate.busy_s > 0.9)
        counters = {"total_prefill_uncached_tokens": 6000, "total_prefill_busy_us": 2_000_000}
        served.short[0].loads = {"loads": [{**rank, **counters}]}
        await served.until(lambda: worker.rate.busy_s > 1.5)
        # 6,000 tokens in 2 s of its own, and half a second of what an instance of which nothing is known does
        assert worker.rate.tokens_per_s == pytest.approx((6000 + 0.5 * 2000) / 2.5, rel=0.01)


async def test_without_a_bootstrap_port_a_prefill_instance_is_not_used() -> None:
    async with cluster() as served:
        engine = await served.extra_engine(Role.SHORT)
        assert isinstance(engine.info, dict)
        engine.info = {key: value for key, value in engine.info.items() if key != "disaggregation_bootstrap_port"}
        served.router.add_worker(worker_address(engine))
        worker = served.worker(engine.url)
        await served.until(lambda: worker.failed_checks >= 1)
        assert "bootstrap_port" in worker.last_error


async def test_n_above_one_needs_instances_that_can() -> None:
    async with cluster() as served:
        engine = served.decode[0]
        assert isinstance(engine.info, dict)
        engine.info = {key: value for key, value in engine.info.items() if key != "sglang_ext"}
        decode_worker(served).has_info = False
        await served.until(lambda: decode_worker(served).has_info)
        answer = await served.ask("POST", "/generate", {"text": "x", "sampling_params": {"n": 2}})
        assert (answer.status, answer.error["param"]) == (400, "n")
        assert served.upstream_requests() == 0
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200


async def test_a_failed_request_has_the_instance_checked_at_once() -> None:
    async with cluster(health_check_interval_secs=60.0, load_poll_interval_secs=60.0, retry_max_retries=0) as served:
        checks = served.decode[0].health_checks
        from support.scripted_engine import cut

        served.decode[0].script = cut()
        await served.ask("POST", "/generate", PROMPT)
        await served.until(lambda: served.decode[0].health_checks > checks, 1.0)


async def test_health_checks_carry_the_key() -> None:
    async with cluster(api_key="secret") as served:
        (info,) = [request for request in served.decode[0].control if request.path == "/server_info"]
        assert info.header("authorization") == "Bearer secret"


class LosesCancellations:
    """A session as aiohttp's when a timeout fires at the moment of a cancellation: the first one is lost."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._has_lost = False

    def get(self, url: str) -> LosesCancellations:
        return self

    async def __aenter__(self) -> None:
        self.asked.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if self._has_lost:
                raise
            self._has_lost = True
            raise TimeoutError from None

    async def __aexit__(self, *_: object) -> None:
        """Nothing to free."""

    async def close(self) -> None:
        """Nothing to free."""


async def test_a_cancellation_that_got_lost_does_not_keep_the_router_from_stopping() -> None:
    async with cluster() as served:
        prober = served.router.prober
        assert prober._session is not None
        await prober._session.close()
        odd: Any = LosesCancellations()
        prober._session = odd
        await odd.asked.wait()
        await asyncio.wait_for(prober.stop(), 2.0)


async def test_a_cancellation_that_got_lost_does_not_keep_a_removed_instance_watched() -> None:
    async with cluster() as served:
        prober = served.router.prober
        worker = decode_worker(served)
        task = prober._tasks[worker.id]
        real: Any = prober._session
        odd: Any = LosesCancellations()
        prober._session = odd
        await odd.asked.wait()
        served.router.remove_worker(worker)
        await served.until(task.done, 2.0)
        prober._session = real


# -- rate -----------------------------------------------------------------------------------------------------


def test_a_rate_without_reports_is_the_prior() -> None:
    rate = PrefillRate()
    rate.observe(0, 0, 0.0)
    rate.observe(0, 0, 1.0)
    assert rate.tokens_per_s == PRIOR_TOKENS_PER_S


def test_a_rate_nears_what_the_instance_does() -> None:
    rate = PrefillRate()
    for second in range(300):
        rate.observe(second * 8000, second * 1_000_000, float(second))
    assert rate.tokens_per_s == pytest.approx(8000, rel=0.02)


def test_a_restart_is_not_taken_for_negative_work() -> None:
    rate = PrefillRate()
    for second, (tokens, busy_us) in enumerate(((1000, 1_000_000), (3000, 2_000_000), (10, 1000), (1010, 1_001_000))):
        rate.observe(tokens, busy_us, float(second), 1000.0)
    # What it did before the restart is forgotten.
    assert rate.tokens_per_s == pytest.approx(1000)


def test_old_rates_fade() -> None:
    rate = PrefillRate()
    tokens = busy_us = 0
    for second, per_second in enumerate([100] * 200 + [5000] * 200):
        rate.observe(tokens, busy_us, float(second))
        tokens, busy_us = tokens + per_second, busy_us + 1_000_000
    assert rate.tokens_per_s > 4500


def test_an_instance_that_was_cold_is_not_slow_for_ever() -> None:
    """Its first iterations took 3 s for 20 tokens; since then it got nothing, and its peers do 5,000 tokens/s."""
    rate = PrefillRate()
    rate.observe(0, 0, 0.0, 5000.0)
    rate.observe(20, 3_000_000, 4.0, 5000.0)
    cold = rate.tokens_per_s
    assert 500 < cold < 1000
    for second in range(5, 305):
        rate.observe(20, 3_000_000, float(second), 5000.0)
    assert rate.tokens_per_s > 4900


def test_what_is_expected_of_an_instance_is_what_the_others_of_its_pool_do() -> None:
    short = [WorkerAddress(f"http://short:{i + 1}", Role.SHORT, 1) for i in range(3)]
    long = WorkerAddress("http://long:1", Role.LONG, 1)
    registry = WorkerRegistry(RouterConfig(workers=(*short, long)))
    first, second, third, other = registry
    for worker, tokens in ((first, 1_000), (second, 60_000), (third, 140_000), (other, 900_000)):
        worker.rate.observe(0, 0, 0.0)
        worker.rate.observe(tokens, 10_000_000, 0.0)
    assert registry.expected_tokens_per_s(first, 1.0) == pytest.approx(10_000, rel=0.05)
    assert registry.expected_tokens_per_s(third, 1.1) == pytest.approx(3_050, rel=0.05)
    assert registry.expected_tokens_per_s(other, 1.2) == PRIOR_TOKENS_PER_S


@pytest.mark.slow
async def test_an_instance_that_was_lost_is_measured_anew() -> None:
    async with cluster(load_poll_interval_secs=0.02) as served:
        engine, worker = served.short[0], served.worker(served.short[0].url)
        rank = {"num_running_reqs": 0, "num_used_tokens": 0, "max_total_num_tokens": 1}
        for tokens, busy_us in ((0, 0), (10, 60_000_000)):
            engine.loads = {
                "loads": [{**rank, "total_prefill_uncached_tokens": tokens, "total_prefill_busy_us": busy_us}]
            }
            await asyncio.sleep(0.1)
        assert worker.rate.tokens_per_s < 100
        served.router._on_worker_lost(worker)
        assert worker.rate.tokens_per_s == PRIOR_TOKENS_PER_S

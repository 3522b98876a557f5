"""What Prometheus reads: well formed, adding up, and the sum of all processes."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sglang_ext.types import LengthClass
from sglang_ext_router.observe.exposition import PREFIX, render, request_families
from sglang_ext_router.observe.histograms import Histogram, ttft_bounds_s
from sglang_ext_router.observe.metrics import MetricsSnapshot, RouterMetrics, read_snapshot
from support.router_process import Cluster, cluster
from support.scripted_engine import DONE, cut, event, reply, status, stream

PROMPT = {"text": "x"}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_of(text: str) -> Samples:
    """Samples by name and labels; AssertionError if one occurs twice."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


async def scrape(served: Cluster) -> Samples:
    answer = await served.ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples_of(answer.body.decode())


async def test_a_request_is_counted_once_everywhere() -> None:
    async with cluster() as served:
        for _ in range(3):
            await served.ask("POST", "/generate", {"text": "x" * 400})
        await served.ask("POST", "/generate", {"text": "z" * 9_000})
        await served.ask("POST", "/generate", b"{")
        await served.until_idle()
        found = await scrape(served)
        short, long = ("length_class", "short"), ("length_class", "long")
        path = ("path", "/generate")
        ok, failed = ("outcome", "ok"), ("outcome", "error_before")
        assert found["requests_total", (short, ok, path, ("status", "200"))] == 3
        assert found["requests_total", (long, ok, path, ("status", "200"))] == 1
        assert found["requests_total", (("length_class", "none"), failed, path, ("status", "400"))] == 1
        assert found["refused_total", (("reason", "bad_request"),)] == 1
        for name in ("request_duration_seconds", "queue_wait_seconds", "new_tokens", "request_prompt_tokens"):
            assert found[f"{name}_count", (short,)] == 3
            assert found[f"{name}_count", (long,)] == 1
        assert found["worker_requests_total", (("worker", served.decode[0].url),)] == 4
        assert found["worker_requests_total", (("worker", served.short[0].url),)] == 3
        assert found["worker_up", (("role", "decode"), ("worker", served.decode[0].url))] == 1
        assert found["requests_in_flight", ()] == found["requests_queued", ()] == 0


@pytest.mark.slow
async def test_failures_and_retries_are_counted() -> None:
    async with cluster(decode=2, cb_failure_threshold=100) as served:
        served.short[0].script = reply(delay_s=0.05)
        served.decode[0].script = status(503)
        served.decode[1].script = cut()
        await served.ask("POST", "/generate", PROMPT)
        found = await scrape(served)
        assert found["retries_total", (("leg", "decode"),)] >= 2
        assert found["worker_failures_total", (("worker", served.decode[0].url),)] >= 1
        assert found["worker_failures_total", (("worker", served.decode[1].url),)] >= 1


async def test_histograms_add_up() -> None:
    async with cluster() as served:
        served.short[0].script = served.decode[0].script = stream(event({"text": "a"}), DONE)
        await asyncio.gather(*(served.ask("POST", "/generate", {**PROMPT, "stream": True}) for _ in range(20)))
        await served.until_idle()
        found = await scrape(served)
        for length_class, count in (("short", 20), ("long", 0)):
            labels = ("length_class", length_class)
            buckets = [
                (float(dict(key)["le"]), value)
                for (name, key), value in found.items()
                if name == "ttft_seconds_bucket" and labels in key
            ]
            values = [value for _, value in sorted(buckets)]
            assert values == sorted(values)
            assert len(values) == len(ttft_bounds_s(1800.0)) + 1
            assert values[-1] == found["ttft_seconds_count", (labels,)] == count


@pytest.mark.slow
async def test_labels_do_not_grow_with_what_clients_send() -> None:
    async with cluster() as served:
        before = len(await scrape(served))
        for number in range(20):
            await served.ask("POST", f"/v1/{number}", PROMPT)
            await served.ask("POST", f"/generate?x={number}", {"text": "x", "model": f"m{number}"})
            await served.ask("POST", "/generate", PROMPT, {"x-request-id": f"r{number}"})
        assert len(await scrape(served)) < before + 10


@pytest.mark.slow
@given(values=st.lists(st.floats(0, 1000), max_size=50), bounds=st.just((0.1, 1.0, 10.0)))
def test_a_histogram_puts_every_value_in_its_bucket(values: list[float], bounds: tuple[float, ...]) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    for bound, count in histogram.cumulative():
        assert count == sum(value <= bound for value in values)
    assert histogram.total == pytest.approx(sum(values))


def used(seed: int) -> RouterMetrics:
    metrics = RouterMetrics()
    metrics.requests["/generate", "short", 200 + seed % 2, "ok"] = 1
    metrics.refused["queue_full"] = seed
    metrics.prompt_tokens, metrics.cached_tokens = 100 * seed, 10 * seed
    metrics.tokenised, metrics.spilled = seed, 2 * seed
    one = metrics.of(LengthClass.SHORT if seed % 2 else LengthClass.LONG)
    one.slo_met += seed
    for value in range(seed):
        one.ttft_s.observe(value / 7)
        one.new_tokens.observe(value * 11.0)
    return metrics


def added(parts: list[Samples]) -> Samples:
    total: Samples = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total


def told(metrics: RouterMetrics) -> MetricsSnapshot:
    """As it arrives at another process: through JSON."""
    return read_snapshot(json.loads(json.dumps(metrics.snapshot({}, {}, {}))))


def shown(metrics: RouterMetrics, *others: MetricsSnapshot) -> Samples:
    return samples_of(render(request_families(metrics, others))[0].decode())


@pytest.mark.slow
@given(seeds=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_processes_are_added_up(seeds: list[int]) -> None:
    all_metrics = [used(seed) for seed in seeds]
    joint = shown(all_metrics[0], *map(told, all_metrics[1:]))
    expected = added([shown(one) for one in all_metrics])
    assert {key: value for key, value in joint.items() if value} == pytest.approx(
        {key: value for key, value in expected.items() if value}
    )


@pytest.mark.full
@given(seeds=st.lists(st.integers(0, 9), min_size=2, max_size=2))
def test_what_an_earlier_process_counted_is_added_to_a_snapshot(seeds: list[int]) -> None:
    one, earlier = map(used, seeds)
    legs = MetricsSnapshot({}, [], {"a": (1, 2), "b": (3, 4)}, {}, {})
    joint = one.snapshot({"a": (10, 20)}, {"requests_queued": 1}, {}).with_counts_of(told(earlier)).with_counts_of(legs)
    empty = RouterMetrics()
    assert shown(empty, joint) == pytest.approx(shown(one, told(earlier)))
    assert joint.worker_legs == {"a": (11, 22), "b": (3, 4)}
    assert joint.gauges == {"requests_queued": 1}


def test_merging_changes_nothing() -> None:
    metrics, other = used(3), used(5)
    before = shown(metrics)
    shown(metrics, told(other))
    metrics.snapshot({}, {}, {}).with_counts_of(told(other))
    assert shown(metrics) == before

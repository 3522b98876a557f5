"""What an instance publishes of its load: when, and what goes before each of SGLang's messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_ext.engine.hooks import load_reports
from sglang_ext.engine.hooks.load_reports import QUEUES_INTERVAL_S, STEP_INTERVAL_S, SUPPLEMENT_TOPIC, _LoadReports


class Published:
    """Stands for SGLang's publisher and its socket: what was sent, in order."""

    enable = True

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._socket = self

    def publish_load_stat(self, load_provider: Any, force: bool = False, snapshot: Any = None) -> None:
        assert force
        assert snapshot is None
        load = load_provider()
        self.sent.append(load.num_running_reqs)

    def send_multipart(self, parts: tuple[bytes, bytes, bytes]) -> None:
        topic, number, content = parts
        assert topic == SUPPLEMENT_TOPIC
        assert len(number) == 8
        self.sent.append(msgspec.msgpack.decode(content))

    def taken(self) -> list[Any]:
        taken, self.sent = self.sent, []
        return taken


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(load_reports, "time", made)
    return made


def load(running: int, awaiting_tokens: int = 0) -> SimpleNamespace:
    return SimpleNamespace(num_running_reqs=running, num_total_tokens=500, num_active_tokens=500 - awaiting_tokens)


def test_decode_steps_are_reported_at_times_and_all_else_at_once(clock: Clock) -> None:
    published = Published()
    reports = _LoadReports(SimpleNamespace(), published)
    reports.publish(lambda: load(1))
    assert published.taken() == [{"awaiting_tokens": 0}, 1]
    for _ in range(10):
        reports.publish(lambda: load(2))
    assert not published.taken()
    clock.now_s += STEP_INTERVAL_S
    reports.publish(lambda: load(3))
    reports.publish(lambda: load(4), force=True)
    reports.publish(lambda: load(9), True, load(5, 70))
    reports.publish(lambda: load(6, 70), force=True)
    assert published.taken() == [3, 4, {"awaiting_tokens": 70}, 5, 6]


def test_who_comes_later_is_informed_within_a_second(clock: Clock) -> None:
    published = Published()
    reports = _LoadReports(SimpleNamespace(_laps=None), published)
    reports.publish(lambda: load(1), force=True)
    published.taken()
    clock.now_s += QUEUES_INTERVAL_S
    reports.publish(lambda: load(1), force=True)
    assert published.taken() == [{"awaiting_tokens": 0}, 1]


@pytest.mark.parametrize("is_deciding", [True, False])
def test_queues_come_once_a_second_and_with_another_mode(clock: Clock, is_deciding: bool) -> None:
    laps = SimpleNamespace(agreement=SimpleNamespace(is_deciding=is_deciding), generation=0)
    scheduler = SimpleNamespace(_laps=laps, queue_status=lambda: {"generation": laps.generation})
    published = Published()
    reports = _LoadReports(scheduler, published)

    def queues() -> list[Any]:
        reports.publish(lambda: load(1), force=True)
        return [one["queues"] for one in published.taken() if isinstance(one, dict) and "queues" in one]

    assert queues() == ([{"generation": 0}] if is_deciding else [])
    clock.now_s += QUEUES_INTERVAL_S / 2
    assert not queues()
    laps.generation = 1
    assert queues() == ([{"generation": 1}] if is_deciding else [])
    clock.now_s += QUEUES_INTERVAL_S / 2
    assert not queues()
    clock.now_s += QUEUES_INTERVAL_S / 2
    assert queues() == ([{"generation": 1}] if is_deciding else [])

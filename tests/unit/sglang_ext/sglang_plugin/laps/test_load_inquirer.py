"""SGLang's load report counts parked prefills: as waiting, and for what they have left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("sglang_imported")


def request(seqlen: int, prefix_len: int = 0) -> Any:
    return SimpleNamespace(seqlen=seqlen, prefix_len=prefix_len, num_matched_prefix_tokens=prefix_len)


def stock_inquirer(waiting: list[Any], chunked: Any) -> Any:
    """SGLang's own, over these requests; what it does not need for them is absent."""
    from dataclasses import fields

    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer

    values = {field.name: None for field in fields(SchedulerLoadInquirer)} | {
        "disaggregation_mode": DisaggregationMode.PREFILL,
        "get_waiting_queue": lambda: waiting,
        "waiting_queue_prefix_matched": lambda: True,
        "get_recent_cache_hit_rate": lambda: 0.0,
        "get_chunked_req": lambda: chunked,
    }
    return SchedulerLoadInquirer(**values)


def over(stock: Any, parked: list[Any]) -> Any:
    from sglang_ext.sglang_plugin.laps.load_inquirer import ParkedLoadInquirer

    return ParkedLoadInquirer.over(stock, lambda: parked)


def test_tokens_that_parked_requests_have_left_are_waiting() -> None:
    stock = stock_inquirer([request(100), request(50, 20)], chunked=request(300, 200))
    parked = [request(1000, 400), request(80, 79)]
    waiting_tokens = stock.get_num_waiting_uncached_tokens()
    assert waiting_tokens == 100 + 30 + 100
    ours = over(stock, parked)
    assert ours.get_num_waiting_uncached_tokens() == waiting_tokens + 600 + 1
    assert ours._get_num_pending_tokens() == stock._get_num_pending_tokens() + 601
    assert ours._get_num_pending_tokens(32) == stock._get_num_pending_tokens(32) + 601


def test_it_sees_requests_that_are_parked_later() -> None:
    parked: list[Any] = []
    ours = over(stock_inquirer([], chunked=None), parked)
    assert ours.get_num_waiting_uncached_tokens() == 0
    parked.append(request(10, 4))
    assert ours.get_num_waiting_uncached_tokens() == 6
    parked.clear()
    assert ours.get_num_waiting_uncached_tokens() == 0


def test_the_load_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.load_snapshot import LoadSnapshot
    from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer

    base = LoadSnapshot(num_running_reqs=1, num_waiting_reqs=2, num_total_tokens=50, num_active_tokens=40)
    monkeypatch.setattr(SchedulerLoadInquirer, "get_loads", lambda self: base)
    parked = [request(1000, 400)]
    ours = over(stock_inquirer([], chunked=None), parked)
    loads = ours.get_loads()
    assert (loads.num_waiting_reqs, loads.num_total_tokens, loads.num_active_tokens) == (3, 650, 640)
    assert loads.num_running_reqs == 1
    assert base.num_waiting_reqs == 2
    parked.clear()
    assert ours.get_loads() is base


def test_every_field_of_the_stock_inquirer_is_taken_over() -> None:
    from dataclasses import fields

    stock = stock_inquirer([request(3)], chunked=None)
    ours = over(stock, [])
    for field in fields(stock):
        assert getattr(ours, field.name) is getattr(stock, field.name)

"""What the scheduler replaces of SGLang's is there, with these arguments, and load reports count parked prefills."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.sglang_plugin.hook_table import V23
from sglang_ext.sglang_plugin.versions import installed_sglang

pytestmark = pytest.mark.usefixtures("sglang_imported")


# By name, the parameters that SGLang calls it with.
OVERRIDDEN = {
    "init_load_inquirer": [],
    "run_event_loop": [],
    "get_new_batch_prefill": ["running_batch"],
    "run_batch": ["batch", "pp_proxy_tensors"],
    "process_batch_result": ["batch", "result"],
    "is_fully_idle": ["for_health_check"],
    "abort_request": ["recv_req"],
    "process_pending_chunked_abort": [],
    "get_internal_state": ["recv_req"],
    "set_internal_state": ["recv_req"],
}
# What a newer SGLang has beside these, and ours hands on without a look.
PASSED_ON = {"is_fully_idle": {"ignore_waiting"}}
OVERRIDDEN_SINCE_23: dict[str, list[str]] = {"collect_inflight_reqs": [], "_poll_timeout_aborts": []}


@pytest.fixture(scope="module")
def schedulers(sglang_imported: None) -> tuple[Any, Any]:
    """Ours, and SGLang's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a CPU cannot do
        from sglang.srt.managers.scheduler import Scheduler

        from sglang_ext.sglang_plugin.laps.scheduler import LengthAwareScheduler

    return LengthAwareScheduler, Scheduler


def overridden() -> dict[str, list[str]]:
    installed = installed_sglang()
    assert installed is not None
    return OVERRIDDEN | (OVERRIDDEN_SINCE_23 if installed >= V23 else {})


def test_nothing_else_of_sglang_is_hidden(schedulers: tuple[Any, Any]) -> None:
    ours, stock = schedulers
    own = {name for name in vars(ours) if not name.startswith("__")}
    assert own & set(dir(stock)) == set(overridden())


def test_what_is_overridden_takes_these_arguments(schedulers: tuple[Any, Any]) -> None:
    _, stock = schedulers
    for name, expected in overridden().items():
        _, *parameters = inspect.signature(getattr(stock, name)).parameters.values()
        assert [parameter.name for parameter in parameters[: len(expected)]] == expected, name
        more = {parameter.name for parameter in parameters[len(expected) :]}
        assert more <= PASSED_ON.get(name, set()), name


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
    from sglang_ext.sglang_plugin.laps.scheduler import ParkedLoadInquirer

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

"""What the scheduler replaces of SGLang's is there, with these arguments; whatever else it has is in nobody's way."""

from __future__ import annotations

import inspect
import warnings
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

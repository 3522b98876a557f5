"""Which SGLang arguments exclude LAPS: each one alone, in one line that names it and the way out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_ext.sglang_plugin.laps.compatibility import conflict

FITTING = {
    "disaggregation_mode": "prefill",
    "schedule_policy": "fcfs",
    "pp_size": 1,
    "enable_dp_attention": False,
    "enable_mixed_chunk": False,
    "enable_priority_scheduling": False,
    "enable_prefill_delayer": False,
    "optimistic_prefill_attempts": 0,
    "disaggregation_decode_allocation_policy": "eager",
    "chunked_prefill_size": 256,
    "enable_hierarchical_cache": False,
}


def test_the_arguments_of_a_worker_fit() -> None:
    assert conflict(SimpleNamespace(**FITTING)) is None


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"disaggregation_mode": "null"}, "--disaggregation-mode"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
        ({"schedule_policy": "lpm"}, "--schedule-policy lpm"),
        ({"schedule_policy": "hrrn"}, "--schedule-policy hrrn"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"enable_priority_scheduling": True}, "--enable-priority-scheduling"),
        ({"enable_prefill_delayer": True}, "--enable-prefill-delayer"),
        ({"optimistic_prefill_attempts": 1}, "--optimistic-prefill-attempts"),
        (
            {"disaggregation_decode_allocation_policy": "prefill_complete"},
            "--disaggregation-decode-allocation-policy prefill_complete",
        ),
        ({"chunked_prefill_size": -1}, "--chunked-prefill-size"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
    ],
)
def test_each_conflict_is_named(changes: dict[str, object], names: str) -> None:
    problem = conflict(SimpleNamespace(**{**FITTING, **changes}))
    assert problem is not None
    assert problem.startswith(f"{names} does not go with --laps-mode (")
    assert problem.endswith("; use --laps-mode off")
    assert "\n" not in problem


def test_sglang_0_5_17_knows_one_allocation_policy_and_has_no_argument_for_it() -> None:
    arguments = {name: value for name, value in FITTING.items() if name != "disaggregation_decode_allocation_policy"}
    assert conflict(SimpleNamespace(**arguments)) is None


@pytest.mark.usefixtures("sglang_imported")
def test_the_arguments_exist_under_these_names() -> None:
    """A stub proves nothing about an argument that SGLang has renamed."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    assert set(FITTING) <= {field.name for field in msgspec.structs.fields(ServerArgs)}

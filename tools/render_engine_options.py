"""Write `docs/reference/engine-options.md`, SGLang's options by mechanism: `python tools/render_engine_options.py`.

Each option is given to the functions by which instances refuse arguments, so the page says what they say.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from sglang_ext.cpu import unserved_models
from sglang_ext.engine.versions import SUPPORTED_SGLANG
from sglang_ext.laps.sglang import laps_options
from sglang_ext.long_pool.sglang import cdsp_options
from sglang_ext.transfer.sglang import transfer_options

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "reference" / "engine-options.md"
# What the functions read, as a prefill instance on a CPU has it without further arguments.
DEFAULTS: dict[str, Any] = {
    "disaggregation_mode": "prefill",
    "schedule_policy": "fcfs",
    "chunked_prefill_size": 512,
    "pp_size": 1,
    "dp_size": 1,
    "dcp_size": 1,
    "attn_cp_size": 1,
    "pp_async_batch_depth": 0,
    "optimistic_prefill_attempts": 0,
    "disaggregation_decode_allocation_policy": "early",
    "speculative_algorithm": None,
    "speculative_eagle_topk": 1,
    "kv_cache_dtype": "auto",
    "device": "cpu",
    "disable_overlap_schedule": True,
    "disable_radix_cache": False,
    "enable_dynamic_chunking": False,
    "enable_hierarchical_cache": False,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "enable_hisparse": False,
    "enable_mixed_chunk": False,
    "enable_pd_role_switch": False,
    "enable_prefill_delayer": False,
    "enable_priority_scheduling": False,
}
# The rows, and what each sets.
OPTIONS: dict[str, dict[str, Any]] = {
    "--attn-cp-size 2": {"attn_cp_size": 2},
    "--chunked-prefill-size -1": {"chunked_prefill_size": -1},
    "--dcp-size 2": {"dcp_size": 2},
    "--disable-radix-cache": {"disable_radix_cache": True},
    "--disaggregation-decode-allocation-policy prefill_complete": {
        "disaggregation_decode_allocation_policy": "prefill_complete"
    },
    "--dp-size 2": {"dp_size": 2},
    "--enable-dynamic-chunking --pp-size 2": {"enable_dynamic_chunking": True, "pp_size": 2},
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--enable-hierarchical-cache --hicache-mem-layout page_first": {
        "enable_hierarchical_cache": True,
        "hicache_mem_layout": "page_first",
    },
    "--enable-hierarchical-cache --hicache-io-backend kernel": {
        "enable_hierarchical_cache": True,
        "hicache_io_backend": "kernel",
    },
    "--enable-hisparse": {"enable_hisparse": True},
    "--enable-mixed-chunk": {"enable_mixed_chunk": True},
    "--enable-pd-role-switch": {"enable_pd_role_switch": True},
    "--enable-prefill-delayer": {"enable_prefill_delayer": True},
    "--enable-priority-scheduling": {"enable_priority_scheduling": True},
    "--kv-cache-dtype fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "--optimistic-prefill-attempts 1": {"optimistic_prefill_attempts": 1},
    "--pp-async-batch-depth 1 --pp-size 2": {"pp_async_batch_depth": 1, "pp_size": 2},
    "--pp-size 2": {"pp_size": 2},
    "--schedule-policy lpm": {"schedule_policy": "lpm"},
    "--speculative-algorithm EAGLE": {"speculative_algorithm": "EAGLE"},
    "--speculative-algorithm EAGLE --speculative-eagle-topk 4": {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 4,
    },
    "--speculative-algorithm STANDALONE": {"speculative_algorithm": "STANDALONE"},
    "the overlap schedule, on a GPU": {"disable_overlap_schedule": False, "device": "cuda"},
}
# Each mechanism with the raw results of its run on a GPU; None: it has not run on one.
ON_A_GPU: dict[str, tuple[str, str | None]] = {
    "two queues (LAPS) on a prefill instance": ("one instance under load", "gpu-serve-h200-2026-11-26.json"),
    "prefill graphs": ("42 shapes, in SGLang too", "gpu-buckets-h200-2026-11-26.json"),
    "handshake, prefill to decode": ("two engines on one GPU, over NIXL", "gpu-two-engines-h200-2026-11-26.json"),
    "long pool": ("two engines on one GPU; not two GPUs", "gpu-two-engines-h200-2026-11-26.json"),
    "ring attention": ("members in two processes on one GPU", "gpu-ring-h200-2026-11-26.json"),
    "pipelines (`--pp-size`)": ("", None),
    "scores without decode": ("", None),
    "KV-parallel decode (`--dcp-size`)": ("", None),
    "undivided instances with two queues": ("", None),
    "role switches": ("", None),
    "two queues with a hierarchical cache": ("", None),
}
_HEAD = f"""# SGLang's options and versions by mechanism

<!-- made by `python tools/render_engine_options.py` -->

SGLang {SUPPORTED_SGLANG}, unmodified: [every hook](hooks.md) has the same target in both. The tests run the newer
one; two queues in undivided instances have not run on the older. Which model goes with what:
[model families](compatibility.md).

## Options

Arguments of SGLang's server, behind `--` of `up` and `worker`. `no`: the instance refuses to start, with the reason
below the table in one line. An argument that is not here goes with all of them, or has not been tried.

| argument | two queues (`--laps-mode`) | `--transfer-backend handshake` | long pool (`--cdsp-coordinator`) | on a CPU |
|---|---|---|---|---|
"""
_GPU = """
## What has run on a GPU

| mechanism | on an NVIDIA H200 | raw |
|---|---|---|
"""


class Arguments:
    """Stand for SGLang's ServerArgs, and record what is read."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self._values = {**DEFAULTS, **changes}
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return self._values[name]


def _pool_problem(arguments: Any) -> str | None:
    return _queue_problem(arguments) or _transfer_problem(arguments) or cdsp_options.conflict(arguments)


def _queue_problem(arguments: Any) -> str | None:
    return laps_options.conflict(arguments)


def _transfer_problem(arguments: Any) -> str | None:
    return transfer_options.conflict(arguments, has_staging_buffer=False)


def _cpu_problem(arguments: Any) -> str | None:
    with mock.patch.object(unserved_models, "_has_kernels", return_value=False):  # of a build with AMX
        return unserved_models.argument_conflict(arguments)


MECHANISMS: tuple[Callable[[Any], str | None], ...] = (_queue_problem, _transfer_problem, _pool_problem, _cpu_problem)


def render() -> str:
    """Return the document's text."""
    numbers: dict[str, int] = {}

    def cell(reason: str | None) -> str:
        return "yes" if reason is None else f"no ({numbers.setdefault(reason, len(numbers) + 1)})"

    rows = []
    for option, changes in OPTIONS.items():
        cells = " | ".join(cell(problem(Arguments(changes))) for problem in MECHANISMS)
        shown = option if option.startswith("the ") else f"`{option}`"
        rows.append(f"| {shown} | {cells} |\n")
    reasons = "".join(f"{number}. {reason}\n" for reason, number in numbers.items())
    on_a_gpu = "".join(
        f"| {mechanism} | {what or 'no'} | {'' if raw is None else f'[file](../../bench/results/{raw})'} |\n"
        for mechanism, (what, raw) in ON_A_GPU.items()
    )
    return f"{_HEAD}{''.join(rows)}\nReasons:\n\n{reasons}{_GPU}{on_a_gpu}"


def read_attributes() -> set[str]:
    """Return every argument that the functions read."""
    read: set[str] = set()
    for changes in ({}, {"pp_size": 2}, {"device": "cuda"}, {"speculative_algorithm": "EAGLE"}):
        for problem in MECHANISMS:
            arguments = Arguments(changes)
            problem(arguments)
            read |= arguments.read
    return read


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")

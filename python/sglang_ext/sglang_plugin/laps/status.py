"""What a prefill instance says of its queues: `GET /laps`, and the answer to a mode switch.

The router's controller reads this, so the names are a contract between the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_ext.policy.laps.round_plan import ClassReport, LapsMode, RoundSnapshot
from sglang_ext.types import LengthClass

if TYPE_CHECKING:
    from sglang_ext.sglang_plugin.laps.instance import LapsInstance

STATUS_KEY = "sglang_ext_laps"
MODE_PARAMETER = "sglang_ext_laps_mode"
# SGLang's control message carries numbers alone.
MODES: dict[int | float, str] = {number: mode.value for number, mode in enumerate(LapsMode)}


def mode_number(mode: LapsMode) -> int:
    """What stands for a mode in SGLang's control message."""
    return list(LapsMode).index(mode)


def status_of(laps: LapsInstance, snapshot: RoundSnapshot, *, locked_tokens: int) -> dict[str, Any]:
    """The status as JSON-safe values. `locked_tokens`: cached KV that running or parked requests hold."""
    report = laps.policy.report(snapshot)
    return {
        "mode": report.mode.value,
        "generation": laps.generation,
        "short": _class_status(report.short, laps.clock.utilisation(snapshot.now_s, LengthClass.SHORT)),
        "long": _class_status(report.long, laps.clock.utilisation(snapshot.now_s, LengthClass.LONG)),
        "parked": report.parked,
        "parks": laps.parks,
        "utilisation": laps.clock.utilisation(snapshot.now_s),
        "boundary_tokens": report.boundary_tokens,
        "round_s": report.round_s,
        "short_share": report.short_share,
        "awd": {"window_s": report.window_s, "depth": report.depth, "short_rate_per_s": report.short_rate_per_s},
        "fit": report.fit._asdict(),
        "kv": {"free_tokens": snapshot.free_kv_tokens, "locked_tokens": locked_tokens},
    }


def _class_status(report: ClassReport, utilisation: float) -> dict[str, Any]:
    return {
        "requests": report.requests,
        "tokens": report.new_tokens,
        "backlog_s": report.backlog_s,
        "oldest_wait_s": report.oldest_wait_s,
        "slo_violation_rate": report.slo_violation_rate,
        "tardiness": report.tardiness,
        "utilisation": utilisation,
    }

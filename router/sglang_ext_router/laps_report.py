"""What a prefill instance of ours says on `GET /laps`, read strictly; a stock SGLang has no such path."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from sglang_ext.policy.laps.round_plan import LapsMode
from sglang_ext.policy.pools.instance_pressure import InstanceSignals
from sglang_ext.types import LengthClass

REPORT_PATH = "/laps"
MODE_PATH = "/laps/mode"


class ClassReport(NamedTuple):
    """One length class on one instance."""

    requests: int  # queued
    tokens: int
    backlog_s: float  # predicted time to prefill them
    oldest_wait_s: float
    late_share: float  # of the prefills that ended lately, after their deadline
    lateness: float  # mean of max(0, end - deadline) / (deadline - arrival) over them
    utilisation: float  # share of the last seconds that this class kept the instance busy


class LapsReport(NamedTuple):
    """The whole report, as far as the router uses it."""

    mode: LapsMode
    generation: int  # grows with every switch
    short: ClassReport
    long: ClassReport
    parked: int  # long prefills that wait between two chunks
    utilisation: float

    def signals(self, pool: LengthClass) -> InstanceSignals:
        """What the controller judges a member of this pool by."""
        own, stray = (self.short, self.long) if pool is LengthClass.SHORT else (self.long, self.short)
        return InstanceSignals(
            self.short.backlog_s,
            self.long.backlog_s,
            own.late_share,
            own.lateness,
            self.utilisation,
            min(stray.utilisation, self.utilisation),
        )


def read_report(answer: object) -> LapsReport:
    """Read an instance's answer; ValueError says what is wrong with it. Fields that are not used may be anything."""
    fields = _object(answer, "the answer")
    mode = fields.get("mode")
    if not isinstance(mode, str) or mode not in tuple(LapsMode):
        raise ValueError(f"mode is {mode!r}")
    return LapsReport(
        LapsMode(mode),
        _count(fields, "generation"),
        _read_class(fields, "short"),
        _read_class(fields, "long"),
        _count(fields, "parked"),
        _number(fields, "utilisation"),
    )


def _read_class(fields: Mapping[str, object], name: str) -> ClassReport:
    one = _object(fields.get(name), name)
    return ClassReport(
        _count(one, "requests"),
        _count(one, "tokens"),
        *(_number(one, field) for field in ("backlog_s", "oldest_wait_s", "late_share", "lateness", "utilisation")),
    )


def _object(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return value


def _count(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return value


def _number(fields: Mapping[str, object], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return float(value)

"""The file of improvement rates: the table that planners look up, and where it comes from."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from sglang_ext import __version__
from sglang_ext.policy.cdsp.improvement_rate import TABLE_VERSION
from sglang_ext.profiling.rates import WARM_UP_SHARE, Objective, RateChoice, RatesSearch


class Provenance(NamedTuple):
    """What a search was made from."""

    command: str
    engine: str
    engine_sha256: str | None  # of a profile's file
    workload: str
    workload_sha256: str


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def describe_search(search: RatesSearch) -> dict[str, object]:
    """The search as plain JSON values."""
    return {
        "system": search.system.value,
        "instances": search.cluster.instances,
        "instances_per_node": search.cluster.instances_per_node,
        "kv_tokens": search.cluster.kv_tokens,
        "sp_sizes": [one.size for one in search.candidates],
        "prompts": len(search.lengths),
        "requests": search.requests,
        "warm_up_share": WARM_UP_SHARE,
        "seeds": list(search.seeds),
        "arrival_rates": list(search.arrival_rates),
        "candidates": list(search.improvement_rates),
    }


def write_rates(
    path: Path, search: RatesSearch, objective: Objective, choices: Sequence[RateChoice], provenance: Provenance
) -> None:
    """Write the file, whole or not at all."""
    content = {
        "version": TABLE_VERSION,
        "rates": [
            {
                "arrivals_per_s": choice.arrivals_per_s,
                "improvement_rate": choice.best.improvement_rate,
                "ttft_s": choice.best.ttft_s._asdict(),
                "tried": [
                    {"improvement_rate": one.improvement_rate, "ttft_s": one.ttft_s._asdict()} for one in choice.tried
                ],
            }
            for choice in choices
        ],
        "provenance": {
            **provenance._asdict(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"sglang-ext": __version__, "python": platform.python_version()},
            "objective": objective.value,
            **describe_search(search),
        },
    }
    partial = path.with_name(f"{path.name}.writing")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)

"""What a chunk costs in a simulation: the Tetris Table 1 fit, or a cost profile in a JSON file.

A profile for a cluster lists SP sizes, one for single instances the coefficients of LAPS's model:

    {"model": "...", "device": "...", "sp": [{"size": 1, "a_s": 0.03, "b_s_per_token": 5.6e-5,
                                               "c_s_per_token2": 2.5e-9, "d_s_per_token2": 1.3e-9}]}
    {"model": "...", "device": "...", "prefill": {"alpha_s": 1e-10, "token_s": 2e-5, "read_s": 0.0, "kappa_s": 0.01}}
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from sglang_ext.policy.cdsp.records import SpCandidate, SpCost
from sglang_ext.policy.cdsp.table1 import fitted_candidates
from sglang_ext.policy.prefill_cost import CostCoefficients

TABLE1 = "table1"


class EngineError(ValueError):
    """The engine cannot be used; the text is one line for the user."""


class SimEngine(NamedTuple):
    """Costs of one model on one device."""

    name: str
    candidates: tuple[SpCandidate, ...]  # SP sizes; at least one
    coefficients: CostCoefficients  # of a single instance


def load_engine(name: str, largest_size: int = 16) -> SimEngine:
    """Return `table1` (LLaMA3-8B on A100, with SP sizes up to `largest_size`) or the profile in the file `name`.

    A profile with only one of the two parts gives the other: Eq. 1 of Tetris with c = 2d is LAPS's model on SP 1.
    EngineError for a file that is none.
    """
    if name == TABLE1:
        candidates = fitted_candidates(largest_size)
        return SimEngine("Tetris Table 1 fit, LLaMA3-8B on A100", candidates, _single(candidates))
    path = Path(name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"{name} is neither {TABLE1} nor a profile that can be read: {error.strerror}") from None
    except ValueError:
        raise EngineError(f"{name} is not JSON") from None
    if not isinstance(content, dict) or not ("sp" in content or "prefill" in content):
        raise EngineError(f'{name}: a profile has "sp" or "prefill"')
    title = " on ".join(str(content[part]) for part in ("model", "device") if part in content) or path.name
    coefficients = _prefill(name, content["prefill"]) if "prefill" in content else None
    if "sp" in content:
        candidates = _candidates(name, content["sp"])
    else:
        assert coefficients is not None
        cost = SpCost(
            coefficients.kappa_s,
            coefficients.token_s,
            2 * coefficients.alpha_s,
            coefficients.alpha_s,
        )
        candidates = (SpCandidate(1, cost),)
    return SimEngine(title, candidates, coefficients or _single(candidates))


def _single(candidates: tuple[SpCandidate, ...]) -> CostCoefficients:
    smallest = min(candidates, key=lambda candidate: candidate.size)
    cost = smallest.cost
    assert isinstance(cost, SpCost)
    return CostCoefficients(cost.d_s_per_token2, cost.b_s_per_token, 0.0, cost.a_s)


def _candidates(name: str, entries: object) -> tuple[SpCandidate, ...]:
    if not isinstance(entries, list) or not entries:
        raise EngineError(f'{name}: "sp" is a list of at least one SP size')
    fields = ("a_s", "b_s_per_token", "c_s_per_token2", "d_s_per_token2")
    candidates = []
    for entry in entries:
        values = [_number(name, "sp", entry, field) for field in fields]
        size = _number(name, "sp", entry, "size")
        if size != int(size) or size < 1:
            raise EngineError(f'{name}: "sp": size {size:g} is not a whole number of at least 1')
        candidates.append(SpCandidate(int(size), SpCost(*values)))
    sizes = [candidate.size for candidate in candidates]
    if len(set(sizes)) < len(sizes):
        raise EngineError(f'{name}: "sp" has a size twice')
    return tuple(candidates)


def _prefill(name: str, entry: object) -> CostCoefficients:
    fields = CostCoefficients._fields
    coefficients = CostCoefficients(*(_number(name, "prefill", entry, field) for field in fields))
    if coefficients.token_s == 0 and coefficients.alpha_s == 0:
        raise EngineError(f'{name}: "prefill": a token costs nothing')
    return coefficients


def _number(name: str, part: str, entry: object, field: str) -> float:
    value = entry.get(field) if isinstance(entry, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise EngineError(f'{name}: "{part}": {field} must be a number of at least 0')
    return float(value)

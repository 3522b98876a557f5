"""Describes what the measurements should show, and whether they do: pure, so that a dry run exercises all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SMALL_TOKENS = 128


class Verdict(NamedTuple):
    """One aim. `value` None: not measured."""

    aim: str
    bound: float
    is_at_most: bool
    value: float | None

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.bound if self.is_at_most else self.value >= self.bound

    def line(self) -> str:
        word = {True: "yes", False: "NO ", None: "-  "}[self.holds]
        sign = "<=" if self.is_at_most else ">="
        value = "not measured" if self.value is None else f"{self.value:.3g}"
        return f"{word} {self.aim:<64} {value:>12} {sign} {self.bound:g}"


def bucket_verdicts(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """`rows`: `length_tokens`, `requests`, `prefix_tokens`, `floor_s`, `grid_s`, `eager_s`, `breakable_s`, `full_s`;
    None or absent where not measured. Worst of the buckets each, new prompts and re-prefills apart."""
    return [
        *_verdicts_of("", [row for row in rows if not row["prefix_tokens"]]),
        *_verdicts_of("re-prefill: ", [row for row in rows if row["prefix_tokens"]]),
    ]


def _verdicts_of(kind: str, rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:

    def worst(ratios: list[float], is_at_most: bool) -> float | None:
        return (max if is_at_most else min)(ratios) if ratios else None

    measured = [row for row in rows if row.get("grid_s")]
    small = [row for row in measured if row["length_tokens"] * row["requests"] <= SMALL_TOKENS]
    large = [row for row in measured if row["length_tokens"] * row["requests"] > SMALL_TOKENS]
    upstream = [
        min(row[name] for name in ("breakable_s", "full_s") if row.get(name)) / row["grid_s"]
        for row in measured
        if row.get("breakable_s") or row.get("full_s")
    ]
    over_eager = [row["eager_s"] / row["grid_s"] for row in small if row.get("eager_s")]
    return [
        Verdict(
            f"{kind}time over the floor, up to {SMALL_TOKENS} tokens",
            1.25,
            True,
            worst([row["grid_s"] / row["floor_s"] for row in small], True),
        ),
        Verdict(f"{kind}faster than eager, up to {SMALL_TOKENS} tokens", 1.5, False, worst(over_eager, False)),
        Verdict(
            f"{kind}time over the floor, above {SMALL_TOKENS} tokens",
            1.5,
            True,
            worst([row["grid_s"] / row["floor_s"] for row in large], True),
        ),
        Verdict(f"{kind}speed over the faster of upstream's", 0.98, False, worst(upstream, False)),
    ]


def capture_verdicts(capture: Mapping[str, Any] | None) -> list[Verdict]:
    """`capture`: `own_bytes_per_graph`, `pool_bytes`, `eager_peak_bytes`, `seconds_per_graph`, `seconds`."""

    def of(name: str, scale: float = 1.0) -> float | None:
        return None if capture is None or capture.get(name) is None else capture[name] / scale

    pool, peak = of("pool_bytes"), of("eager_peak_bytes")
    return [
        Verdict("MB per graph beyond the shared pool", 20, True, of("own_bytes_per_graph", 1e6)),
        Verdict("shared pool over the eager peak", 1.1, True, pool / peak if pool and peak else None),
        Verdict("s per graph", 0.5, True, of("seconds_per_graph")),
        Verdict("s for the whole grid", 30, True, of("seconds")),
    ]


AIM_CONCURRENCY = 64
STOCKS = ("stock", "stock-flashinfer")
AIM_RATE_PER_S = 360.0
# Of the time, spent before iterations by deciding: a tenth of what figure 6 is to gain.
MOST_DECIDING = 0.02


def figure_6_verdicts(systems: Mapping[str, Any]) -> list[Verdict]:
    """LAPS, figure 6, at 64 clients: everything against the faster of SGLang's own, with its default attention and with
    flashinfer's. `systems`: what `figure6.py` found, by name."""

    def at_aim(name: str) -> Mapping[str, Any] | None:
        return _level(systems.get(name, {}), "concurrency", AIM_CONCURRENCY)

    stocks = [level for level in map(at_aim, STOCKS) if level is not None]
    stock = max(stocks, key=lambda level: level["requests_per_s"], default=None)
    ours = at_aim("all")

    deciding = None if ours is None else ours.get("decisions", {}).get("share")

    def gain(name: str) -> float | None:
        return None if stock is None or ours is None else ours[name] / stock[name] - 1

    return [
        Verdict("figure 6: requests/s gained", 0.2, False, gain("requests_per_s")),
        Verdict("figure 6: mean latency gained", -0.2, True, gain("mean_s")),
        Verdict("figure 6: share of time in LAPS's decisions", MOST_DECIDING, True, deciding),
    ]


def _level(outcome: Mapping[str, Any], key: str, value: float) -> Mapping[str, Any] | None:
    """The level of load whose `key` is `value`, wherever it stands."""
    return next((level for level in outcome.get("levels", ()) if level[key] == value), None)


def figure_5_verdicts(windows: Mapping[str, Any]) -> list[Verdict]:
    """LAPS, figure 5, at 360 requests/s: the adaptive window against the best of the fixed ones in each respect."""
    found = {window: _level(outcome, "rate_per_s", AIM_RATE_PER_S) for window, outcome in windows.items()}

    def over_best_fixed(name: str, best: Callable[[Iterable[float]], float]) -> float | None:
        ends = {window: level[name] for window, level in found.items() if level is not None}
        adaptive = ends.pop("adaptive", None)
        return adaptive / best(ends.values()) if adaptive is not None and ends else None

    return [
        Verdict(
            "figure 5: mean latency, adaptive over the best fixed window", 1.1, True, over_best_fixed("mean_s", min)
        ),
        Verdict("figure 5: P90 latency, adaptive over the best fixed window", 1.1, True, over_best_fixed("p90_s", min)),
        Verdict(
            "figure 5: requests/s, adaptive over the best fixed window",
            0.95,
            False,
            over_best_fixed("requests_per_s", max),
        ),
    ]


def kernel_verdicts(kernels: Mapping[str, float]) -> list[Verdict]:
    """`kernels`: the ratios that `kernels.py` measures, absent where not measured."""
    aims = (
        ("flashinfer with log-sum-exp over without, blocks of 4k and more", "flashinfer_ratio", 0.9),
        ("Triton on striped shards over FlashAttention 2", "striped_ratio", 0.8),
        ("merge over copy bandwidth", "merge_ratio", 0.85),
        ("gather over copy bandwidth", "gather_ratio", 0.85),
        ("scatter over copy bandwidth", "scatter_ratio", 0.85),
    )
    return [Verdict(aim, bound, False, kernels.get(name)) for aim, name, bound in aims]


def two_engines_verdicts(arrangements: Mapping[str, Any]) -> list[Verdict]:
    """`arrangements`: what `two_engines.py` found, by name; what the device's workers refuse is not measured."""

    def share(found: Mapping[str, Any]) -> float | None:
        return (found["equal"] + found["ties"]) / found["answers"] if found.get("answers") else None

    return [
        Verdict(f"two engines, {name}: answers that are one instance's", 1.0, False, share(found))
        for name, found in arrangements.items()
    ]

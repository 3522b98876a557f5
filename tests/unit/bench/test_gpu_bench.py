"""What the GPU benchmark computes beside its measurements: floors, verdicts, and how its bundle is divided."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from gpu.buckets import REPREFILLS, parse_reprefills
from gpu.bundle import PACKAGES, divide, unpack
from gpu.floor import Ceilings, Shape, floor_s, prefill_bytes, prefill_operations
from gpu.model_shapes import SHAPES
from gpu.verdicts import bucket_verdicts, capture_verdicts, figure_5_verdicts, figure_6_verdicts, kernel_verdicts
from h200 import join_rows

SMALL = Shape(hidden=4, layers=2, heads=2, kv_heads=1, intermediate=8, vocabulary=10)


def test_bytes_and_operations_by_hand() -> None:
    # two layers of q, o: 2 x 16; k, v: 2 x 8; gate, up, down: 3 x 32
    assert SMALL.body_parameters == 2 * (32 + 16 + 96)
    assert SMALL.kv_bytes_per_token == 2 * 2 * 1 * 2 * 2
    weights = (288 + 40) * 2
    assert prefill_bytes(SMALL, 3, 2) == weights + 6 * 16 + 6 * 8
    assert prefill_bytes(SMALL, 3, 2, prefix_tokens=5) == weights + 16 * 16 + 6 * 8
    products = 2 * (6 * 288 + 2 * 40)
    assert prefill_operations(SMALL, 3, 2) == products + 4 * (2 * 6) * 4 * 2
    assert prefill_operations(SMALL, 3, 2, prefix_tokens=5) == products + 4 * (2 * 21) * 4 * 2


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"), [("qwen2.5-7b", 7.62, 56), ("qwen2.5-14b", 14.77, 192), ("qwen2.5-32b", 32.76, 256)]
)
def test_the_models_are_those(name: str, billions: float, kv_kib: int) -> None:
    shape = SHAPES[name]
    assert (shape.body_parameters + 2 * shape.head_parameters) / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.kv_bytes_per_token == kv_kib * 1024


def test_a_short_prefill_is_bound_by_memory_a_long_one_by_arithmetic() -> None:
    shape, ceilings = SHAPES["qwen2.5-7b"], Ceilings(4.0e12, 8.0e14)
    assert floor_s(shape, ceilings, 8, 1) == prefill_bytes(shape, 8, 1) / 4.0e12
    assert floor_s(shape, ceilings, 256, 64) == prefill_operations(shape, 256, 64) / 8.0e14
    assert floor_s(shape, ceilings, 8, 1) == pytest.approx(3.53e-3, rel=0.01)


def row(
    length: int, requests: int, grid: float, eager: float, breakable: float | None = None, prefix: int = 0
) -> dict[str, object]:
    return {
        "length_tokens": length,
        "requests": requests,
        "prefix_tokens": prefix,
        "floor_s": 1.0,
        "grid_s": grid,
        "eager_s": eager,
        "breakable_s": breakable,
    }


def test_verdicts_take_the_worst_bucket() -> None:
    rows = [row(8, 1, 1.1, 3.0, 1.2), row(64, 2, 1.2, 1.9, 1.3), row(256, 8, 1.4, 1.5, 1.3)]
    found = {verdict.aim: verdict for verdict in bucket_verdicts(rows)}
    assert found["time over the floor, up to 128 tokens"].value == 1.2
    assert found["faster than eager, up to 128 tokens"].value == pytest.approx(1.9 / 1.2)
    assert found["time over the floor, above 128 tokens"].value == 1.4
    assert found["speed over the faster of upstream's"].value == pytest.approx(1.3 / 1.4)
    assert [verdict.holds for verdict in found.values()] == [True, True, True, False, *[None] * 4]
    assert found["speed over the faster of upstream's"].line().startswith("NO ")


def test_reprefills_are_judged_apart() -> None:
    rows = [row(8, 1, 1.1, 3.0, 1.2), row(16, 1, 1.3, 2.6, 1.3, prefix=1024), row(64, 4, 1.4, 1.5, prefix=4096)]
    found = {verdict.aim: verdict.value for verdict in bucket_verdicts(rows)}
    assert found["time over the floor, up to 128 tokens"] == 1.1
    assert found["re-prefill: time over the floor, up to 128 tokens"] == 1.3
    assert found["re-prefill: faster than eager, up to 128 tokens"] == 2.0
    assert found["re-prefill: time over the floor, above 128 tokens"] == 1.4
    assert found["re-prefill: speed over the faster of upstream's"] == 1.0


def test_reprefills_as_they_are_written() -> None:
    assert parse_reprefills("16x4+1024,8x1+32") == [(16, 4, 1024), (8, 1, 32)]
    assert parse_reprefills("") == []
    for bucket in parse_reprefills(REPREFILLS):
        assert bucket.length_tokens * bucket.requests <= 16384
        assert 0 < bucket.prefix_tokens * bucket.requests <= 16384
    for wrong in ("16", "16x1+2+3", "axb+c"):
        with pytest.raises((ValueError, TypeError)):
            parse_reprefills(wrong)


def test_rows_of_all_modes_are_joined_by_bucket() -> None:
    ours = {"rows": [row(8, 1, 1.0, 2.0), row(8, 1, 1.5, 2.5, prefix=32)]}
    ours |= {"read_bytes_per_s": 1e12, "operations_per_s": 1e14}
    upstream = {
        "breakable": {"rows": [{"length_tokens": 8, "requests": 1, "prefix_tokens": 32, "breakable_s": 7.0}]},
        "full": {"error": "none", "rows": []},
    }
    new, again = join_rows("tiny", ours, upstream)
    assert (new["breakable_s"], again["breakable_s"], again["full_s"]) == (None, 7.0, None)
    ceilings = Ceilings(1e12, 1e14)
    assert again["floor_s"] == floor_s(SHAPES["tiny"], ceilings, 8, 1, 32) > new["floor_s"]


def test_what_was_not_measured_is_not_judged() -> None:
    verdicts = [*bucket_verdicts([]), *capture_verdicts(None), *kernel_verdicts({}), *figure_6_verdicts({})]
    verdicts += figure_5_verdicts({})
    assert {verdict.holds for verdict in verdicts} == {None}
    assert all("not measured" in verdict.line() for verdict in verdicts)
    no_upstream = bucket_verdicts([row(8, 1, 1.1, 3.0)])[3]
    assert no_upstream.value is None


def test_capture_and_kernels() -> None:
    capture = {
        "own_bytes_per_graph": 21e6,
        "pool_bytes": 100,
        "eager_peak_bytes": 100,
        "seconds_per_graph": 0.4,
        "seconds": 31.0,
    }
    assert [verdict.holds for verdict in capture_verdicts(capture)] == [False, True, True, False]
    assert [verdict.holds for verdict in kernel_verdicts({"merge_ratio": 0.9, "gather_ratio": 0.5})] == [
        *(None, None, True, False, None)
    ]


def test_figure_6_compares_the_highest_concurrency() -> None:
    def system(*ends: tuple[float, float]) -> dict[str, object]:
        return {"levels": [{"requests_per_s": rate, "mean_s": mean} for rate, mean in ends]}

    found = {"systems": {"stock": system((1, 9), (10, 2)), "all": system((1, 1), (13, 1.5)), "graphs": {"error": "x"}}}
    assert [verdict.value for verdict in figure_6_verdicts(found)] == [pytest.approx(0.3), pytest.approx(-0.25)]
    assert [verdict.holds for verdict in figure_6_verdicts(found)] == [True, True]
    without = {"systems": {"stock": system((10, 2)), "all": {"not_measured": "too old"}}}
    assert {verdict.value for verdict in figure_6_verdicts(without)} == {None}


def test_a_bundle_is_divided_first_fit_largest_first() -> None:
    assert divide({"a": 5, "b": 4, "c": 3, "d": 2}, 7) == [["a", "d"], ["b", "c"]]
    assert divide({"huge": 9, "a": 1}, 7) == [["huge"], ["a"]]


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    assert len(PACKAGES) == len({package.partition("==")[0] for package in PACKAGES})
    with pytest.raises(ValueError, match=r"no wheel of orjson==3\.13\.0"):
        unpack([], tmp_path, ["orjson==3.13.0"])

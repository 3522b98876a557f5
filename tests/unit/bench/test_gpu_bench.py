"""What the GPU benchmark computes beside its measurements: floors, verdicts, and how its bundle is divided."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from gpu import buckets, bundle
from gpu.buckets import REPREFILLS, Bucket, in_order, parse_reprefills
from gpu.bundle import (
    CARRIED_BYTES,
    GROWTH_BYTES,
    LOCK,
    PACKAGES,
    lay_own,
    locked,
    pack,
    part_limit_bytes,
    repository_files,
    unpack,
    unpack_wheels,
)
from gpu.floor import Ceilings, Shape, floor_s, prefill_bytes, prefill_operations
from gpu.judgement import join_rows
from gpu.model_shapes import SHAPES
from gpu.verdicts import bucket_verdicts, capture_verdicts, figure_5_verdicts, figure_6_verdicts, kernel_verdicts

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
    measured = {"read_bytes_per_s": 1e12, "operations_per_s": 1e14}
    steps = {
        "grid": {"rows": [row(8, 1, 1.5, 2.5, prefix=32), row(8, 1, 1.0, 2.0)], **measured},
        "breakable": {
            "rows": [{"length_tokens": 8, "requests": 1, "prefix_tokens": 32, "breakable_s": 7.0}],
            **measured,
        },
        "full": {"error": "none"},
    }
    new, again = join_rows("tiny", steps)
    assert (new["grid_s"], new.get("breakable_s"), new.get("full_s")) == (1.0, None, None)
    assert (again["grid_s"], again["eager_s"], again["breakable_s"]) == (1.5, 2.5, 7.0)
    ceilings = Ceilings(1e12, 1e14)
    assert again["floor_s"] == floor_s(SHAPES["tiny"], ceilings, 8, 1, 32)
    assert new["floor_s"] == floor_s(SHAPES["tiny"], ceilings, 8, 1)
    # upstream's alone, from a command in which the grid was not measured
    (alone,) = join_rows("tiny", {"breakable": steps["breakable"]})
    assert alone["breakable_s"] == 7.0


def test_upstreams_full_graphs_hold_all_requests_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "HAS_GPU", True)
    options = {
        mode: buckets.engine_options(Path("/m"), mode, None, "bfloat16", [8, 256], [1, 64])
        for mode in ("grid", "breakable", "full")
    }
    assert options["full"]["cuda_graph_config"] == {"prefill": {"full_prefill_max_req": 64}}
    assert options["full"]["attention_backend"] == "flashinfer"
    assert options["breakable"]["cuda_graph_bs_prefill"] == [8, 256, 512, 16384]
    assert options["grid"]["cuda_graph_backend_prefill"] == "disabled"
    for one in options.values():
        assert (one["chunked_prefill_size"], one["max_running_requests"]) == (16384, 64)


def test_what_takes_least_is_measured_first() -> None:
    given = [Bucket(256, 64), Bucket(8, 1), Bucket(16, 1, 4096), Bucket(8, 64)]
    assert in_order(given) == [Bucket(8, 1), Bucket(16, 1, 4096), Bucket(8, 64), Bucket(256, 64)]


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


def test_figure_6_is_judged_at_64_clients_by_the_faster_stock() -> None:
    def system(**levels: tuple[float, float]) -> dict[str, object]:
        return {
            "levels": [
                {"concurrency": int(name[1:]), "requests_per_s": rate, "mean_s": mean}
                for name, (rate, mean) in levels.items()
            ]
        }

    found = {
        "stock": system(c64=(9, 3), c8=(2, 9)),
        "stock-flashinfer": system(c8=(50, 0.1), c64=(10, 2)),
        "all": system(c64=(13, 1.5), c1=(1, 1)),
        "graphs": {"error": "x"},
    }
    gained = [pytest.approx(0.3), pytest.approx(-0.25)]
    assert [verdict.value for verdict in figure_6_verdicts(found)] == [*gained, None]
    assert [verdict.holds for verdict in figure_6_verdicts(found)] == [True, True, None]
    for share, holds in ((0.001, True), (0.05, False)):
        (at_aim, _) = found["all"]["levels"]  # type: ignore[misc]
        at_aim["decisions"] = {"batches": 100, "mean_s": 1e-4, "share": share}
        assert [verdict.holds for verdict in figure_6_verdicts(found)] == [True, True, holds]
    del at_aim["decisions"]
    for without in ({"stock": system(c8=(10, 2)), "all": found["all"]}, {"stock": found["stock"]}):
        assert {verdict.value for verdict in figure_6_verdicts(without)} == {None}


def test_a_part_and_the_repository_are_carried_together(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    limit_bytes = part_limit_bytes(root)
    repository_bytes = sum((root / name).stat().st_size for name in repository_files(root))
    assert limit_bytes + repository_bytes < CARRIED_BYTES
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name, size in (("tracked", 1000), ("new", 200), (".gitignore", 8), ("ignored", 5000)):
        (tmp_path / name).write_bytes(b"ignored\n"[:size].ljust(size, b"x"))
    subprocess.run(["git", "-C", tmp_path, "add", "tracked"], check=True)
    assert repository_files(tmp_path) == [".gitignore", "new", "tracked"]
    assert part_limit_bytes(tmp_path) == CARRIED_BYTES - GROWTH_BYTES - 1208
    (tmp_path / "tracked").unlink()  # gone, and still in the index
    assert part_limit_bytes(tmp_path) == CARRIED_BYTES - GROWTH_BYTES - 208


@pytest.mark.full
@given(st.lists(st.integers(0, 60_000), max_size=6), st.integers(12_000, 60_000))
def test_a_site_comes_out_of_its_parts_as_it_was(sizes: list[int], limit_bytes: int) -> None:
    draw = random.Random(str(sizes))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "BLOCK_BYTES", 10_000)
        out, site = Path(folder) / "out", Path(folder) / "out/site"
        (site / "package").mkdir(parents=True)
        (out / "part-1-of-9.xz").write_bytes(b"of an earlier time")
        for number, size in enumerate(sizes):
            # half of it compresses to nothing
            (site / f"package/file-{number}").write_bytes(draw.randbytes(size // 2) + bytes(size - size // 2))
        (site / "program").write_text("#!/bin/sh\n")
        (site / "program").chmod(0o755)
        count = pack(out, limit_bytes)
        parts = list(out.glob("*.xz"))
        assert {path.name for path in parts} == {f"part-{number}-of-{count}.xz" for number in range(1, count + 1)}
        assert all(path.stat().st_size <= limit_bytes for path in parts)
        unpack(out, Path(folder) / "there")
        there = Path(folder) / "there/site"
        for path in site.rglob("*"):
            target = there / path.relative_to(site)
            assert target.is_dir() if path.is_dir() else target.read_bytes() == path.read_bytes()
        assert (there / "program").stat().st_mode & 0o111
        assert len(list(there.rglob("*"))) == len(list(site.rglob("*")))


def test_missing_and_damaged_parts_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["bundle.py", *map(str, arguments)])
        assert bundle.main() == 1
        return capsys.readouterr().err.strip()

    monkeypatch.setattr(bundle, "BLOCK_BYTES", 4096)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/noise").write_bytes(random.Random(1).randbytes(40_000))
    with pytest.raises(ValueError, match="a block of 4"):
        pack(tmp_path, 3000)
    assert pack(tmp_path, 10_000) == 5
    first, *_, last = sorted(tmp_path.glob("*.xz"))
    content = last.read_bytes()
    last.write_bytes(content[:-1000])
    assert run("unpack", tmp_path, tmp_path / "there").startswith("bundle.py unpack: ")
    last.unlink()
    first.unlink()
    assert run("unpack", tmp_path, tmp_path / "there") == f"bundle.py unpack: {tmp_path} has no part 1, 5 of 5"
    assert (
        run("unpack", tmp_path / "none", tmp_path) == f"bundle.py unpack: {tmp_path / 'none'} has no part at all of any"
    )
    monkeypatch.setattr(sys, "argv", ["bundle.py", "pack", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        bundle.main()
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"pack: there is no {tmp_path / 'none/site'}")


def test_the_bundle_is_of_the_locked_versions(tmp_path: Path) -> None:
    assert len(PACKAGES) == len(set(PACKAGES))
    found = dict(one.split("==") for one in locked(PACKAGES))
    assert list(found) == list(PACKAGES)
    assert f"sglang=={found['sglang']}" in LOCK.read_text(encoding="utf-8").splitlines()
    lock = tmp_path / "some.lock"
    lock.write_text("# torch==1\ntorch==2.14.1\n")
    assert locked(["torch"], lock) == ["torch==2.14.1"]
    with pytest.raises(ValueError, match=r"some\.lock has no triton, nixl"):
        locked(["triton", "torch", "nixl"], lock)


def test_what_is_compiled_here_is_laid_beside_its_sources(tmp_path: Path) -> None:
    for name in ("python/package/one.so", "router/two.so"):
        path = tmp_path / "site/own" / name
        path.parent.mkdir(parents=True)
        path.write_text(name)
    for folder in ("python/package", "router"):
        (tmp_path / "repository" / folder).mkdir(parents=True)
    (tmp_path / "repository/router/two.so").write_text("of an earlier time")
    assert lay_own(tmp_path / "site", tmp_path / "repository") == 2
    found = {str(path.relative_to(tmp_path / "repository")) for path in (tmp_path / "repository").rglob("*.*")}
    assert found == {"python/package/one.so", "router/two.so"}
    assert (tmp_path / "repository/router/two.so").read_text() == "router/two.so"
    assert lay_own(tmp_path / "none", tmp_path / "repository") == 0


def test_of_a_wheel_its_wanted_entries_are_unpacked(tmp_path: Path) -> None:
    kept = ["transformers/models/qwen2/modeling_qwen2.py", "transformers/models/__init__.py", "modular_x.py"]
    left = ["transformers/models/qwen2/modular_qwen2.py", "tools/a.py", "orjson-3.13.0.data/scripts/x", "nixl_ep/a.py"]
    with zipfile.ZipFile(tmp_path / "orjson-3.13.0-py3-none-any.whl", "w") as wheel:
        for name in (*kept, *left):
            wheel.writestr(name, "")
    unpack_wheels(tmp_path.glob("*.whl"), tmp_path / "site", ["orjson==3.13.0"])
    found = [str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()]
    assert sorted(found) == sorted(kept)


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no wheel of orjson==3\.13\.0"):
        unpack_wheels([], tmp_path, ["orjson==3.13.0"])

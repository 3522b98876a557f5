"""What the GPU benchmark computes beside its measurements: floors, verdicts, and how its bundle is divided."""

from __future__ import annotations

import itertools
import random
import re
import struct
import subprocess
import sys
import tarfile
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
    FLASH_ATTENTION_3,
    GROWTH_BYTES,
    PACKAGES,
    divide,
    pack,
    part_limit_bytes,
    repository_bytes,
    unpack,
    write_archive,
)
from gpu.floor import Ceilings, Shape, floor_s, prefill_bytes, prefill_operations
from gpu.gpu_code import images, keep_gpu_code, kernels
from gpu.jit_cache import FLASHINFER_PACKAGE
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


def library(path: Path, files: list[list[tuple[int, bytes]]]) -> Path:
    """An ELF file with a container for each of `files`, of images by architecture."""

    def elf(parts: list[tuple[str, bytes]]) -> bytes:
        names, body, headers = b"\0", b"", []
        for name, content in [*parts, (".shstrtab", b"")]:
            headers.append((len(names), 64 + len(body), len(content)))
            names += name.encode() + b"\0"
            body += content
        headers[-1] = (headers[-1][0], 64 + len(body), len(names))
        body += names
        header = b"\x7fELF\x02\x01\x01".ljust(40, b"\0") + struct.pack("<Q", 64 + len(body))
        header = header.ljust(58, b"\0") + struct.pack("<HHH", 64, len(headers) + 1, len(headers))
        table = bytes(64) + b"".join(
            struct.pack("<IIQQQQIIQQ", n, 1, 0, 0, at, size, 0, 0, 1, 0) for n, at, size in headers
        )
        return header + body + table

    code = b""
    for images_of_file in files:
        content = b""
        for architecture, image in images_of_file:
            image = image if image.startswith(b"\x28") else elf([(f".text.{image.decode()}", b"code" * 8)])
            header = struct.pack("<HHIQIIHHI", 2, 1, 64, len(image), 0, 0, 0, 0, architecture)
            flags = 0x108011 if image.startswith(b"\x28") else 0x100011
            content += header.ljust(40, b"\0") + struct.pack("<QQQ", flags, 0, 99 * (flags >> 15 & 1)) + image
        code += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content + bytes(-len(content) % 8)
    path.write_bytes(elf([(".text", b"host code"), (".nv_fatbin", code)]))
    return path


def test_gpu_code_that_is_not_wanted_is_replaced(tmp_path: Path) -> None:
    files = [
        [(90, b"head128_bf16"), (80, b"head128_bf16")],
        [(90, b"head64_bf16"), (80, b"head64_b")],
        [(90, b"\x28\xb5\x2f\xfdcompressed".ljust(800))],
        [(90, b"\x28\xb5\x2f\xfdshort"), (75, b"\x28\xb5\x2f\xfdalone")],
        [(90, b"combine")],
    ]
    path = library(tmp_path / "flash.so", files)
    before = path.read_bytes()
    assert [kernels(before, image) for image in images(before)] == [
        *(["head128_bf16"], ["head128_bf16"], ["head64_bf16"], ["head64_b"], [], [], [], ["combine"])
    ]
    kept, kept_bytes = keep_gpu_code(path, 90, "head128|combine")
    after = path.read_bytes()
    assert kept == 2
    assert kept_bytes < len(after) == len(before)
    # Each has the smallest of its architecture instead, or nothing where that has not the room or there is none.
    assert [kernels(after, image) for image in images(after)] == [
        *(["head128_bf16"], ["head64_b"], ["combine"], ["head64_b"], ["combine"], [], [], ["combine"])
    ]
    for number, image in enumerate(images(before)):
        is_kept = number in (0, 3, 7)
        span = slice(image.at, image.at + image.size_bytes)
        assert (after[span] == before[span]) == is_kept, number
        flags = struct.unpack_from("<Q", after, image.header_at + 40)[0]
        # a compressed one that now is none
        assert bool(flags & 0x8000) == (number in (5, 6))
    assert b"host code" in after
    # containers and their headers stay: the library registers what it registered
    assert list(images(after)) == list(images(before))
    with pytest.raises(ValueError, match=r"flash\.so: no GPU code for 100"):
        keep_gpu_code(path, 100, "head128")


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


def test_a_bundle_is_divided_first_fit_largest_first() -> None:
    assert divide({"a": 5, "b": 4, "c": 3, "d": 2}, 7) == [["a", "d"], ["b", "c"]]
    assert divide({"huge": 9, "a": 1}, 7) == [["huge"], ["a"]]
    # What is no part of the engine fills what is left, however large.
    assert divide({"a": 5, "fa3": 6, "jit": 1, "b": 4}, 9, ["jit", "fa3", "none"]) == [["a", "b"], ["jit", "fa3"]]


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 100)), st.integers(1, 100), st.data())
def test_every_part_of_a_bundle_fits(sizes: dict[str, int], limit: int, data: st.DataObject) -> None:
    last = data.draw(st.permutations(sorted(sizes)))[: len(sizes) // 2]
    parts = divide(sizes, limit, last)
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    for part in parts:
        assert len(part) == 1 or sum(sizes[name] for name in part) <= limit
    # Two neighbours would not have gone into one.
    assert all(sum(sizes[name] for part in two for name in part) > limit for two in itertools.pairwise(parts))


def test_an_archive_and_the_repository_are_carried_together(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    limit_bytes = part_limit_bytes(root)
    assert limit_bytes + repository_bytes(root) < CARRIED_BYTES
    assert limit_bytes >= 54 * 2**20  # what is enough to measure takes 53.6
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name, size in (("tracked", 1000), ("new", 200), (".gitignore", 8), ("ignored", 5000)):
        (tmp_path / name).write_bytes(b"ignored\n"[:size].ljust(size, b"x"))
    subprocess.run(["git", "-C", tmp_path, "add", "tracked"], check=True)
    assert repository_bytes(tmp_path) == 1208
    (tmp_path / "tracked").unlink()  # gone, and still in the index
    assert part_limit_bytes(tmp_path) == CARRIED_BYTES - GROWTH_BYTES - 208


def test_flash_attention_3_is_in_no_archive_but_its_own(tmp_path: Path) -> None:
    kernels_folder = tmp_path / "site/sgl_kernel"
    kernels_folder.mkdir(parents=True)
    (tmp_path / "site" / FLASH_ATTENTION_3).write_bytes(b"kernels")
    (kernels_folder / "__init__.py").write_bytes(b"")
    for names, members in (
        (["sgl_kernel"], {"site/sgl_kernel", "site/sgl_kernel/__init__.py"}),
        ([FLASH_ATTENTION_3], {f"site/{FLASH_ATTENTION_3}"}),
    ):
        write_archive(tmp_path / "one.tar.gz", tmp_path / "site", names)
        with tarfile.open(tmp_path / "one.tar.gz") as archive:
            assert set(archive.getnames()) == members


def test_a_site_is_packed_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bundle.py", str(tmp_path), "--pack"])
    with pytest.raises(SystemExit):
        bundle.main()
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"--pack: there is no {tmp_path / 'site'}")
    (tmp_path / "site/sgl_kernel").mkdir(parents=True)
    (tmp_path / "site" / FLASH_ATTENTION_3).write_bytes(b"kernels")
    (tmp_path / "site/sglang_jit").mkdir()
    (tmp_path / "bundle-3.tar.gz").write_bytes(b"of an earlier time")
    assert bundle.main() == 0
    assert sorted(path.name for path in tmp_path.glob("*.gz")) == ["bundle-1.tar.gz"]
    with tarfile.open(tmp_path / "bundle-1.tar.gz") as archive:
        assert set(archive.getnames()) == {"site/sgl_kernel", "site/sglang_jit", f"site/{FLASH_ATTENTION_3}"}


def test_no_archive_is_larger_than_may_be_carried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site"
    draw = random.Random(5)
    kib = {"torch_less": 300, "sgl_kernel": 200, "small": 30, "sglang_jit": 4, "nixl_cu13.libs": 90}
    kib |= {f"{FLASHINFER_PACKAGE}/jit_cache/{name}": size for name, size in (("norm", 8), ("attention", 90))}
    for name, size in kib.items():
        (site / name).mkdir(parents=True)
        (site / name / "content").write_bytes(draw.randbytes(size * 1024))
    (site / FLASH_ATTENTION_3).write_bytes(draw.randbytes(250 * 1024))
    (site / FLASHINFER_PACKAGE / "__init__.py").write_bytes(b"")
    limit_bytes = 560 * 1024
    assert pack(tmp_path, limit_bytes) == 0
    found: list[str] = []
    for number in (1, 2):
        path = tmp_path / f"bundle-{number}.tar.gz"
        assert path.stat().st_size <= limit_bytes
        with tarfile.open(path) as archive:
            found += archive.getnames()
    assert len(found) == len(set(found))
    assert {f"site/{name}/content" for name in kib} | {f"site/{FLASH_ATTENTION_3}"} <= set(found)
    with tarfile.open(tmp_path / "bundle-1.tar.gz") as archive:
        assert {
            *("site/torch_less", "site/sgl_kernel", "site/small", "site/sglang_jit"),
            *(f"site/{FLASHINFER_PACKAGE}/__init__.py", f"site/{FLASHINFER_PACKAGE}/jit_cache/norm"),
        } <= set(archive.getnames())
    # One entry that is too large by itself cannot be divided: that is an error.
    assert pack(tmp_path, 280 * 1024) == 1
    assert re.search(r"bundle-\d\.tar\.gz: 0\.0 MiB more than travel with the repository", capsys.readouterr().err)


def test_of_a_wheel_its_wanted_entries_are_unpacked(tmp_path: Path) -> None:
    kept = ["transformers/models/qwen2/modeling_qwen2.py", "transformers/models/__init__.py", "modular_x.py"]
    left = ["transformers/models/qwen2/modular_qwen2.py", "tools/a.py", "orjson-3.13.0.data/scripts/x", "nixl_ep/a.py"]
    with zipfile.ZipFile(tmp_path / "orjson-3.13.0-py3-none-any.whl", "w") as wheel:
        for name in (*kept, *left):
            wheel.writestr(name, "")
    unpack(tmp_path.glob("*.whl"), tmp_path / "site", ["orjson==3.13.0"])
    found = [str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()]
    assert sorted(found) == sorted(kept)


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    assert len(PACKAGES) == len({package.partition("==")[0] for package in PACKAGES})
    with pytest.raises(ValueError, match=r"no wheel of orjson==3\.13\.0"):
        unpack([], tmp_path, ["orjson==3.13.0"])

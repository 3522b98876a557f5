"""How the bundle for a GPU machine is made and divided."""

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

from gpu import bundle
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

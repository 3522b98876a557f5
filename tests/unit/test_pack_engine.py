"""An engine packed for a machine without a network: which packages and files, parts, manifest, what is set there."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import pack_engine  # noqa: E402
from gpu_code import images, keep_gpu_code, kernels  # noqa: E402
from pack_engine import PackError  # noqa: E402

# A Python 3.12 with torch 2.11, Triton 3.6, transformers 5.17 and this project's test requirements, to serve with.
SERVING_PYTHON = os.environ.get("SGLANG_EXT_TEST_TORCH_2_11")


def test_packages_are_those_of_the_lock_file() -> None:
    versions = pack_engine.read_lock()
    everything = pack_engine.chosen_packages(None, versions)
    assert everything.items() <= versions.items()
    assert set(versions) - set(everything) == pack_engine.NOT_FOR_SERVING
    assert everything["torch"].startswith("2.14.")
    on_other_torch = pack_engine.chosen_packages("2.11", versions)
    assert {name for name, version in on_other_torch.items() if versions[name] != version} == {"sglang-kernel"}
    assert not {"torch", "triton", "transformers"} & set(on_other_torch)
    with pytest.raises(PackError, match=r"--torch 2\.10: an sgl_kernel is known for 2\.11 only"):
        pack_engine.chosen_packages("2.10", versions)
    with pytest.raises(PackError, match=r"the lock file has no nixl$"):
        pack_engine.chosen_packages("2.11", {name: versions[name] for name in versions if name != "nixl"})


def write_wheel(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, name)


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_wanted_files_of_wanted_wheels_are_packed(tmp_path: Path) -> None:
    kept = ["transformers/models/qwen2/modeling_qwen2.py", "transformers/models/__init__.py", "modular_x.py"]
    left = ["transformers/models/qwen2/modular_qwen2.py", "tools/a.py", "pyzmq-27.3.0.data/scripts/x", "nixl_ep/a.py"]
    write_wheel(tmp_path / "pyzmq-27.3.0-cp312-abi3-any.whl", *kept, *left)
    write_wheel(tmp_path / "pyzmq-26.0.0-cp312-abi3-any.whl", "earlier.py")
    pack_engine.unpack_wheels(tmp_path.glob("*.whl"), tmp_path / "site", {"pyzmq": "27.3.0"})
    assert set(files_below(tmp_path / "site")) == set(kept)
    with pytest.raises(PackError, match=r"no wheel of dot_name==1\.0"):
        pack_engine.unpack_wheels(tmp_path.glob("*.whl"), tmp_path / "site", {"pyzmq": "27.3.0", "dot.name": "1.0"})


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with an archive in three parts of at most 1 MiB, packed for torch 2.11."""
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    wheels.mkdir()
    for name, version in pack_engine.chosen_packages("2.11", pack_engine.read_lock()).items():
        write_wheel(wheels / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", f"{name}.py")
    write_wheel(
        wheels / "sglang-0.5.23-py3-none-any.whl", "sglang/srt/mem_cache/rust_tree_core/mem_cache.so", "sglang/a.py"
    )
    with zipfile.ZipFile(wheels / "sglang-0.5.23-py3-none-any.whl", "a") as wheel:
        wheel.writestr(pack_engine.DUAL_GEMM, "import cutlass")
        wheel.writestr("noise", random.Random(1).randbytes(5 * 2**19))
        wheel.writestr("extra.pth", "extra/packages\n")
        wheel.writestr("extra/packages/a.py", "")
    monkeypatch.setattr(pack_engine, "download", lambda folder, packages: None)
    out.mkdir()
    (out / "engine-007").write_text("of an earlier archive")
    pack_engine.pack(out, "2.11", 1, wheels)
    return out


def test_an_archive_comes_out_of_its_parts_as_it_was(packed: Path, tmp_path: Path) -> None:
    assert {path.name for path in packed.iterdir()} == {
        *("engine-000", "engine-001", "engine-002", "manifest.json", "pack_engine.py")
    }
    assert all(path.stat().st_size <= 2**20 for path in packed.iterdir())
    there = tmp_path / "there"
    # With nothing but the folder, and the Python of the machine.
    command = [sys.executable, "-I", str(packed / "pack_engine.py"), "unpack", str(packed), str(there)]
    subprocess.run(command, check=True, cwd="/", timeout=60)
    found = files_below(there / "site")
    assert found["noise"] == random.Random(1).randbytes(5 * 2**19)
    assert "sglang/a.py" in found
    assert "sglang/srt/mem_cache/rust_tree_core/mem_cache.so" not in found
    names = {"can_use_dual_gemm": None, "DualGemmQuantMode": None, "MAX_DUAL_GEMM_DECODE_TOKENS": None}
    exec(found[pack_engine.DUAL_GEMM], names)  # noqa: S102
    assert names["can_use_dual_gemm"]() is False  # type: ignore[misc]
    manifest = json.loads((packed / "manifest.json").read_text())
    assert (manifest["torch"], manifest["python"], manifest["brings_torch"]) == ("2.11", "3.12", False)
    assert "sgl_kernel/sm100/" in manifest["left_out"]
    assert json.loads(found[pack_engine.SITE_MANIFEST]).items() <= manifest.items()


def test_a_shell_there_gets_what_sglang_needs(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    there = tmp_path / "it's there"
    pack_engine.unpack(packed, there)
    code = "import json, os, sys; print(json.dumps({**os.environ, 'path': sys.path}))"
    command = f'. "{there}/env.sh"; "{sys.executable}" -c "{code}"'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin"})
    found = json.loads(done.stdout)
    assert found["PYTHONPATH"] == f"{there}/site"
    assert f"{there}/site/extra/packages" in found["path"]
    assert found["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] == "python"
    assert found["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] == "1"
    assert found["CUDA_MODULE_LOADING"] == "LAZY"
    assert (there / "cache").is_dir()


def test_missing_and_damaged_parts_are_named(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there"
    content = bytearray((packed / "engine-001").read_bytes())
    content[1000] ^= 1
    (packed / "engine-001").write_bytes(content)
    with pytest.raises(PackError, match="engine-001 is damaged"):
        pack_engine.unpack(packed, there)
    (packed / "engine-002").unlink()
    (packed / "engine-001").unlink()
    with pytest.raises(PackError, match="no engine-001: bring all of engine-000, engine-001, engine-002"):
        pack_engine.unpack(packed, there)
    with pytest.raises(PackError, match=r"no manifest\.json"):
        pack_engine.unpack(there, there)
    assert not there.exists()


def test_a_toolkit_is_where_nvcc_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = tmp_path / "local/bin/nvcc"
    toolkit = tmp_path / "packages/nvidia/cu13"
    for nvcc in (wrapper, toolkit / "bin/nvcc", tmp_path / "mine/bin/nvcc"):
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("#!/bin/sh\n")
        nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(wrapper.parent))
    monkeypatch.setattr(pack_engine, "USUAL_TOOLKITS", ())
    find = pack_engine.find_cuda_home
    assert find({"CUDA_HOME": str(tmp_path / "mine")}, [toolkit]) == tmp_path / "mine"
    assert find({"CUDA_HOME": str(tmp_path / "none")}, [toolkit]) == toolkit
    assert find({}, []) == tmp_path / "local"
    monkeypatch.setenv("PATH", "/nowhere")
    assert find({}, []) is None


def test_a_linker_finds_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "libcuda.so.580.1"
    driver.write_text("")
    packages = tmp_path / "packages"
    for folder in ("include", "lib"):
        (packages / "nvidia/cu13" / folder).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", ["", str(packages), "/nowhere"])
    monkeypatch.setattr(pack_engine, "driver_library", lambda: driver)
    for _ in range(2):  # the second time over the link of the first
        values = pack_engine.environment(tmp_path / "out", True, {"CPATH": "/mine"})
    assert values["CPATH"] == f"{packages}/nvidia/cu13/include:/mine"
    assert values["LIBRARY_PATH"] == f"{packages}/nvidia/cu13/lib:{tmp_path}/out/cache"
    assert (tmp_path / "out/cache/libcuda.so").resolve() == driver
    assert "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK" not in values


@pytest.fixture(scope="module")
def real_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the engine for torch 2.11 as a machine gets it that takes 64 MiB at a time."""
    out = tmp_path_factory.mktemp("engine")
    pack_engine.pack(out, "2.11", 52, out / "wheels")
    return out


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_engine_for_another_torch_is_one_part(real_archive: Path) -> None:
    parts = json.loads((real_archive / "manifest.json").read_text())["parts"]
    assert list(parts) == ["engine-000"]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(SERVING_PYTHON is None, reason="SGLANG_EXT_TEST_TORCH_2_11 names no Python")
@pytest.mark.parametrize("script", ["buckets", "two_engines"])
def test_the_engine_serves_on_another_torch(real_archive: Path, tmp_path: Path, script: str) -> None:
    """Two engines exchange KV and answer as one does, on the CPU path, as far as a machine without a GPU goes."""
    there = tmp_path / "there"
    subprocess.run([str(SERVING_PYTHON), real_archive / "pack_engine.py", "unpack", real_archive, there], check=True)
    shutil.rmtree(there / "site/sgl_kernel")  # it does not load without a GPU; the project's stand-ins take its place
    command = f". {there}/env.sh; exec {SERVING_PYTHON} bench/gpu/{script}.py --dry-run"
    environment = {name: os.environ[name] for name in ("PATH", "HOME")}
    subprocess.run(["sh", "-c", command], check=True, cwd=ROOT, env=environment)


def library(path: Path, files: list[list[tuple[int, bytes]]], host_section: str = ".text") -> Path:
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
    path.write_bytes(elf([(host_section, b"host code"), (".nv_fatbin", code)]))
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


def test_gpu_code_of_one_architecture_is_kept_whole(tmp_path: Path) -> None:
    """As in torch and NCCL: compressed, and in NCCL once more as it was before it was linked."""
    compressed = [b"\x28\xb5\x2f\xfd" + bytes([number]) * 100 for number in range(4)]
    path = library(tmp_path / "torch.so", [[(80, compressed[0]), (90, compressed[1])], [(90, compressed[2])]])
    before = path.read_bytes()
    assert keep_gpu_code(path, 90) == (2, 2 * 104)
    after = path.read_bytes()
    for number, image in enumerate(images(before)):
        span = slice(image.at, image.at + image.size_bytes)
        assert after[span] == (bytes(104) if number == 0 else compressed[number])
    assert len(after) == len(before)
    with pytest.raises(ValueError, match=r"torch\.so: no GPU code for 100$"):
        keep_gpu_code(path, 100)


def test_gpu_code_that_was_linked_already_is_blanked(tmp_path: Path) -> None:
    path = library(tmp_path / "nccl.so", [[(90, b"kernel")]], host_section="__nv_relfatbin")
    assert b"host code" in path.read_bytes()
    assert keep_gpu_code(path, 90)[0] == 1
    assert b"host code" not in path.read_bytes()

"""Kernels compiled beforehand: the toolkit, what is put beside SGLang, and what processes on the GPU machine get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
sys.path.insert(0, str(BENCH))

from gpu import jit_cache  # noqa: E402


def distribution(site: Path, name: str, version: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def site_with(tmp_path: Path, **versions: str) -> Path:
    site = tmp_path / "site"
    for name, version in versions.items():
        distribution(site, name, version)
    return site


def here(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def wheel(folder: Path, name: str, *files: str) -> Path:
    path = folder / f"{name}-13.0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.writestr(file, "x")
    return path


def test_a_toolkit_of_wheels_is_laid_out_as_compilers_expect_it(tmp_path: Path) -> None:
    wheels = [
        wheel(tmp_path, "nvidia_cuda_nvcc", "nvidia/cu13/bin/nvcc", "nvidia/cu13/bin/ptxas"),
        wheel(tmp_path, "nvidia_nvvm", "nvidia/cu13/nvvm/bin/cicc"),
        wheel(tmp_path, "nvidia_cuda_runtime", "nvidia/cu13/lib/libcudart.so.13", "nvidia/cu13/include/cuda.h"),
        wheel(tmp_path, "nvidia_cublas", "nvidia/cu13/include/cublasLt.h", "nvidia/cu13/lib/libcublas.so.13"),
    ]
    home = jit_cache.unpack_toolkit(wheels, tmp_path / "cuda")
    for program in ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc"):
        assert os.access(home / program, os.X_OK)
    assert (home / "lib64/libcudart.so").resolve() == (home / "lib/libcudart.so.13").resolve()
    assert (home / "include/cublasLt.h").is_file()
    assert not (home / "lib/libcublas.so.13").exists()  # 400 MB that nothing links with
    needed = subprocess.run(["readelf", "-d", str(home / "lib/libcuda.so")], capture_output=True, text=True, check=True)
    assert "[libcuda.so.1]" in needed.stdout


def test_wheels_without_a_compiler_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(jit_cache.JitBuildError, match=r"no nvcc among the wheels for nvidia-cuda-nvcc==13\.0"):
        jit_cache.unpack_toolkit([wheel(tmp_path, "nvidia_nvvm", "nvidia/cu13/nvvm/bin/cicc")], tmp_path / "cuda")


@pytest.mark.slow
def test_what_is_compiled_here_must_load_there(tmp_path: Path) -> None:
    assert jit_cache.same_abi(site_with(tmp_path / "a", apache_tvm_ffi=here("apache-tvm-ffi")))
    with pytest.raises(jit_cache.JitBuildError, match=r"apache-tvm-ffi is 0\.0\.1 in .* and .* here"):
        jit_cache.same_abi(site_with(tmp_path / "b", apache_tvm_ffi="0.0.1"))
    with pytest.raises(jit_cache.JitBuildError, match="apache-tvm-ffi is missing in"):
        jit_cache.same_abi(tmp_path)


@pytest.mark.slow
def test_flashinfer_finds_its_modules_by_a_package_of_its_version(tmp_path: Path) -> None:
    site = site_with(tmp_path, flashinfer_python="0.6.15.post1")
    jit_cache.write_flashinfer_package(site)
    (site / "flashinfer_jit_cache/jit_cache/norm").mkdir()
    script = (
        "import flashinfer_jit_cache as c; print(c.__version__, c.get_jit_cache_dir()); "
        "(one,) = c.get_jit_cache_providers(); "
        "print(one.version, one.jit_cache_dir, *one.modules, *one.cuda_architectures)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=True
    )
    where = ["0.6.15.post1", str(site / "flashinfer_jit_cache/jit_cache")]
    assert done.stdout.split() == [*where, *where, "norm", "sm90a"]
    with pytest.raises(jit_cache.JitBuildError, match="flashinfer is not in"):
        jit_cache.write_flashinfer_package(tmp_path / "elsewhere")


@pytest.mark.full
def test_a_module_that_does_not_compile_is_reported(tmp_path: Path) -> None:
    site = site_with(tmp_path, apache_tvm_ffi=here("apache-tvm-ffi"), flashinfer_python="0.6.15.post1")
    (site / "flashinfer_jit_cache").mkdir()
    (site / "flashinfer_jit_cache/built.json").write_text('{"single-prefill": 315.1}')  # of a call before
    modules = [one for one in jit_cache.MODULES if one.name == "norm"]
    found = jit_cache.build(site, tmp_path / "no-toolkit", modules)
    assert list(found) == ["norm"]
    assert "No module named 'flashinfer.jit'" in str(found["norm"])
    assert json.loads((site / "flashinfer_jit_cache/built.json").read_text()) == {"single-prefill": 315.1}


def test_processes_on_the_gpu_machine_find_libraries_headers_and_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, packages = tmp_path / "site", tmp_path / "packages"
    site.mkdir()
    for folder in ("cu13/include", "cu13/lib", "cudnn/lib"):
        (packages / "nvidia" / folder).mkdir(parents=True)
    driver = tmp_path / "libcuda.so.580.1"
    driver.write_text("")
    monkeypatch.setattr(sys, "path", [str(packages), "", "/nowhere"])
    monkeypatch.setattr(jit_cache, "driver_library", lambda: driver)
    scratch = tmp_path / "scratch"
    for _ in range(2):  # once more over the link of the first time
        added = jit_cache.environment({"CPATH": "/mine"}, site, scratch)
    expected = {
        "CUDA_HOME": "/usr/local/cuda",
        "CPATH": f"/mine:{packages}/nvidia/cu13/include",
        "LIBRARY_PATH": f"{packages}/nvidia/cu13/lib:{scratch}",
        "LD_LIBRARY_PATH": f"{packages}/nvidia/cu13/lib:{packages}/nvidia/cudnn/lib",
        "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK": "1",
    }
    assert added == expected
    assert (scratch / "libcuda.so").resolve() == driver
    (site / "flashinfer_jit_cache/jit_cache/norm").mkdir(parents=True)
    with_norm = jit_cache.environment({"CPATH": "/mine"}, site, scratch)
    assert with_norm == {**expected, "FLASHINFER_USE_CUDA_NORM": "1"}


def test_a_machine_with_none_of_that_is_told_the_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(jit_cache, "driver_library", lambda: None)
    assert jit_cache.environment({}, None, tmp_path) == {"CUDA_HOME": "/usr/local/cuda"}
    assert jit_cache.environment({"CUDA_HOME": "/opt/cuda"}, None, tmp_path) == {"CUDA_HOME": "/opt/cuda"}


def test_unknown_modules_are_refused_by_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "gpu/jit_cache.py"), str(tmp_path), "--only", "norm,gemm"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--only: gemm: not among norm, paged-prefill" in done.stderr


def test_module_names_are_unique() -> None:
    names = [module.name for module in jit_cache.MODULES]
    assert len(set(names)) == len(names)

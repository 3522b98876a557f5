"""Kernels that flashinfer would compile when they are first called, compiled beforehand without a GPU.

    python bench/gpu/jit_cache.py SITE [--wheels FOLDER] [--only NAME,...]

SITE is a folder with flashinfer as `bundle.py` unpacks it, for Hopper GPUs; nvcc and what it includes come from the
package index. It adds SITE/flashinfer_jit_cache/, which flashinfer finds by importing it.

What is not among them is compiled on the GPU machine after all, in seconds to minutes. So are SGLang's own modules,
which are compiled here to see that they can be, and not kept: SGLang finds a compiled one by a digest of both compilers
among other things. `environment()` has the variables with which compiling works there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

BENCH = Path(__file__).resolve().parents[1]
if str(BENCH) not in sys.path:
    sys.path.insert(0, str(BENCH))

from gpu.pretended_gpu import open_package, pretend

FLASHINFER_PACKAGE = "flashinfer_jit_cache"
# CUDA 13.0, as the GPU machine's torch has it. Of cuBLAS and cuRAND the headers alone are unpacked.
TOOLKIT = (
    *("nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-crt==13.0.88", "nvidia-nvvm==13.0.88", "nvidia-cuda-cccl==13.0.85"),
    *("nvidia-cuda-runtime==13.0.96", "nvidia-cublas==13.1.1.3", "nvidia-curand==10.4.0.35"),
)
HEADERS_ONLY = ("nvidia_cublas", "nvidia_curand")
ARCHITECTURE = "9.0a"
MODULE_TIMEOUT_S = 3600


class JitBuildError(RuntimeError):
    """Nothing was compiled; the message says why."""


class JitModule(NamedTuple):
    """A module that flashinfer or SGLang compiles at run time."""

    name: str
    needed_by: str
    compile: Callable[[Path], Any]  # in a process that pretends to have a GPU; gets SITE


def _flashinfer(package: str, function: str, *arguments: Any) -> Callable[[Path], Any]:
    def build(site: Path) -> None:
        import importlib

        open_package(site, "flashinfer")
        spec = getattr(importlib.import_module(f"flashinfer.jit.{package}"), function)(*_types(arguments))
        spec.build(False)
        spec.load(spec.jit_library_path)  # fails where a symbol of a library that it names is not there
        target = site / FLASHINFER_PACKAGE / "jit_cache" / spec.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, target / f"{spec.name}.so")

    return build


def _sglang(package: str, function: str, *arguments: Any) -> Callable[[Path], Any]:
    def build(site: Path) -> None:
        import importlib

        from sglang_ext import cpu

        cpu.install(cpu.CANDIDATES)  # Triton among them, of which nothing is compiled
        for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.kernels.ops"):
            open_package(site, name)
        # These operators are not registered with torch here.
        unregistered: Any = type(sys)("sglang.srt.utils.custom_op")
        unregistered.register_custom_op = lambda *args, **kwargs: lambda operator: operator
        sys.modules[unregistered.__name__] = unregistered
        getattr(importlib.import_module(f"sglang.kernels.ops.{package}"), function)(*_types(arguments))

    return build


def _types(arguments: tuple[Any, ...]) -> list[Any]:
    """`torch.bfloat16` for "bfloat16", and so on; torch is not imported to list the modules."""
    import torch

    return [
        getattr(torch, argument) if isinstance(argument, str) and hasattr(torch, argument) else argument
        for argument in arguments
    ]


_HEADS = ("bfloat16", "bfloat16", "bfloat16")
_SIZES = (128, 128, 0, False, False, False)  # head sizes; no positions, window, cap of scores or half-precision scores
MODULES = (
    JitModule("norm", "every layer of a model in bfloat16", _flashinfer("norm", "gen_norm_module")),
    JitModule(
        "paged-prefill",
        "SGLang's flashinfer backend over a prefix",
        _flashinfer("attention.modules", "gen_batch_prefill_module", "fa2", *_HEADS, "int32", *_SIZES),
    ),
    JitModule(
        "ragged-prefill",
        "SGLang's flashinfer backend without a prefix",
        _flashinfer("attention.modules", "gen_batch_prefill_module", "fa3", *_HEADS, "int32", *_SIZES),
    ),
    JitModule(
        "single-prefill",
        "ring blocks",
        _flashinfer("attention.modules", "gen_single_prefill_module", "fa3", *_HEADS, *_SIZES),
    ),
    JitModule("activation", "every layer", _sglang("activation.activation", "activation_module", "bfloat16")),
    JitModule(
        "rope",
        "every layer with heads of 128",
        _sglang("attention.rope", "_jit_fused_rope_module", True, 128, "bfloat16", "bfloat16"),
    ),
    JitModule("kv-4x128", "Qwen2.5 7B", _sglang("kvcache.kvcache", "_jit_kvcache_module", 1024, 1024, 0)),
    JitModule("kv-8x128", "Qwen2.5 14B and 32B", _sglang("kvcache.kvcache", "_jit_kvcache_module", 2048, 2048, 0)),
)


def unpack_toolkit(wheels: Iterable[Path], folder: Path) -> Path:
    """A CUDA toolkit of the index's wheels as nvcc and others expect it: bin, include, lib64. Returns its folder.

    Raises JitBuildError where there is no nvcc among them.
    """
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                if entry.startswith("nvidia/cu13/") and (
                    "/include/" in entry or not wheel.name.startswith(HEADERS_ONLY)
                ):
                    archive.extract(entry, folder)
    home = folder / "nvidia/cu13"
    if not (home / "bin/nvcc").is_file():
        raise JitBuildError(f"no nvcc among the wheels for {', '.join(TOOLKIT)}")
    for program in [*(home / "bin").iterdir(), *(home / "nvvm/bin").glob("*")]:
        if program.is_file():
            program.chmod(0o755)
    (home / "lib64").symlink_to("lib")
    for library in (home / "lib").glob("libcudart.so.*"):
        (home / "lib/libcudart.so").unlink(missing_ok=True)
        (home / "lib/libcudart.so").symlink_to(library.name)
    # Enough to link with; the machine's driver brings the real one.
    stub = ["cc", "-shared", "-o", str(home / "lib/libcuda.so"), "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull]
    subprocess.run(stub, check=True)
    return home


def same_abi(site: Path) -> str:
    """The version of tvm-ffi in SITE, which has to be the one here: it is part of a module's name and interface.

    Raises JitBuildError.
    """
    there, here = (_version(distributions(**where), "apache-tvm-ffi") for where in ({"path": [str(site)]}, {}))
    if there is None or there != here:
        raise JitBuildError(f"apache-tvm-ffi is {there or 'missing'} in {site} and {here or 'missing'} here")
    return there


def _version(installed: Iterable[Distribution], name: str) -> str | None:
    return next((one.version for one in installed if one.name.lower().replace("_", "-") == name), None)


def write_flashinfer_package(site: Path) -> None:
    """The package by which flashinfer finds what was compiled for its very version. Raises JitBuildError."""
    version = _version(distributions(path=[str(site)]), "flashinfer-python")
    if version is None:
        raise JitBuildError(f"flashinfer is not in {site}")
    folder = site / FLASHINFER_PACKAGE
    (folder / "jit_cache").mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text(
        _PACKAGE.format(version=version, architecture=f"sm{ARCHITECTURE.replace('.', '')}"), encoding="utf-8"
    )


# By the one function flashinfer 0.7 finds modules, by the other one earlier versions.
_PACKAGE = """from pathlib import Path
from types import SimpleNamespace

__version__ = {version!r}


def get_jit_cache_dir():
    return str(Path(__file__).parent / "jit_cache")


def get_jit_cache_providers():
    folder = Path(get_jit_cache_dir())
    return [
        SimpleNamespace(
            provider_id="bundle",
            distribution=__name__,
            version=__version__,
            jit_cache_dir=str(folder),
            cuda_architectures=[{architecture!r}],
            modules=[one.name for one in folder.iterdir()],
        )
    ]
"""


def build(site: Path, toolkit: Path, modules: Iterable[JitModule] = MODULES) -> dict[str, float | str]:
    """Compile `modules` into SITE, each in a process of its own. What each took in seconds, or the end of its error.

    Raises JitBuildError where nothing that is compiled here could be loaded there.
    """
    same_abi(site)
    write_flashinfer_package(site)
    found: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory(prefix="jit-") as scratch:
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CUDA_PATH")},
            **toolkit_environment(toolkit),
            "LD_LIBRARY_PATH": str(toolkit / "lib"),
            "FLASHINFER_WORKSPACE_BASE": scratch,
            "SGLANG_JIT_CACHE_DIR": scratch,
            "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURE,
        }
        for module in modules:
            started_s = time.perf_counter()
            command = [sys.executable, str(Path(__file__).resolve()), str(site), "--compile", module.name]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=MODULE_TIMEOUT_S, check=False
            )
            seconds = round(time.perf_counter() - started_s, 1)
            found[module.name] = seconds if done.returncode == 0 else done.stderr.strip()[-2000:]
            print(f"{module.name:<16} {f'{seconds} s' if done.returncode == 0 else 'FAILED'}", flush=True)
    path = site / FLASHINFER_PACKAGE / "built.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    record |= {name: value for name, value in found.items() if isinstance(value, float)}
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return found


def toolkit_environment(home: Path) -> dict[str, str]:
    """Variables with which nvcc, started by whatever, finds a toolkit's headers and libraries."""
    return {"CUDA_HOME": str(home), "CPATH": str(home / "include"), "LIBRARY_PATH": str(home / "lib")}


def environment(given: Mapping[str, str], site: Path | None, scratch: Path) -> dict[str, str]:
    """Return what to add to the environment of SGLang on the GPU machine, so that it runs there and can compile.

    `site` is the unpacked bundle, None where there is none: its torch takes CUDA's libraries from the machine's.
    `scratch` gets a name for the driver's library, under which a linker finds it. Variables that `given` has already
    are extended or left alone.
    """
    added = {"CUDA_HOME": given.get("CUDA_HOME", "/usr/local/cuda")}
    toolkits = [Path(entry) / "nvidia" for entry in sys.path if entry]
    headers = [toolkit / "cu13/include" for toolkit in toolkits]
    linked = [toolkit / "cu13/lib" for toolkit in toolkits]
    loaded: list[Path] = []
    driver = driver_library()
    if driver is not None:
        scratch.mkdir(parents=True, exist_ok=True)
        link = scratch / "libcuda.so"
        link.unlink(missing_ok=True)
        link.symlink_to(driver)
        linked.append(scratch)
    if site is not None:
        loaded = [folder for toolkit in toolkits for folder in sorted(toolkit.glob("*/lib"))]
        # The machine's is one of an earlier minor version, and no layer here is a convolution.
        added["PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK"] = "1"
        if (site / FLASHINFER_PACKAGE / "jit_cache/norm").is_dir():
            added["FLASHINFER_USE_CUDA_NORM"] = "1"  # what was compiled, not what CuTe would compile there
    for name, folders in (("CPATH", headers), ("LIBRARY_PATH", linked), ("LD_LIBRARY_PATH", loaded)):
        known = [str(folder) for folder in folders if folder.is_dir()]
        if known:
            added[name] = os.pathsep.join([*filter(None, [given.get(name)]), *known])
    return added


def driver_library() -> Path | None:
    """The file of the CUDA driver that this process would load; None without one."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    return next((Path(name) for name in mapped if "/libcuda.so" in name), None)


def _compile(site: Path, name: str) -> None:
    """In the process that `build` starts."""
    (module,) = (one for one in MODULES if one.name == name)
    pretend()
    module.compile(site)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--wheels", type=Path, default=None, help="where wheels are kept (default: beside SITE)")
    parser.add_argument("--only", default=None, help=f"of {', '.join(one.name for one in MODULES)}")
    parser.add_argument("--compile", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile is not None:
        _compile(arguments.site, arguments.compile)
        return 0
    wanted = [one.name for one in MODULES] if arguments.only is None else arguments.only.split(",")
    unknown = sorted(set(wanted) - {one.name for one in MODULES})
    if unknown:
        parser.error(f"--only: {', '.join(unknown)}: not among {', '.join(one.name for one in MODULES)}")
    wheels = arguments.wheels or arguments.site.parent / "wheels-cuda"
    wheels.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), *TOOLKIT]
    subprocess.run(download, check=True)
    try:
        with tempfile.TemporaryDirectory(prefix="cuda-") as folder:
            toolkit = unpack_toolkit(wheels.glob("nvidia_*.whl"), Path(folder))
            found = build(arguments.site.resolve(), toolkit, [one for one in MODULES if one.name in wanted])
    except JitBuildError as error:
        parser.error(str(error))
    failed = {name: value for name, value in found.items() if isinstance(value, str)}
    for name, message in failed.items():
        print(f"{name}: {message}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Pack SGLang for a machine that reaches no network, and unpack it there.

    python tools/pack_engine.py pack [--torch 2.11] [--part-mib 50] OUT      where the package index is reached
    python3 OUT/pack_engine.py unpack OUT FOLDER && . FOLDER/env.sh          on the other machine, OUT copied there

`pack` writes the archive as OUT/engine-000 and so on, OUT/manifest.json and a copy of this file. `unpack` compares the
parts with the manifest, then writes FOLDER/site, a folder of packages for PYTHONPATH, and FOLDER/env.sh, the variables
that a shell has to set. The other machine has Linux on x86-64, Python 3.12, an NVIDIA driver for CUDA 13 and nvcc, as
SGLang compiles some kernels when they are first called.

Versions are those of `requirements/cuda.lock`. Without `--torch`, all packages of the lock file that serving needs are
packed. With it, the machine has that torch with Triton, transformers and their dependencies, and the archive has the
rest: SGLang with the last sgl_kernel that was built for that torch.

GPU code is kept for Hopper GPUs only (`gpu_code.py`), and of FlashAttention 3 only that for bfloat16 heads of 128;
`--every-kernel` keeps all of it, several hundred MiB more.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parents[1] / "requirements/cuda.lock"
PYTHON = "3.12"
MANIFEST = "manifest.json"
# The manifest's name in OUT/site, where `sglang-ext doctor` reads it.
SITE_MANIFEST = "sglang_ext_engine.json"
# The last sgl_kernel that loads into a torch.
KERNELS = {"2.11": "0.4.5"}

ENGINE = (
    *("sglang", "sglang-kernel", "apache-tvm-ffi", "xgrammar", "compressed-tensors", "loguru", "gguf", "pydantic"),
    *("pydantic-core", "annotated-types", "typing-inspection", "fastapi", "starlette", "uvicorn", "opentelemetry-api"),
    *("python-multipart", "orjson", "pyzmq", "msgspec", "pybase64", "setproctitle", "dill", "openai", "sniffio"),
    *("distro", "jiter", "partial-json-parser", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py"),
    *("soundfile", "cffi", "pycparser", "ipython", "traitlets", "nixl", "nixl-cu13"),
)
# What the lock file has for tests, for building and for CUDA 12.
NOT_FOR_SERVING = frozenset(
    [
        *("build", "editables", "execnet", "graphql-core", "grimp", "harfile", "hatchling", "hypothesis", "pluggy"),
        *("hypothesis-graphql", "import-linter", "iniconfig", "jsonschema-rs", "matplotlib", "mypy", "mypy-extensions"),
        *("pyrate-limiter", "pytest", "pytest-timeout", "pytest-xdist", "ruff", "schemathesis", "trove-classifiers"),
        *("types-psutil", "types-pyyaml", "types-requests", "nixl-cu12", "nvidia-cutlass-dsl-libs-cu12"),
    ]
)
LEFT_OUT = (
    *(f"sglang/srt/rust_extensions/_{name}." for name in ("server", "grpc", "multimodal", "bench")),
    *("sglang/multimodal_gen/", "sglang/test/", "tools/", "triton_kernels/"),
    *(f"flashinfer/data/cutlass/{name}" for name in ("test", "examples", "docs", "media")),
    *(f"flashinfer/data/csrc/{name}" for name in ("cake_", "kda/", "gdn/", "fused_moe/")),
    *("flashinfer/fused_moe/backends/cudnn_frost/artifacts/", "flashinfer/moe_ep/kernel_src/"),
    # For compiling extensions, and of Triton what profiles.
    *("torch/include/", "torch/share/", "torch/bin/protoc", "nvidia/nccl/include/", "triton/_C/libproton"),
    *("triton/backends/nvidia/lib/cupti", "triton/backends/amd/lib"),
    *("build_utils.py", "build_backend.py", "xgrammar/lib/", "xgrammar/include/"),
    # NIXL between processes of one machine goes over UCX; a plugin is in the wheel twice.
    *("nixl_ep/", "nixl_ep_cu13/", "nixl_cu13.scripts/", "nixl_cu13.libs/nixl/", "nixl_cu13.libs/ucx/libucx_perftest"),
    *(
        f".nixl_cu13.mesonpy.libs/plugins/lib{name}"
        for name in (
            *(f"plugin_{it}" for it in ("AZURE", "GDS", "GPUNETIO", "GUSLI", "INFINIA", "LIBFABRIC", "OBJ", "POSIX")),
            *("telemetry", "trace"),
        )
    ),
    *(f"nixl_cu13.libs/lib{name}" for name in ("aws", "azure", "curl", "gusli", "s2n", "xml2", "zstd")),
)

# What transformers' modelling files were generated from: it passes them over when it looks for models.
NEVER_IMPORTED = re.compile(r"transformers/models/[^/]+/modular_")
# For later GPUs, and kernels of other models.
KERNELS_LEFT_OUT = (
    *("sgl_kernel/flashmla_ops", "sgl_kernel/infllm_ops", "sgl_kernel/sm100/"),
    "triton/backends/nvidia/bin/ptxas-blackwell",
)
# SGLang's radix core in Rust reads tensors by the ABI of the torch it was built for.
OTHER_TORCH_LEFT_OUT = ("sglang/srt/mem_cache/rust_tree_core/mem_cache",)
# Packages that add to the path by a `.pth` file do so in a folder on PYTHONPATH, too.
SITE_CUSTOMIZE = "import os\nimport site\n\nsite.addsitedir(os.path.dirname(__file__))\n"
# It imports cutlass as any Qwen2 or Llama is made, for a kernel of later GPUs.
DUAL_GEMM = "sglang/kernels/ops/gemm/cutedsl_dual_gemm.py"
NO_DUAL_GEMM = """from enum import IntEnum

MAX_DUAL_GEMM_DECODE_TOKENS = 0
DualGemmQuantMode = IntEnum(
    "DualGemmQuantMode",
    "STATIC_PER_TENSOR STATIC_PER_TOKEN DYNAMIC_PER_TENSOR DYNAMIC_PER_TOKEN UNQUANT",
    start=0,
)


def can_use_dual_gemm(*args, **kwargs):
    return False
"""
USUAL_TOOLKITS = (Path("/usr/local/cuda"), Path("/usr/local/cuda-13"), Path("/usr/local/cuda-13.0"))
# GPU code that is kept; None: all of the architecture.
HOPPER = 90
GPU_CODE: dict[str, str | None] = {
    "torch/lib/libtorch_cuda.so": None,
    "torch/lib/libtorch_cuda_linalg.so": None,
    "nvidia/nccl/lib/libnccl.so.2": None,
    # Queries, keys and values of 128 in bfloat16, no soft cap; and what every call needs, whatever its sizes.
    "sgl_kernel/flash_ops.abi3.so": (
        r"SA_EEELi128ENS_10bfloat16_tEfNS_4arch4Sm90ELb[01]ELb[01]ELb0|prepare_varlen_num_blocks"
        r"|FlashAttnFwdCombineIN4cute5tupleIJNS3_1CILi\d+EEENS5_ILi128EEEEEELi\d+ELi256ELi1ELb0ELb0ENS_10bfloat16_t"
    ),
}
STRIPPED_FROM_BYTES = 2**20
GLIBC_MINORS = (39, 38, 36, 35, 34, 31, 28, 27, 26, 25, 24, 18, 17, 12, 5)


class PackError(Exception):
    """Nothing was packed or unpacked; the message says why and what to do."""


def read_lock(lock: Path = LOCK) -> dict[str, str]:
    """Return versions by the names of a lock file."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def chosen_packages(torch: str | None, versions: Mapping[str, str]) -> dict[str, str]:
    """Return names and versions of what is packed for a machine with that torch, or without one.

    Raises PackError for a torch of which no sgl_kernel is known, or for a package that is not locked.
    """
    if torch is None:
        return {name: version for name, version in versions.items() if name not in NOT_FOR_SERVING}
    if torch not in KERNELS:
        raise PackError(f"--torch {torch}: an sgl_kernel is known for {', '.join(KERNELS)} only; leave --torch out")
    missing = [name for name in ENGINE if name not in versions]
    if missing:
        raise PackError(f"the lock file has no {', '.join(missing)}")
    return {name: versions[name] for name in ENGINE} | {"sglang-kernel": KERNELS[torch]}


def download(folder: Path, packages: Mapping[str, str]) -> None:
    """Download wheels for the other machine into `folder`. Raises subprocess.CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    # pip takes each name of a platform exactly.
    for name in (*(f"_2_{minor}" for minor in GLIBC_MINORS), "2014", "2010", "1"):
        command += ["--platform", f"manylinux{name}_x86_64"]
    subprocess.run([*command, "-d", str(folder), *(f"{name}=={packages[name]}" for name in packages)], check=True)


def is_wanted(name: str, left_out: Sequence[str] = LEFT_OUT) -> bool:
    """Return whether a wheel's entry is packed."""
    return not name.startswith(tuple(left_out)) and ".data/" not in name and NEVER_IMPORTED.match(name) is None


def unpack_wheels(
    wheels: Iterable[Path], site: Path, packages: Mapping[str, str], left_out: Sequence[str] = LEFT_OUT
) -> None:
    """Write the wanted parts of the packages' wheels to `site`. Raises PackError naming packages without a wheel."""
    missing = {(_normalised(name), version) for name, version in packages.items()}
    for wheel in sorted(wheels):
        name, version = wheel.name.split("-")[:2]
        if (_normalised(name), version) in missing:
            missing.discard((_normalised(name), version))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site, [entry for entry in archive.namelist() if is_wanted(entry, left_out)])
    if missing:
        raise PackError(f"no wheel of {', '.join('=='.join(package) for package in sorted(missing))}")


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def trim(site: Path, is_every_kernel: bool) -> list[str]:
    """Take GPU code of other architectures and symbols out of `site`; return what was taken, by file."""
    from gpu_code import keep_gpu_code  # `unpack` has only this file

    taken: list[str] = []
    for name, wanted in {} if is_every_kernel else GPU_CODE.items():
        if (site / name).is_file():
            kept, kept_bytes = keep_gpu_code(site / name, HOPPER, wanted)
            of = "bfloat16 heads of 128" if wanted else f"sm_{HOPPER}"
            taken.append(f"{name}: GPU code but {kept_bytes / 2**20:.0f} MiB of {kept} source files for {of}")
    for library in site.rglob("*.so*"):
        # A library that was repaired for its wheel does not load after `strip`.
        is_repaired = "common_ops" in library.name or ".libs" in str(library)
        if not is_repaired and not library.is_symlink() and library.stat().st_size > STRIPPED_FROM_BYTES:
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=False)
    return taken


def pack(out: Path, torch: str | None, part_mib: int, wheels: Path, is_every_kernel: bool = False) -> dict[str, Any]:
    """Download, trim and compress the engine into OUT; return the manifest that is written there.

    Raises PackError, OSError or subprocess.CalledProcessError.
    """
    packages = chosen_packages(torch, read_lock())
    left_out = (
        *LEFT_OUT,
        *(() if is_every_kernel else KERNELS_LEFT_OUT),
        *(() if torch is None else OTHER_TORCH_LEFT_OUT),
    )
    download(wheels, packages)
    site = out / "site"
    shutil.rmtree(site, ignore_errors=True)
    unpack_wheels(wheels.glob("*.whl"), site, packages, left_out)
    if torch is not None:
        (site / DUAL_GEMM).write_text(NO_DUAL_GEMM, encoding="utf-8")
    taken = trim(site, is_every_kernel)
    for program in (*site.glob("triton/backends/nvidia/bin/*"), *site.glob("nvidia/*/bin/*")):
        program.chmod(0o755)
    manifest = {
        "packages": packages,
        "torch": torch or ".".join(packages["torch"].split(".")[:2]),
        "brings_torch": torch is None,
        "python": PYTHON,
        "gpus": "every GPU" if is_every_kernel else "Hopper GPUs",
        "left_out": [*left_out, *taken],
    }
    (site / "sitecustomize.py").write_text(SITE_CUSTOMIZE, encoding="utf-8")
    (site / SITE_MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    manifest["parts"] = write_parts(site, out, part_mib)
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    shutil.rmtree(site)
    if out.resolve() != Path(__file__).resolve().parent:
        shutil.copy(__file__, out)
    return manifest


def write_parts(site: Path, out: Path, part_mib: int) -> dict[str, str]:
    """Write `site` as parts of at most `part_mib`, in place of earlier ones; return SHA-256 digests by name.

    Raises subprocess.CalledProcessError.
    """
    for old in out.glob("engine-*"):
        old.unlink()
    command = 'set -o pipefail; tar -C "$1" -c "$2" | xz -T0 | split -d -a 3 -b "$3M" - "$4/engine-"'
    subprocess.run(["bash", "-c", command, "-", site.parent, site.name, str(part_mib), out], check=True)
    return {part.name: digest(part) for part in sorted(out.glob("engine-*"))}


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(parts: Path, out: Path) -> dict[str, Any]:
    """Write OUT/site and OUT/env.sh of the archive in `parts`; return its manifest.

    Raises PackError naming the parts that are missing or damaged, before anything is written.
    """
    if not (parts / MANIFEST).is_file():
        raise PackError(f"{parts} has no {MANIFEST}; `pack` writes it")
    manifest: dict[str, Any] = json.loads((parts / MANIFEST).read_text(encoding="utf-8"))
    for name, wanted in manifest["parts"].items():
        if not (parts / name).is_file():
            raise PackError(f"{parts} has no {name}: bring all of {', '.join(manifest['parts'])}")
        if digest(parts / name) != wanted:
            raise PackError(f"{name} is damaged: its SHA-256 is not the one of {MANIFEST}; bring it again")
    shutil.rmtree(out / "site", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    archive = out / "engine.tar.xz"
    with archive.open("wb") as joined:
        for name in manifest["parts"]:
            joined.write((parts / name).read_bytes())
    with tarfile.open(archive) as files:
        # As a keyword, Python 3.11 knows it from 3.11.4 on.
        files.extraction_filter = getattr(tarfile, "tar_filter", None)
        files.extractall(out)
    archive.unlink()
    values = environment(out.resolve(), manifest["brings_torch"], os.environ)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in values.items()]
    (out / "env.sh").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return manifest


def environment(out: Path, brings_torch: bool, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which SGLang runs from OUT/site on this machine and compiles what it needs."""
    site, cache = out / "site", out / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    values = {
        "PYTHONPATH": _joined([site], given, "PYTHONPATH"),
        "HF_HUB_OFFLINE": "1",
        "SGLANG_CACHE_DIR": str(cache),
        "SGLANG_JIT_CACHE_DIR": str(cache / "jit"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        # Kernels that were left out are replaced by others, which must not be read.
        "CUDA_MODULE_LOADING": "LAZY",
    }
    if not brings_torch:
        values |= {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}
    toolkits = [path / "nvidia/cu13" for path in (site, *map(Path, filter(None, sys.path)))]
    home = find_cuda_home(given, toolkits)
    if home is not None:
        values["CUDA_HOME"] = str(home)
    headers = [toolkit / "include" for toolkit in toolkits]
    libraries = [toolkit / "lib" for toolkit in toolkits]
    driver = driver_library()
    if driver is not None:
        # The driver brings no file by the name that a linker looks for.
        link = cache / "libcuda.so"
        link.unlink(missing_ok=True)
        link.symlink_to(driver)
        libraries.append(cache)
    for name, folders in (("CPATH", headers), ("LIBRARY_PATH", libraries)):
        there = [folder for folder in folders if folder.is_dir()]
        if there:
            values[name] = _joined(there, given, name)
    return values


def _joined(folders: Iterable[Path], given: Mapping[str, str], name: str) -> str:
    return os.pathsep.join([*map(str, folders), *filter(None, [given.get(name)])])


def find_cuda_home(given: Mapping[str, str], toolkits: Iterable[Path]) -> Path | None:
    """Return the folder of the CUDA toolkit; None without one.

    SGLang would take the one above `nvcc` on PATH, which is wrong where that is a script that calls another.
    """
    on_path = shutil.which("nvcc")
    candidates = [
        *map(Path, filter(None, [given.get("CUDA_HOME"), given.get("CUDA_PATH")])),
        *USUAL_TOOLKITS,
        *toolkits,
        *([Path(on_path).resolve().parents[1]] if on_path else []),
    ]
    return next((home for home in candidates if (home / "bin/nvcc").is_file()), None)


def driver_library() -> Path | None:
    """Return the file of the CUDA driver that this process would load; None without one."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    return next((Path(name) for name in mapped if "/libcuda.so" in name), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="download and compress the engine")
    packing.add_argument("out", type=Path)
    packing.add_argument("--torch", choices=KERNELS, default=None, help="the torch of the machine (default: pack one)")
    packing.add_argument("--part-mib", type=int, default=2000, help="a part has at most this size (default: 2000)")
    packing.add_argument("--wheels", type=Path, default=None, help="where wheels are kept (default: OUT/wheels)")
    packing.add_argument("--every-kernel", action="store_true", help="keep GPU code for all GPUs and head sizes")
    unpacking = commands.add_parser("unpack", help="on the other machine")
    unpacking.add_argument("parts", type=Path, metavar="in")
    unpacking.add_argument("out", type=Path)
    arguments = parser.parse_args()
    out: Path = arguments.out
    try:
        if arguments.command == "pack":
            wheels = arguments.wheels or out / "wheels"
            manifest = pack(out, arguments.torch, arguments.part_mib, wheels, arguments.every_kernel)
            for name in manifest["parts"]:
                print(f"{out / name}: {(out / name).stat().st_size / 2**20:.1f} MiB")
        else:
            manifest = unpack(arguments.parts, out)
            print(f"SGLang {manifest['packages']['sglang']} for torch {manifest['torch']}; now: . {out}/env.sh")
    except (PackError, OSError, ValueError, tarfile.TarError) as error:
        print(f"pack_engine.py {arguments.command}: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"pack_engine.py {arguments.command}: {' '.join(map(str, error.cmd[:4]))} failed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

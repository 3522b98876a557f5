"""Packs the engine of `requirements/cuda.lock` for a GPU machine without a network, which has Python 3.12 and CUDA 13.

    python bench/gpu/bundle.py fill OUT               OUT/site, of wheels from the package index, trimmed
    python bench/gpu/jit_cache.py OUT/site            what flashinfer would compile there for minutes
    python bench/gpu/bundle.py pack OUT               OUT/part-1-of-N.xz, ...

A machine that takes 64 MiB at a time gets the repository and one part with each command, so a part is as large as the
repository leaves room for. There, in the command that brings it, as the next one may take it away:

    mkdir -p /tmp/parts && cp part-1-of-N.xz /tmp/parts

and with the last of them

    python3 bench/gpu/bundle.py unpack /tmp/parts /tmp
    PYTHONPATH=/tmp/site python3 bench/h200.py --out FOLDER

It is the engine that `make env CUDA=1` installs, torch and Triton included, as the kernels of an SGLang are built for
one torch. CUDA's libraries and what every such machine has are not in it (`jit_cache.environment` says where they are
found). GPU code for other architectures is taken out of torch, NCCL and FlashAttention 3 (`gpu_code.py`), of the last
all but bfloat16 heads of 128, too; so are files that nothing here imports. What is compiled of this project (`own/`)
is laid beside its sources by `h200.py`.
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "bench"), str(ROOT / "tools")]

from compile_hot_path import MANIFEST, destination, manifest_of_sources
from gpu_code import keep_gpu_code

LOCK = ROOT / "requirements/cuda.lock"
PYTHON = "3.12"

# By the names of the lock file: what such a machine lacks or has of another version.
PACKAGES = (
    *("torch", "torchvision", "triton", "nvidia-nccl-cu13", "sglang", "sglang-kernel", "flashinfer-python"),
    *("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core"),
    *("nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi", "transformers", "tokenizers", "xgrammar"),
    *("compressed-tensors", "loguru", "gguf", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *("fastapi", "starlette", "uvicorn", "opentelemetry-api", "python-multipart", "orjson", "pyzmq", "msgspec"),
    *("pybase64", "setproctitle", "dill", "openai", "sniffio", "distro", "partial-json-parser", "jsonschema"),
    *("jsonschema-specifications", "referencing", "rpds-py", "soundfile", "cffi", "pycparser", "ipython", "traitlets"),
    *("nvshmem4py-cu13", "nixl", "nixl-cu13"),
)
LEFT_OUT = (
    *("sgl_kernel/flashmla_ops", "sgl_kernel/infllm_ops", "sgl_kernel/sm100/"),
    *("sglang/srt/rust_extensions/_server.", "sglang/srt/rust_extensions/_grpc."),
    *("sglang/srt/rust_extensions/_multimodal.", "sglang/srt/rust_extensions/_bench."),
    *("sglang/multimodal_gen/", "sglang/test/", "tools/", "triton_kernels/"),
    *(f"flashinfer/data/cutlass/{name}" for name in ("test", "examples", "docs", "media")),
    *(f"flashinfer/data/csrc/{name}" for name in ("cake_", "kda/", "gdn/", "fused_moe/")),
    *("flashinfer/fused_moe/backends/cudnn_frost/artifacts/", "flashinfer/moe_ep/kernel_src/"),
    # For compiling extensions, and of Triton what profiles or is for later GPUs.
    *("torch/include/", "torch/share/", "torch/bin/protoc", "nvidia/nccl/include/", "triton/_C/libproton"),
    *("triton/backends/nvidia/lib/cupti", "triton/backends/nvidia/bin/ptxas-blackwell", "triton/backends/amd/lib"),
    # nvshmem4py: calls from within kernels, and what its modules were generated from
    *("nvshmem/core/device/", "nvshmem/bindings/device/", "nvshmem/bindings/nvshmem.cpp"),
    *("nvshmem/bindings/ask_smem.cpp", "nvshmem/bindings/cynvshmem.cpp", "nvshmem/bindings/_internal/nvshmem.cpp"),
    *("build_utils.py", "build_backend.py", "xgrammar/lib/", "xgrammar/include/"),
    # NIXL between processes of one machine goes over UCX; a plugin is in the wheel twice.
    *("nixl_ep/", "nixl_ep_cu13/", "nixl_cu13.scripts/", "nixl_cu13.libs/nixl/", "nixl_cu13.libs/ucx/libucx_perftest"),
    *(
        f".nixl_cu13.mesonpy.libs/plugins/lib{name}"
        for name in (
            *(f"plugin_{one}" for one in ("AZURE", "GDS", "GPUNETIO", "GUSLI", "INFINIA", "LIBFABRIC", "OBJ", "POSIX")),
            *("telemetry", "trace"),
        )
    ),
    *(f"nixl_cu13.libs/lib{name}" for name in ("aws", "azure", "curl", "gusli", "s2n", "xml2", "zstd")),
)
# What transformers' modelling files were generated from: it passes them over when it looks for models.
NEVER_IMPORTED = re.compile(r"transformers/models/[^/]+/modular_")
# GPU code that is kept; None: all of the architecture.
HOPPER = 90
GPU_CODE: dict[str, str | None] = {
    "torch/lib/libtorch_cuda.so": None,
    "torch/lib/libtorch_cuda_linalg.so": None,
    "nvidia/nccl/lib/libnccl.so.2": None,
    # Values of 128 in bfloat16; and what every call needs, whatever its sizes.
    "sgl_kernel/flash_ops.abi3.so": (
        r"ELi128ENS_10bfloat16_tEfNS_4arch4Sm90E|prepare_varlen_num_blocks|FlashAttnFwdCombine"
    ),
}
GLIBC_MINORS = (39, 38, 36, 35, 34, 31, 28, 27, 26, 24, 18, 17, 12, 5)
# What travels with one command: the repository's files, those that git does not ignore, and one part.
CARRIED_BYTES = 64 * 2**20
# Kept free for what the repository grows by until then.
GROWTH_BYTES = 2**20
STRIPPED_FROM_BYTES = 2**20
OWN = "own"
# What is compressed at a time, two threads' work; a part ends with one.
BLOCK_BYTES = 32 * 2**20


def locked(names: Iterable[str], lock: Path = LOCK) -> list[str]:
    """`name==version` of each. Raises ValueError naming what is not locked."""
    versions = dict(
        line.split("==") for line in lock.read_text(encoding="utf-8").splitlines() if "==" in line and line[0] != "#"
    )
    missing = [name for name in names if name not in versions]
    if missing:
        raise ValueError(f"{lock.name} has no {', '.join(missing)}")
    return [f"{name}=={versions[name]}" for name in names]


def platforms() -> list[str]:
    """pip takes each name of a platform exactly."""
    names = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    return names + [f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")]


def download(folder: Path, packages: Sequence[str]) -> None:
    """Wheels for the other machine into `folder`. Raises subprocess.CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    for name in platforms():
        command += ["--platform", name]
    subprocess.run([*command, "-d", str(folder), *packages], check=True)


def normalised(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def is_wanted(name: str) -> bool:
    """Return whether a wheel's entry goes into the bundle."""
    return not name.startswith(LEFT_OUT) and ".data/" not in name and NEVER_IMPORTED.match(name) is None


def unpack_wheels(
    wheels: Iterable[Path], target: Path, packages: Sequence[str], wanted: Callable[[str], bool] = is_wanted
) -> None:
    """The wanted parts of the wanted wheels. Raises ValueError naming a package without a wheel."""
    missing = {(normalised(name), version) for name, _, version in (package.partition("==") for package in packages)}
    for wheel in sorted(wheels):
        name, version = wheel.name.split("-")[:2]
        if (normalised(name), version) not in missing:
            continue
        missing.discard((normalised(name), version))
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                if wanted(entry.filename):
                    archive.extract(entry, target)
    if missing:
        raise ValueError(f"no wheel of {', '.join('=='.join(one) for one in sorted(missing))}")


def trim(site: Path) -> None:
    """Take out GPU code of other architectures, and symbols; what came repaired is left as it is."""
    for name, wanted in GPU_CODE.items():
        kept, kept_bytes = keep_gpu_code(site / name, HOPPER, wanted)
        print(f"{Path(name).name}: GPU code of {kept} source files kept, {kept_bytes / 2**20:.1f} MiB", flush=True)
    for library in site.rglob("*.so*"):
        is_left = "common_ops" in library.name or ".libs" in str(library) or library.is_symlink()
        if not is_left and library.stat().st_size > STRIPPED_FROM_BYTES:
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=False)
    for program in (*site.glob("triton/backends/nvidia/bin/*"), *site.glob("torch/bin/*")):
        program.chmod(0o755)


def compile_own(site: Path, python: str) -> None:
    """What is compiled of this project into site/own, by folders of the repository.

    Raises subprocess.CalledProcessError.
    """
    own = site / OWN
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        for name in repository_files(ROOT):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
        subprocess.run([python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, str(source)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            compiled = [name for name in archive.namelist() if name.endswith(".so")]
            for name in compiled:
                target = own / destination(Path(name)).relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
    manifest = own / MANIFEST.relative_to(ROOT)
    manifest.write_text(manifest_of_sources(), encoding="utf-8")
    print(f"{len(compiled)} modules of this project compiled for Python {PYTHON}", flush=True)


def lay_own(site: Path, root: Path) -> int:
    """Copy what was compiled of this project beside its sources in `root`; how many files."""
    found = [path for path in (site / OWN).rglob("*") if path.is_file()]
    for path in found:
        target = root / path.relative_to(site / OWN)
        staged = target.with_name(f"{target.name}.new")
        shutil.copy2(path, staged)
        staged.replace(target)  # a process that has the old one loaded keeps it
    return len(found)


def fill(out: Path, wheels: Path, python: str) -> None:
    """Download, unpack and compile everything, trimmed, into an empty OUT/site."""
    packages = locked(PACKAGES)
    download(wheels, packages)
    site = out / "site"
    shutil.rmtree(site, ignore_errors=True)
    unpack_wheels(wheels.glob("*.whl"), site, packages)
    trim(site)
    compile_own(site, python)


def repository_files(root: Path) -> list[str]:
    """Files that git tracks or does not ignore. Raises OSError, subprocess.CalledProcessError."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(name for name in set(names) if name and (root / name).is_file())


def part_limit_bytes(root: Path) -> int:
    """Return how large one part may be, so that it and the repository travel together."""
    return CARRIED_BYTES - GROWTH_BYTES - sum((root / name).lstat().st_size for name in repository_files(root))


class _Blocks:
    """A file that hands on what is written to it in pieces of one size."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._buffer = bytearray()

    def write(self, data: bytes) -> int:
        self._buffer += data
        while len(self._buffer) >= BLOCK_BYTES:
            self._take(bytes(self._buffer[:BLOCK_BYTES]))
            del self._buffer[:BLOCK_BYTES]
        return len(data)

    def finish(self) -> None:
        if self._buffer:
            self._take(bytes(self._buffer))


def pack(out: Path, limit_bytes: int) -> int:
    """Write OUT/site as parts of at most `limit_bytes`, in place of earlier ones; how many.

    A part is a file of whole xz streams: all of them behind each other are one compressed archive. Raises ValueError
    where a part would have room for none.
    """
    for old in out.glob("part-*.xz"):
        old.unlink()
    with ThreadPoolExecutor(2) as threads:
        waiting: list[Any] = []
        sizes: list[int] = []

        def add(compressed: bytes) -> None:
            if len(compressed) > limit_bytes:
                raise ValueError(f"a block of {len(compressed)} bytes, and a part takes {limit_bytes}")
            if not sizes or sizes[-1] + len(compressed) > limit_bytes:
                sizes.append(0)
                print(f"part {len(sizes)} ...", flush=True)
            sizes[-1] += len(compressed)
            with (out / f"part-{len(sizes)}.xz").open("ab") as part:
                part.write(compressed)

        def take(block: bytes) -> None:
            waiting.append(threads.submit(lzma.compress, block))
            if len(waiting) > 3:
                add(waiting.pop(0).result())

        blocks = _Blocks(take)
        with tarfile.open(mode="w|", fileobj=blocks) as archive:  # type: ignore[call-overload]
            archive.add(out / "site", "site")
        blocks.finish()
        for future in waiting:
            add(future.result())
    for number, size in enumerate(sizes, 1):
        (out / f"part-{number}.xz").rename(out / f"part-{number}-of-{len(sizes)}.xz")
        print(f"part-{number}-of-{len(sizes)}.xz {size / 2**20:.1f} of {limit_bytes / 2**20:.1f} MiB")
    return len(sizes)


class _Joined:
    """Files read as one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._data = self._read(paths)
        self._left = b""

    @staticmethod
    def _read(paths: Sequence[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                yield from iter(lambda file=file: file.read(1 << 20), b"")  # type: ignore[misc]

    def read(self, size: int = -1) -> bytes:
        if not self._left:
            self._left = next(self._data, b"")
        size = len(self._left) if size < 0 else size
        data, self._left = self._left[:size], self._left[size:]
        return data


def unpack(parts: Path, target: Path) -> None:
    """The archive whose parts are in `parts` into `target`. Raises ValueError naming the parts that are not there,
    EOFError, lzma.LZMAError or tarfile.TarError for damaged ones."""
    found: dict[int, Path] = {}
    count = 0
    for path in parts.glob("part-*-of-*.xz"):
        number, count = (int(text) for text in re.findall(r"\d+", path.name)[:2])
        found[number] = path
    missing = sorted(set(range(1, count + 1)) - set(found))
    if missing or not count:
        raise ValueError(f"{parts} has no part {', '.join(map(str, missing)) or 'at all'} of {count or 'any'}")
    joined: IO[bytes] = _Joined([found[number] for number in range(1, count + 1)])  # type: ignore[assignment]
    with lzma.open(joined) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
        # As a keyword, Python 3.11 knows it from 3.11.4 on.
        archive.extraction_filter = getattr(tarfile, "tar_filter", None)
        archive.extractall(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    filling = commands.add_parser("fill", help="download and unpack")
    filling.add_argument("out", type=Path)
    filling.add_argument("--wheels", type=Path, default=None, help="where wheels are kept (default: OUT/wheels)")
    filling.add_argument("--python", default=f"python{PYTHON}", help="compiles this project (default: %(default)s)")
    packing = commands.add_parser("pack", help="write the parts of OUT/site")
    packing.add_argument("out", type=Path)
    unpacking = commands.add_parser("unpack", help="on the other machine")
    unpacking.add_argument("parts", type=Path)
    unpacking.add_argument("target", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.command == "fill":
            fill(arguments.out, arguments.wheels or arguments.out / "wheels", arguments.python)
        elif arguments.command == "pack":
            if not (arguments.out / "site").is_dir():
                parser.error(f"pack: there is no {arguments.out / 'site'}")
            pack(arguments.out, part_limit_bytes(ROOT))
        else:
            unpack(arguments.parts, arguments.target)
    except (ValueError, OSError, EOFError, lzma.LZMAError, tarfile.TarError, subprocess.CalledProcessError) as error:
        print(f"bundle.py {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

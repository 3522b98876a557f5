"""Packs SGLang for a GPU machine without a network: wheels from the package index, trimmed, in archives.

    python bench/gpu/bundle.py OUT               OUT/site, and OUT/bundle-N.tar.gz of it
    python bench/gpu/jit_cache.py OUT/site       what would be compiled there for minutes, if anything can be here
    python bench/gpu/bundle.py OUT --pack        the archives anew

A machine that takes 64 MiB at a time gets the repository and one archive with each command, so an archive is as large
as the repository leaves room for. There, in the command that brings it, as the next one may take it away:

    tar xzf bundle-1.tar.gz -C /tmp
    PYTHONPATH=/tmp/site python3 bench/h200.py --out FOLDER

For Python 3.12 with torch 2.11 and triton 3.6 for CUDA 13, which are there already; hence SGLang 0.5.17, whose kernels
are built for that torch (those of 0.5.23 for 2.14). `bundle-1` is enough to measure. The last has what saves minutes or
adds a stage: modules compiled beforehand, NIXL for two engines, and FlashAttention 3, SGLang's default attention on
Hopper GPUs, for one more baseline. Of that, and of nothing else, GPU code is taken out that other head sizes, types and
architectures need (`gpu_code.py`): it runs bfloat16 heads of 128. Left out: FlashMLA, other architectures, and files
that nothing here imports.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from gpu.gpu_code import keep_gpu_code
from gpu.jit_cache import FLASHINFER_PACKAGE

ROOT = Path(__file__).resolve().parents[2]

# transformers 5.17 and SGLang 0.5.17 do not go together, hence an older one.
PACKAGES = (
    *("sglang==0.5.17", "sglang-kernel==0.4.5", "flashinfer_python==0.6.15.post1", "apache-tvm-ffi==0.1.11"),
    *("transformers==5.12.1", "tokenizers==0.22.2", "xgrammar==0.2.1", "compressed-tensors==0.20.0"),
    *("loguru==0.7.3", "gguf==0.19.0", "pydantic==2.14.3", "pydantic-core==2.50.4", "annotated-types==0.8.0"),
    *("typing-inspection==0.4.5", "fastapi==0.121.3", "starlette==0.49.3", "uvicorn==0.54.0"),
    *("python-multipart==0.0.34", "orjson==3.13.0", "pyzmq==27.3.0", "msgspec==0.22.0", "pybase64==1.5.1"),
    *("setproctitle==1.3.8", "dill==0.4.1", "openai==2.6.1", "sniffio==1.3.1", "distro==1.9.0"),
    *("partial-json-parser==0.2.1.1.post7", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1"),
    *("referencing==0.37.0", "rpds-py==2026.9.1", "soundfile==0.13.1", "cffi==2.1.1", "pycparser==3.12"),
    *("ipython==9.18.1", "traitlets==5.16.1", "nvshmem4py-cu13==0.4.1", "nixl==1.5.1", "nixl-cu13==1.5.1"),
)
LEFT_OUT = (
    *("sgl_kernel/flashmla_ops", "sgl_kernel/infllm_ops", "sgl_kernel/sm100/"),
    *("sglang/srt/server/_core.", "sglang/srt/grpc/_core.", "sglang/srt/multimodal/_core."),
    *("sglang/multimodal_gen/", "sglang/test/", "tools/", "triton_kernels/"),
    *(f"flashinfer/data/cutlass/{name}" for name in ("test", "examples", "docs", "media")),
    # nvshmem4py: calls from within kernels, and what its modules were generated from
    *(
        "nvshmem/core/device/",
        "nvshmem/bindings/device/",
        "nvshmem/bindings/nvshmem.cpp",
        "nvshmem/bindings/ask_smem.cpp",
    ),
    *("nvshmem/bindings/cynvshmem.cpp", "nvshmem/bindings/_internal/nvshmem.cpp"),
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
FLASH_ATTENTION_3 = "sgl_kernel/flash_ops.abi3.so"
# Values of 128 in bfloat16; and what every call needs, whatever its sizes.
FLASH_ATTENTION_3_KERNELS = r"ELi128ENS_10bfloat16_tEfNS_4arch4Sm90E|prepare_varlen_num_blocks|FlashAttnFwdCombine"
HOPPER = 90
GLIBC_MINORS = (39, 38, 36, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
# What travels with one command: the repository's files, those that git does not ignore, and one archive.
CARRIED_BYTES = 64 * 2**20
# Kept free for what the repository grows by until then.
GROWTH_BYTES = 2**20
# What is no part of the engine, by how the names of its entries begin, in the order in which it fills the room left.
# Of flashinfer's modules the norm goes first: it stands in every layer, and a machine may lack what compiling it needs.
EXTRAS = {
    "flashinfer's norm": ("flashinfer_jit_cache/__init__.py", "flashinfer_jit_cache/jit_cache/norm"),
    "SGLang's modules": ("sglang_jit",),
    "flashinfer's attention": ("flashinfer_jit_cache/",),
    "NIXL": ("nixl", ".nixl"),
    "FlashAttention 3": (FLASH_ATTENTION_3,),
}
STRIPPED_FROM_BYTES = 2**20


def platforms() -> list[str]:
    """pip takes each name of a platform exactly."""
    names = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    return names + [f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")]


def download(folder: Path, packages: Sequence[str]) -> None:
    """Wheels for the other machine into `folder`. Raises subprocess.CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp"]
    for name in platforms():
        command += ["--platform", name]
    subprocess.run([*command, "-d", str(folder), *packages], check=True)


def normalised(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def is_wanted(name: str) -> bool:
    """Whether a wheel's entry goes into the bundle."""
    return not name.startswith(LEFT_OUT) and ".data/" not in name and NEVER_IMPORTED.match(name) is None


def unpack(wheels: Iterable[Path], site: Path, packages: Sequence[str]) -> None:
    """The wanted parts of the wanted wheels. Raises ValueError naming a package without a wheel."""
    missing = {(normalised(name), version) for name, _, version in (one.partition("==") for one in packages)}
    for wheel in sorted(wheels):
        name, version = wheel.name.split("-")[:2]
        if (normalised(name), version) not in missing:
            continue
        missing.discard((normalised(name), version))
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                if is_wanted(entry.filename):
                    archive.extract(entry, site)
    if missing:
        raise ValueError(f"no wheel of {', '.join('=='.join(one) for one in sorted(missing))}")


def strip(site: Path) -> None:
    """Debugging symbols; what holds GPU code or came repaired is left as it is."""
    for library in site.rglob("*.so*"):
        is_left = "common_ops" in library.name or ".libs" in str(library)
        if not is_left and library.stat().st_size > STRIPPED_FROM_BYTES:
            subprocess.run(["strip", "--strip-debug", str(library)], check=False)


def repository_bytes(root: Path) -> int:
    """What travels of the repository: its files that git tracks or does not ignore. Raises OSError,
    subprocess.CalledProcessError."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    return sum((root / name).lstat().st_size for name in set(names) if name and (root / name).is_file())


def part_limit_bytes(root: Path) -> int:
    """How large one archive may be, so that it and the repository travel together."""
    return CARRIED_BYTES - GROWTH_BYTES - repository_bytes(root)


def divide(sizes: Mapping[str, int], limit: int, last: Sequence[str] = ()) -> list[list[str]]:
    """Names into as few parts of at most `limit` as first-fit makes of them: largest first, those of `last` at the end
    and in their order. One that is larger is alone."""
    parts: list[list[str]] = []
    first = sorted(set(sizes).difference(last), key=lambda name: (-sizes[name], name))
    for name in (*first, *(name for name in last if name in sizes)):
        fitting = (part for part in parts if sum(sizes[one] for one in part) + sizes[name] <= limit)
        part = next(fitting, None)
        if part is None:
            parts.append(part := [])
        part.append(name)
    return parts


def write_archive(target: Path | io.BytesIO, site: Path, names: Iterable[str]) -> None:
    """A compressed archive of these entries of `site`; FlashAttention 3 is in it only if it is one of them."""
    options = {"fileobj": target} if isinstance(target, io.BytesIO) else {"name": target}

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if entry.name == f"site/{FLASH_ATTENTION_3}" else entry

    with tarfile.open(mode="w:gz", compresslevel=9, **options) as archive:  # type: ignore[call-overload]
        for name in sorted(names):
            archive.add(site / name, f"site/{name}", filter=None if name == FLASH_ATTENTION_3 else kept)


def entries(site: Path) -> dict[str, list[str]]:
    """What goes into one archive or another: entries of `site` by the name of their extra, others by their own."""
    package = site / FLASHINFER_PACKAGE
    found = [entry for entry in site.iterdir() if entry != package]
    found += [*package.glob("*.*"), *package.glob("jit_cache/*"), *site.glob(FLASH_ATTENTION_3)]
    groups: dict[str, list[str]] = {}
    for name in sorted(str(entry.relative_to(site)) for entry in found):
        extra = next((extra for extra, starts in EXTRAS.items() if name.startswith(starts)), name)
        groups.setdefault(extra, []).append(name)
    return groups


def packed_bytes(site: Path, name: str) -> int:
    buffer = io.BytesIO()
    write_archive(buffer, site, [name])
    return buffer.tell()


def fill(site: Path, wheels: Path) -> None:
    """Download and unpack everything, trimmed, into an empty `site`."""
    download(wheels, PACKAGES)
    shutil.rmtree(site, ignore_errors=True)
    unpack(wheels.glob("*.whl"), site, PACKAGES)
    strip(site)
    kept, kept_bytes = keep_gpu_code(site / FLASH_ATTENTION_3, HOPPER, FLASH_ATTENTION_3_KERNELS)
    print(f"FlashAttention 3: GPU code of {kept} source files kept, {kept_bytes / 2**20:.1f} MiB")


def pack(out: Path, limit_bytes: int) -> int:
    """Write the archives of `out`/site in place of earlier ones; 1 where one is larger than `limit_bytes`, else 0."""
    for old in out.glob("bundle-*.tar.gz"):
        old.unlink()
    site = out / "site"
    groups = entries(site)
    sizes = {group: sum(packed_bytes(site, name) for name in names) for group, names in groups.items()}
    status = 0
    for number, part in enumerate(divide(sizes, limit_bytes, tuple(EXTRAS)), 1):
        path = out / f"bundle-{number}.tar.gz"
        write_archive(path, site, (name for group in part for name in groups[group]))
        packed_mib, limit_mib = path.stat().st_size / 2**20, limit_bytes / 2**20
        held = ["the engine" if set(part).difference(EXTRAS) else "", *(group for group in EXTRAS if group in part)]
        print(f"{path} {packed_mib:.1f} of {limit_mib:.1f} MiB: {', '.join(filter(None, held))}")
        if packed_mib > limit_mib:
            print(f"{path}: {packed_mib - limit_mib:.1f} MiB more than travel with the repository", file=sys.stderr)
            status = 1
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheels", type=Path, default=None, help="where wheels are kept (default: OUT/wheels)")
    parser.add_argument("--pack", action="store_true", help="pack OUT/site as it is")
    arguments = parser.parse_args()
    site = arguments.out / "site"
    if not arguments.pack:
        fill(site, arguments.wheels or arguments.out / "wheels")
    elif not site.is_dir():
        parser.error(f"--pack: there is no {site}")
    return pack(arguments.out, part_limit_bytes(ROOT))


if __name__ == "__main__":
    sys.exit(main())

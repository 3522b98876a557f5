"""Build the C++ extension modules in place with the system's compiler and nanobind.

    python tools/build_native.py            # next to the sources, for an editable installation
    python tools/build_native.py --remove   # without them Python plans and numpy moves rows

A module carries the digest of what it was built from, so it is built again only when that has changed. CXX names the
compiler (default c++).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# No contraction to fused multiply-add: a plan must be the same on every machine.
COMPILE_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off")
SECTION_FLAGS = ("-ffunction-sections", "-fdata-sections", "-DNDEBUG", "-DNB_COMPACT_ASSERTIONS")
LINK_FLAGS = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-Wl,-s", "-Wl,--gc-sections")


@dataclass(frozen=True)
class NativeModule:
    """One extension module: where it belongs below its path root, and the folder of its sources."""

    root: str  # in the checkout
    package: str  # below the root
    name: str
    sources: str  # folder below the package; every .cpp is compiled, every .hpp may be included
    includes: str = ""  # another folder of headers, in the checkout

    def source_files(self) -> list[Path]:
        """All files that the module is made of."""
        folder = ROOT / self.root / self.package / self.sources
        shared = (ROOT / self.includes).glob("*.hpp") if self.includes else ()
        return sorted([*folder.glob("*.cpp"), *folder.glob("*.hpp"), *shared])

    def built(self) -> Path:
        """The extension module, relative to the path root."""
        return Path(self.package) / f"{self.name}{SUFFIX}"

    def in_place(self) -> Path:
        """Return where the module lies in an editable installation."""
        return ROOT / self.root / self.built()


NATIVE_MODULES = (
    NativeModule("python", "sglang_ext/long_pool/decide", "_core", "native"),
    NativeModule("python", "sglang_ext/transfer/transports", "_rows", "native"),
    NativeModule("bench", "baselines", "_tetris", "native", "python/sglang_ext/long_pool/decide/native"),
)


def source_digest(module: NativeModule) -> str:
    """Digest of the sources, of this file and of the Python that a module is built for."""
    digest = hashlib.sha256(f"{SUFFIX} {nanobind_version()}".encode())
    for file in (Path(__file__).resolve(), *module.source_files()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def nanobind_version() -> str:
    """The version of nanobind that would be used. ImportError where it is not installed."""
    import nanobind  # type: ignore[import-untyped]

    return str(nanobind.__version__)


def is_built(module: NativeModule) -> bool:
    """Return whether the module in place is of these very sources."""
    file = module.in_place()
    return file.exists() and source_digest(module).encode() in file.read_bytes()


def compiler() -> list[str] | None:
    """The command of the C++ compiler; None where there is none."""
    command = shlex.split(os.environ.get("CXX", "c++"))
    return command if shutil.which(command[0]) else None


def build(module: NativeModule, command: list[str], destination: Path) -> None:
    """Compile and link `module` to `destination`. subprocess.CalledProcessError with the compiler's words."""
    import nanobind

    nanobind_root = Path(nanobind.include_dir()).parent
    own = [file for file in module.source_files() if file.suffix == ".cpp"]
    includes = [sysconfig.get_path("include"), nanobind.include_dir(), str(nanobind_root / "ext/robin_map/include")]
    includes += [str(ROOT / module.includes)] if module.includes else []
    flags = [*COMPILE_FLAGS, *SECTION_FLAGS, *(f"-I{folder}" for folder in includes)]
    flags.append(f'-DSOURCE_DIGEST="{source_digest(module)}"')
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sglang-ext-native-") as folder:
        objects = []
        for source in (*own, Path(nanobind.source_dir()) / "nb_combined.cpp"):
            objects.append(str(Path(folder) / f"{source.stem}.o"))
            run([*command, *flags, "-c", str(source), "-o", objects[-1]])
        linked = Path(folder) / destination.name
        run([*command, "-shared", *objects, *LINK_FLAGS, "-o", str(linked)])
        # Replaced at once: a process that has the old one loaded keeps it.
        staged = destination.with_suffix(".new")
        shutil.copy2(linked, staged)
        staged.replace(destination)


def run(command: list[str]) -> None:
    """Run a compiler; its output is kept for the error."""
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the C++ extension modules in place.")
    parser.add_argument("--remove", action="store_true", help="remove what was built")
    parser.add_argument("--list", action="store_true", help="print the files whose change asks for a new build")
    parser.add_argument("--check", action="store_true", help="exit with status 1 unless all modules are of the sources")
    arguments = parser.parse_args()
    if arguments.list:
        files = [Path(__file__).resolve(), *(file for module in NATIVE_MODULES for file in module.source_files())]
        print(*(file.relative_to(ROOT) for file in files))
        return 0
    if arguments.check:
        return 0 if all(is_built(module) for module in NATIVE_MODULES) else 1
    if arguments.remove:
        for module in NATIVE_MODULES:
            module.in_place().unlink(missing_ok=True)
        return 0
    command = compiler()
    if command is None:
        print(
            "no C++ compiler found: planning and KV transfers are slower (install g++ or set CXX)",
            file=sys.stderr,
        )
        return 0
    for module in NATIVE_MODULES:
        if is_built(module):
            continue
        print(f"building {module.package}/{module.name} (about half a minute) ...", file=sys.stderr, flush=True)
        started_s = time.monotonic()
        try:
            build(module, command, module.in_place())
        except subprocess.CalledProcessError as error:
            print(error.stdout[-4000:], file=sys.stderr)
            print(f"building {module.package}/{module.name} failed", file=sys.stderr)
            return 1
        print(f"built in {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

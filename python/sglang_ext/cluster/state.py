"""`state.json`: where a running cluster's programs are, for people and scripts; for its owner only."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

STATE_FILE = "state.json"
POOL_KEY_FILE = "pool-key"
USAGE_FILE = "usage.db"  # of the tenants, which outlives the cluster


class ClusterInUseError(RuntimeError):
    """Another process runs a cluster of this name."""


@dataclass(frozen=True, slots=True)
class ProgramState:
    """One program at the moment of writing."""

    name: str
    role: str  # short, long, both, decode, coordinator or router
    phase: str
    url: str
    bootstrap_port: int | None
    pid: int | None
    restarts: int
    log: str


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The contents of `state.json`; the admin key is why the file's mode is 0600."""

    name: str
    pid: int  # of the supervisor
    url: str  # of the router
    model: str
    admin_api_key: str
    programs: tuple[ProgramState, ...]


def write_state(folder: Path, state: ClusterState) -> None:
    """Replace `folder`/state.json as a whole: a reader sees the old or the new file."""
    # mkstemp makes the file with mode 0600
    handle, scratch = tempfile.mkstemp(prefix=f".{STATE_FILE}-", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(state), file, indent=2)
            file.write("\n")
        os.replace(scratch, folder / STATE_FILE)
    except BaseException:
        os.unlink(scratch)
        raise


def write_pool_key(path: Path) -> None:
    """Write a new key for the members of the long pool and their coordinator, which no other user may read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")


def remove_state(folder: Path) -> None:
    """Delete the files: the cluster is down."""
    for name in (STATE_FILE, POOL_KEY_FILE):
        (folder / name).unlink(missing_ok=True)


def lock_folder(folder: Path) -> IO[str]:
    """Make `folder` and take it for this process until the returned file is closed.

    Raises ClusterInUseError when another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise ClusterInUseError(
            f"a cluster runs in {folder} already (process {holder}); stop it, or give another name: --set name=NAME"
        ) from None
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file

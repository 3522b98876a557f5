"""A PostgreSQL server of Debian's package over a folder of its own, as a user without rights.

with postgres_server() as url:
    ...
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.engines import free_port

_PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
needs_postgres = pytest.mark.skipif(not _PROGRAMS, reason="no PostgreSQL: `apt-get install postgresql`")


def _run(*command: str | Path) -> None:
    """Run a program of the server's, which refuses root."""
    user = pwd.getpwnam("nobody") if os.getuid() == 0 else None
    rights = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    done = subprocess.run(
        [_PROGRAMS[-1] / command[0], *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # no pipe: a server that is started keeps it
        stderr=subprocess.STDOUT,
        cwd="/",
        **rights,  # type: ignore[arg-type]
    )
    assert done.returncode == 0, command


@contextmanager
def postgres_server() -> Iterator[str]:
    """Serve until the block ends; yields the URL of an empty database."""
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    port = free_port()
    try:
        if os.getuid() == 0:
            shutil.chown(folder, "nobody")
        data = folder / "data"
        _run("initdb", "--pgdata", data, "--username", "batches", "--auth", "trust", "--no-sync")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder}"
        _run("pg_ctl", "start", "--wait", "--pgdata", data, "--log", folder / "log", "--options", options)
        try:
            yield f"postgresql://batches@127.0.0.1:{port}/postgres"
        finally:
            _run("pg_ctl", "stop", "--wait", "--mode", "immediate", "--pgdata", data)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

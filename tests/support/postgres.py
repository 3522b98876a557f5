"""A PostgreSQL server of Debian's package over a folder of its own, as a user without rights.

with postgres_server() as url:
    ...
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
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


@dataclass(frozen=True)
class PostgresServer:
    """A server that runs."""

    folder: Path
    port: int

    @property
    def url(self) -> str:
        """Return the URL of a database that was empty."""
        return f"postgresql://batches@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.folder}"
        data, log = self.folder / "data", self.folder / "log"
        _run("pg_ctl", "start", "--wait", "--pgdata", data, "--log", log, "--options", options)

    def stop(self, mode: str = "immediate") -> None:
        """Stop: at once, as a crash does, or `fast`, which ends connections first."""
        _run("pg_ctl", "stop", "--wait", "--mode", mode, "--pgdata", self.folder / "data")


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Serve until the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    server = PostgresServer(folder, free_port())
    try:
        if os.getuid() == 0:
            shutil.chown(folder, "nobody")
        _run("initdb", "--pgdata", folder / "data", "--username", "batches", "--auth", "trust", "--no-sync")
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgres_server() -> Iterator[str]:
    """Serve until the block ends; yields the URL of an empty database."""
    with running_postgres() as server:
        yield server.url


class Cut(Enum):
    """The moment at which a connection breaks."""

    BEFORE = "before"  # the server gets the commit
    AFTER = "after"  # it has carried it out; the client does not see its answer


class CommitCutter:
    """A proxy to a server that breaks connections at commits.

    `decide` is asked at each commit, with all statements of the transaction.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.decide: Callable[[str], Cut | None] = lambda statements: None
        self.cuts: Counter[Cut] = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        return f"postgresql://batches@127.0.0.1:{self.port}/postgres?sslmode=disable&gssencmode=disable"

    def serve(self) -> None:
        """Accept connections until `close`."""
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _relay(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as server:
            is_cut = threading.Event()
            answers = threading.Thread(target=self._to_client, args=(client, server, is_cut), daemon=True)
            answers.start()
            read = _StatementReader()
            with suppress(OSError):
                while data := client.recv(1 << 20):
                    if read.ends_transaction(data) and (cut := self.decide("\n".join(read.transaction))):
                        self.cuts[cut] += 1
                        if cut is Cut.BEFORE:
                            break
                        is_cut.set()
                    server.sendall(data)
            if not is_cut.is_set():
                _end(server)
            _end(client)
            answers.join()

    def _to_client(self, client: socket.socket, server: socket.socket, is_cut: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 20):
                if is_cut.is_set():
                    break
                client.sendall(data)
        _end(client, server)


class _StatementReader:
    """Reads what a client sends: the statements of its latest transaction, also where they were prepared before."""

    def __init__(self) -> None:
        self.transaction: list[str] = []
        self._prepared: dict[bytes, str] = {}
        self._left = b""
        self._head_bytes = 0  # of a message before its length: the first has no type

    def ends_transaction(self, data: bytes) -> bool:
        """Take the next bytes; return whether a commit is among them."""
        self._left += data
        has_commit = False
        while len(self._left) >= self._head_bytes + 4:
            end = self._head_bytes + int.from_bytes(self._left[self._head_bytes : self._head_bytes + 4], "big")
            if len(self._left) < end:
                break
            kind, body = self._left[: self._head_bytes], self._left[self._head_bytes + 4 : end]
            self._left, self._head_bytes = self._left[end:], 1
            statement = self._statement(kind, body)
            if statement is not None:
                if statement == "BEGIN":
                    self.transaction = []
                self.transaction.append(statement)
                has_commit |= statement == "COMMIT"
        return has_commit

    def _statement(self, kind: bytes, body: bytes) -> str | None:
        first, _, rest = body.partition(b"\0")
        if kind == b"Q":
            return first.decode()
        if kind == b"P":
            self._prepared[first] = rest.partition(b"\0")[0].decode()
        return self._prepared[rest.partition(b"\0")[0]] if kind == b"B" else None


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def commit_cutter(server: PostgresServer) -> Iterator[CommitCutter]:
    """A proxy to a server until the block ends."""
    cutter = CommitCutter(server.port)
    thread = threading.Thread(target=cutter.serve, daemon=True)
    thread.start()
    try:
        yield cutter
    finally:
        cutter.close()
        thread.join(10)

"""An S3 server (moto) in a process of its own, behind a proxy that can fail and hang, where it is installed.

with object_storage() as storage:
    storage.put("in.jsonl", b"...")  # in the bucket `batches`
    ... storage.environment of the processes that use it
    storage.faults.mode = "refuse"
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

import pytest
import requests

from support.engines import free_port

FOLDER = Path(__file__).parents[2] / ".venv/s3"
BUCKET = "batches"
UP_WITHIN_S = 60.0
needs_object_storage = pytest.mark.skipif(not (FOLDER / "moto").is_dir(), reason="moto is not there: `make s3-env`")


class Faults:
    """A proxy in front of the server. `mode`: pass | refuse | error | hang; `hold_after_bytes` hangs from then on."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.mode = "pass"
        self.sent_bytes = 0  # to the server
        self.hold_after_bytes: int | None = None
        self.refused = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def is_holding(self) -> bool:
        """Return whether nothing is passed on."""
        is_over = self.hold_after_bytes is not None and self.sent_bytes >= self.hold_after_bytes
        return self.mode == "hang" or is_over

    def close(self) -> None:
        self.hold_after_bytes, self.mode = None, "refuse"
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            if self.mode in {"refuse", "error"}:
                self.refused += 1
                if self.mode == "error":
                    with suppress(OSError):
                        client.recv(1 << 16)
                        client.sendall(b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                return
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as server:
                back = threading.Thread(target=self._pass, args=(server, client, False), daemon=True)
                back.start()
                self._pass(client, server, True)
                back.join()

    def _pass(self, source: socket.socket, sink: socket.socket, is_to_server: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while self.is_holding:
                    time.sleep(0.01)
                if self.mode in {"refuse", "error"}:
                    break
                sink.sendall(data)
                self.sent_bytes += len(data) if is_to_server else 0
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class ObjectStorage:
    """The server, as the test sees it: directly, not through the proxy."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.faults = Faults(port)
        path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
        self.environment = {
            **os.environ,
            "PYTHONPATH": path,
            "AWS_ENDPOINT_URL_S3": self.faults.url,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def _ask(self, method: str, path: str, data: bytes | None = None, **params: str) -> bytes:
        signed = {"authorization": "AWS4-HMAC-SHA256 Credential=tests/20260101/us-east-1/s3/aws4_request"}  # unchecked
        url = f"{self.url}/{quote(path)}"
        answer = requests.request(method, url, params=params, data=data, headers=signed, timeout=60)
        answer.raise_for_status()
        return answer.content

    def make_bucket(self) -> None:
        self._ask("PUT", BUCKET)

    def put(self, key: str, content: bytes) -> None:
        self._ask("PUT", f"{BUCKET}/{key}", content)

    def get(self, key: str) -> bytes:
        return self._ask("GET", f"{BUCKET}/{key}")

    def names(self) -> list[str]:
        """The keys of all objects."""
        return re.findall("<Key>([^<]*)</Key>", self._ask("GET", BUCKET, None, **{"list-type": "2"}).decode())

    def unfinished(self) -> int:
        """Return how many uploads have begun and not ended."""
        found = ElementTree.fromstring(self._ask("GET", BUCKET, None, uploads=""))
        return sum(one.tag.endswith("}Upload") or one.tag == "Upload" for one in found)


@contextmanager
def object_storage() -> Iterator[ObjectStorage]:
    """Serve an empty bucket until the block ends."""
    port = free_port()
    storage = ObjectStorage(port)
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env=storage.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end_s = time.monotonic() + UP_WITHIN_S
        while True:
            try:
                storage.make_bucket()
                break
            except requests.RequestException:
                assert server.poll() is None, "the storage did not start"
                assert time.monotonic() < end_s
                time.sleep(0.1)
        yield storage
    finally:
        storage.faults.close()
        server.kill()
        server.wait()

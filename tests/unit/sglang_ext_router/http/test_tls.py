"""TLS to clients and to instances: served, checked, and refused with one clear line where it cannot be."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfigError, WorkerAddress
from sglang_ext_router.http import http1, unread_replies
from sglang_ext_router.http.tls import client_context, worker_context
from sglang_ext_router.http.unread_replies import bytes_not_taken
from support.engines import free_port
from support.raw_client import RawClient, request_bytes
from support.router_process import FAST, Cluster, RunningRouter, cluster, running_router
from support.running_time import running_s
from support.scripted_engine import DONE, ScriptedEngine, event, hang, stream

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
BODY = b'{"text": "x"}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that signs itself, its key, and a key that is not its own."""
    path = tmp_path_factory.mktemp("tls")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    for name in ("own", "other"):
        command = [*make.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{name}.key"]
        subprocess.run([*command, "-out", f"{name}.pem"], cwd=path, check=True, capture_output=True)
    protect = "openssl ec -in own.key -aes128 -passout pass:x -out protected.key"
    subprocess.run(protect.split(), cwd=path, check=True, capture_output=True)
    (path / "both.pem").write_text((path / "own.pem").read_text() + (path / "own.key").read_text())
    (path / "nonsense").write_text("nonsense")
    return path


@asynccontextmanager
async def tls_cluster(folder: Path, **options: object) -> AsyncIterator[tuple[RunningRouter, list[ScriptedEngine]]]:
    """A router over two instances that speak TLS only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "both.pem")
    engines = [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)]
    fronts = []
    workers = []
    for engine in engines:
        await engine.start()
        port = engine.port

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port) -> None:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

        front = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
        fronts.append(front)
        workers.append(WorkerAddress(f"https://127.0.0.1:{front.sockets[0].getsockname()[1]}", engine.role))
    try:
        async with running_router(replace(FAST, workers=tuple(workers), **options)) as running:  # type: ignore[arg-type]
            yield running, engines
    finally:
        for front in fronts:
            front.close()
        for engine in engines:
            await engine.stop()
        await asyncio.sleep(0.05)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()


@pytest.mark.slow
async def test_instances_over_tls_are_probed_asked_and_aborted(folder: Path) -> None:
    async with tls_cluster(folder, worker_ca_file=str(folder / "own.pem")) as (served, engines):
        await served.until_ready()
        answer = await served.ask("POST", "/generate", BODY)
        assert answer.status == 200
        assert answer.headers["x-sglang-ext-decode"].startswith("https://127.0.0.1:")
        engines[1].script = stream(event(1), event(2), DONE)
        assert (await served.ask("POST", "/generate", {"text": "x", "stream": True})).chunks == (
            event(1),
            event(2),
            DONE,
        )
        assert (await served.ask("GET", "/server_info")).json["decode"]
        engines[1].script = hang()
        async with await served.connect() as client:
            await client.send(request_bytes("POST", "/generate", BODY))
            rid = (await engines[1].received(3))[2].rid
        await engines[1].abort_of(rid, 2.0)
        await served.until_idle()


async def test_an_instance_that_is_not_trusted_gets_nothing(folder: Path) -> None:
    async with tls_cluster(folder, worker_ca_file=str(folder / "other.pem")) as (served, engines):
        worker = next(iter(served.router.registry))
        await served.until(lambda: "certificate" in worker.last_error.lower())
        assert not worker.is_healthy
        assert (await served.ask("POST", "/generate", BODY)).status == 503
        assert engines[0].requests == engines[1].requests == []


@pytest.mark.slow
async def test_clients_are_served_over_tls(folder: Path) -> None:
    async with cluster(
        ssl_certfile=str(folder / "own.pem"), ssl_keyfile=str(folder / "own.key"), api_key="k"
    ) as served:
        trusting = ssl.create_default_context(cafile=folder / "own.pem")
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=trusting, limit=1 << 26)
        client = RawClient(reader, writer)
        served.clients.append(client)
        key = {"Authorization": "Bearer k"}
        assert (await client.ask("POST", "/generate", BODY, key)).status == 200
        assert (await client.ask("POST", "/generate", b'{"text":"' + b"y" * 3000 + b'"}', key)).status == 200
        for size in (20_000, 300_000, 3_000_000):
            padding = random.Random(size).randbytes(size // 2).hex()
            assert (await client.ask("POST", "/generate", {"text": "x", "padding": padding}, key)).status == 200
            assert served.decode[0].requests[-1].json["padding"] == padding
        await client.send(request_bytes("POST", "/generate", b"x" * 5_000_000))
        answer = await client.reply()
        assert (answer.status, answer.headers["connection"]) == (401, "close")
        client.close()
        async with await RawClient.connect(served.port) as plain:
            await plain.send(request_bytes("GET", "/health"))
            assert not (await plain.rest()).startswith(b"HTTP/")


# -- clients that do not read or do not close ------------------------------------------------------------------

LARGE_BYTES = 20_000_000  # more than the sockets' own buffers hold
ON_BOTH_LOOPS = pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])


@asynccontextmanager
async def large_reply_over_tls(folder: Path, **options: object) -> AsyncIterator[Cluster]:
    async with cluster(ssl_certfile=str(folder / "both.pem"), **options) as served:
        served.router.render_metrics = Mock(return_value=(b"x" * LARGE_BYTES, "text/plain"))  # type: ignore[method-assign]
        yield served


@asynccontextmanager
async def blocking_client(served: Cluster, folder: Path) -> AsyncIterator[ssl.SSLSocket]:
    """One that does only what it is asked to, as no event loop reads for it; it leaves without closing TLS."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        sock.settimeout(10.0)
        await asyncio.to_thread(sock.connect, ("127.0.0.1", served.port))
        trusting = ssl.create_default_context(cafile=folder / "own.pem")
        with await asyncio.to_thread(trusting.wrap_socket, sock, server_hostname="127.0.0.1") as client:
            yield client


async def ask_and_never_read(served: Cluster, client: ssl.SSLSocket, headers: dict[str, str] | None = None) -> None:
    client.sendall(request_bytes("GET", "/metrics", headers=headers))
    render = cast(Mock, served.router.render_metrics)
    await served.until(lambda: render.called and all(one.request is None for one in served.router.clients.open))


async def all_leave(served: Cluster) -> None:
    start_s = running_s()
    await served.until(lambda: not served.router.clients.open)
    assert running_s() - start_s < 3.0


@pytest.mark.full
@ON_BOTH_LOOPS
@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}], ids=["kept", "closed"])
@pytest.mark.parametrize("keep_alive_timeout_secs", [60.0, 0.1])
async def test_a_client_that_never_reads_over_tls_is_cut(
    folder: Path, event_loop: str, headers: dict[str, str], keep_alive_timeout_secs: float
) -> None:
    async with (
        large_reply_over_tls(folder, client_write_timeout_secs=0.5) as served,
        blocking_client(served, folder) as client,
    ):
        await ask_and_never_read(served, client, headers)
        (connection,) = served.router.clients.open
        # Not from the start: the client may take longer than this to send its request.
        connection._limits = replace(connection._limits, keep_alive_timeout_s=keep_alive_timeout_secs)
        await all_leave(served)


@pytest.mark.slow
@ON_BOTH_LOOPS
async def test_a_client_that_closes_tls_and_never_reads_is_cut(folder: Path, event_loop: str) -> None:
    async with (
        large_reply_over_tls(folder, client_write_timeout_secs=0.5) as served,
        blocking_client(served, folder) as client,
    ):
        await ask_and_never_read(served, client)
        client.setblocking(False)
        with pytest.raises(ssl.SSLError):  # its farewell is sent, the router's lies behind the reply
            client.unwrap()
        await all_leave(served)


@pytest.mark.full
@ON_BOTH_LOOPS
async def test_a_client_that_reads_slowly_over_tls_gets_all_of_it(
    folder: Path, event_loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 0.5)  # of the loop itself; that of uvloop is fixed
    monkeypatch.setattr(unread_replies, "GOODBYE_S", 0.3)
    async with (
        large_reply_over_tls(folder, client_write_timeout_secs=2.5) as served,
        blocking_client(served, folder) as client,
    ):
        await ask_and_never_read(served, client, {"Connection": "close"})

        def read_slowly() -> int:
            total = 0
            for _ in range(6):  # longer than any of the limits in all
                time.sleep(0.5)
                end = total + 300_000
                while total < end:
                    total += len(client.recv(1 << 16))
            while data := client.recv(1 << 16):
                total += len(data)
            return total

        assert await asyncio.to_thread(read_slowly) > LARGE_BYTES
        await all_leave(served)


@pytest.mark.slow
@ON_BOTH_LOOPS
async def test_what_a_client_over_tls_has_taken_is_known(folder: Path, event_loop: str) -> None:
    async with large_reply_over_tls(folder) as served, blocking_client(served, folder) as client:
        await ask_and_never_read(served, client)
        (connection,) = served.router.clients.open
        await served.until(lambda: bytes_not_taken(connection.transport)[0] > 0)
        before = bytes_not_taken(connection.transport)[1]

        def read(size: int) -> None:
            while size > 0:
                size -= len(client.recv(min(size, 1 << 16)))

        await asyncio.to_thread(read, LARGE_BYTES // 2)
        not_taken, taken = bytes_not_taken(connection.transport)
        assert not_taken > 0
        assert taken > LARGE_BYTES // 2
        assert before < taken < LARGE_BYTES
        await asyncio.to_thread(read, LARGE_BYTES // 2)
        await served.until(lambda: bytes_not_taken(connection.transport)[0] == 0)
        assert bytes_not_taken(connection.transport)[1] > LARGE_BYTES
        client.close()
        await served.until(lambda: not served.router.clients.open)
        assert bytes_not_taken(connection.transport) == (0, 0)


@pytest.mark.slow
@ON_BOTH_LOOPS
async def test_a_drain_is_not_held_up_by_clients_over_tls(
    folder: Path, event_loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_replies, "DRAIN_STALL_S", 0.3)
    async with (
        large_reply_over_tls(folder) as served,
        blocking_client(served, folder) as unread,
        blocking_client(served, folder),  # idle in a pool, where the router's farewell is not read
    ):
        await ask_and_never_read(served, unread)
        assert len(served.router.clients.open) == 2
        served.server.close()
        start_s = running_s()
        await served.router.drain(20.0)
        assert running_s() - start_s < 4.0
        assert not served.router.clients.open


@pytest.mark.slow
@ON_BOTH_LOOPS
async def test_a_client_too_many_over_tls_is_cut(
    folder: Path, event_loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1, "LINGER_S", 0.3)
    async with (
        large_reply_over_tls(folder, max_connections=1) as served,
        blocking_client(served, folder),
        blocking_client(served, folder) as refused,
    ):

        def received() -> bytes:
            got = b""
            while data := socket.socket.recv(refused, 1 << 16):  # what is encrypted: nothing answers the farewell
                got += data
            return got

        assert await asyncio.to_thread(received)
        assert len(served.router.clients.open) == 1


@pytest.mark.parametrize(
    ("certfile", "keyfile"),
    [("absent", ""), ("nonsense", ""), ("own.pem", ""), ("own.pem", "other.key"), ("own.pem", "protected.key")],
)
def test_files_that_cannot_be_used_are_named(folder: Path, certfile: str, keyfile: str) -> None:
    config = replace(FAST, ssl_certfile=str(folder / certfile), ssl_keyfile=str(folder / keyfile) if keyfile else "")
    with pytest.raises(RouterConfigError, match="--ssl-certfile") as caught:
        client_context(config)
    assert "\n" not in str(caught.value)


def test_a_key_may_lie_beside_its_certificate(folder: Path) -> None:
    assert client_context(replace(FAST, ssl_certfile=str(folder / "both.pem"))) is not None


@pytest.mark.parametrize("name", ["absent", "nonsense"])
def test_a_bad_file_of_certificates_is_named(folder: Path, name: str) -> None:
    with pytest.raises(RouterConfigError, match="--worker-ca-file"):
        worker_context(replace(FAST, worker_ca_file=str(folder / name)))
    with pytest.raises(RouterConfigError, match="--ssl-keyfile"):
        replace(FAST, ssl_keyfile=str(folder / name))


@pytest.mark.slow
async def test_the_process_serves_tls_and_warns_of_what_is_open(folder: Path) -> None:
    port, reports, page = free_port(), free_port(), free_port()
    command = [sys.executable, "-m", "sglang_ext.cli", "router", "--host", "0.0.0.0", "--port", str(port)]
    command += ["--ssl-certfile", str(folder / "both.pem"), "--metrics-port", str(reports)]
    command += ["--ui-port", str(page), "--ui-host", "0.0.0.0"]
    few = ["bash", "-c", 'ulimit -Sn 64; exec "$@"', "bash", *command]  # more are asked for by the router itself
    process = subprocess.Popen(few, stderr=subprocess.PIPE)
    try:
        trusting = ssl.create_default_context(cafile=folder / "own.pem")
        async with asyncio.timeout(20):
            while True:
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
                    break
                except OSError:
                    await asyncio.sleep(0.05)
        async with RawClient(reader, writer) as client:
            assert (await client.ask("GET", "/health")).status == 200
            assert (await client.ask("GET", "/metrics")).status == 404
        async with await RawClient.connect(reports) as client:
            assert (await client.ask("GET", "/metrics")).status == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", page, ssl=trusting)
        async with RawClient(reader, writer) as client:
            assert (await client.ask("GET", "/ui")).status == 200
        (line,) = [row for row in Path(f"/proc/{process.pid}/limits").read_text().splitlines() if "open files" in row]
        assert int(line.split()[3]) > 8192 or line.split()[3] == line.split()[4]
        process.terminate()
        assert await asyncio.to_thread(process.wait, 10) == 0
        assert process.stderr is not None
        log = process.stderr.read().decode()
        assert "--api-key" in log
        assert f"https://0.0.0.0:{port}" in log
        assert "may read the metrics" not in log
        assert "may look at the live page" in log
    finally:
        process.kill()
        process.communicate()


def generated(engine: ScriptedEngine) -> list[bytes]:
    """Bodies of the requests that it was to generate for, as they came."""
    return [request.body for request in engine.requests if request.path == "/generate"]


@pytest.mark.slow
@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
async def test_long_bodies_over_tls_arrive_and_what_follows_is_served(folder: Path, event_loop: str) -> None:
    own = str(folder / "own.pem")
    async with tls_cluster(folder, ssl_certfile=str(folder / "both.pem"), worker_ca_file=own) as (served, engines):
        await served.until(lambda: all(one.is_ready for one in served.router.registry))
        context = ssl.create_default_context(cafile=own)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
        texts = ["".join(f"{number:x}," for number in range(size)) for size in (5_000, 70_000, 400_000)]
        sent = b""
        for text in texts:
            sent += request_bytes("POST", "/generate", b'{"text": "x", "padding": "%b"}' % text.encode())
            sent += request_bytes("POST", "/generate", BODY)
        for start in range(0, len(sent), 300_007):
            writer.write(sent[start : start + 300_007])
            await writer.drain()
            await asyncio.sleep(0)
        got = b""
        while got.count(b"HTTP/1.1 200 ") < 2 * len(texts):
            got += await asyncio.wait_for(reader.read(1 << 16), 20.0)
        wanted = [one for text in texts for one in (text, "")]
        for engine in engines:
            # The client has decode's answer, perhaps before prefill has read its body.
            await served.until(lambda engine=engine: len(generated(engine)) >= len(wanted))
            assert [json.loads(body).get("padding", "") for body in generated(engine)] == wanted
        await served.until(lambda: served.router.clients.buffered_bytes == 0)
        writer.transport.abort()

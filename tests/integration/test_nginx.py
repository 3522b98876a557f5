"""Debian's nginx in front of the router: its default `proxy_pass`, and what docs/how-to/nginx.md recommends."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_ext_router.http.replies import CHUNKED_END, chunk
from support.engines import Engine, free_port
from support.raw_client import RawClient, request_bytes
from support.router_cli import ADMIN_KEY, RunningRouter
from support.router_process import cluster
from support.scripted_engine import DONE, event, stream

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
ROUTER_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "nginx.md"
READY_WITHIN_S = 30.0
TIMEOUT_S = 60.0

pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.skipif(NGINX is None, reason="nginx is not there: apt-get install nginx-light"),
]

DEFAULT = """
server {
    listen 80;
    location / {
        proxy_pass http://127.0.0.1:30000;
    }
}
"""
# One process of this user, with nothing outside its folder.
AROUND = """
daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {}
http {
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    %s
}
"""
USER = [{"role": "user", "content": "What is a parser?"}]
SAMPLING = {"temperature": 0, "max_new_tokens": 12}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 12, "temperature": 0},
    "/v1/completions": {"prompt": "def parse(", "max_tokens": 12, "temperature": 0},
    "/generate": {"text": "def parse(", "sampling_params": SAMPLING},
    "/v1/responses": {"input": "What is a parser?", "max_output_tokens": 12, "temperature": 0},
    "/v1/messages": {"messages": USER, "max_tokens": 12, "temperature": 0},
}


def recommended() -> str:
    """Return the configuration in docs/how-to/nginx.md."""
    return ROUTER_DOCUMENT.read_text(encoding="utf-8").partition("```nginx\n")[2].partition("```")[0]


CONFIGURATIONS = {"default": DEFAULT, "recommended": recommended()}


@contextmanager
def running_nginx(configuration: str, router_port: int, folder: Path) -> Iterator[int]:
    """Yield the port of an nginx before the router."""
    port = free_port()
    assert configuration.count("listen 80;") == configuration.count("127.0.0.1:30000") == 1
    ours = configuration.replace("listen 80;", f"listen 127.0.0.1:{port};").replace("30000", str(router_port))
    (folder / "nginx.conf").write_text(AROUND % ours)
    log_path = folder / "nginx.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [str(NGINX), "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        deadline_s = time.monotonic() + READY_WITHIN_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                assert process.poll() is None, log_path.read_text()
                assert time.monotonic() < deadline_s, log_path.read_text()
                time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(20)
    assert "[emerg]" not in log_path.read_text()


@pytest.fixture(scope="module", params=list(CONFIGURATIONS))
def nginx(
    router: RunningRouter, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    with running_nginx(CONFIGURATIONS[request.param], router.port, tmp_path_factory.mktemp("nginx")) as port:
        yield port


@pytest.fixture
def client(nginx: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", nginx, timeout=TIMEOUT_S)
    yield connection
    connection.close()


@pytest.fixture
def model(router: RunningRouter) -> str:
    name: str = router.call("GET", "/v1/models")[0].body["data"][0]["id"]
    return name


def ask(client: http.client.HTTPConnection, path: str, body: object) -> tuple[int, dict[str, str], bytes]:
    client.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    with client.getresponse() as reply:
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_arrives_whole(
    router: RunningRouter, client: http.client.HTTPConnection, model: str, path: str
) -> None:
    body = {"model": model, **STREAMS[path], "stream": True}
    status, headers, content = ask(client, path, body)
    streamed = content.decode()
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    last = {"/v1/responses": "response.incomplete", "/v1/messages": "message_stop"}.get(path, "[DONE]")
    assert last in streamed.splitlines()[-2]
    assert text_of(streamed) == text_of(str(router.post(path, body).body)) != ""


def text_of(events: str) -> str:
    """Return the text that a stream brings; how it is cut into events differs from request to request."""
    pieces = ""
    for line in events.splitlines():
        if line.startswith("data: {"):
            content = json.loads(line.removeprefix("data: "))
            if "meta_info" in content:  # all of it so far
                pieces = content["text"]
            for choice in content.get("choices", ()):
                pieces += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            delta = content.get("delta", "")
            pieces += delta if isinstance(delta, str) else delta.get("text", "")
    return pieces


@pytest.mark.parametrize("path", STREAMS)
def test_a_reply_arrives_whole(client: http.client.HTTPConnection, model: str, path: str) -> None:
    status, headers, content = ask(client, path, {"model": model, **STREAMS[path]})
    assert (status, headers["content-type"]) == (200, "application/json")
    usage = json.loads(content).get("usage") or json.loads(content)["meta_info"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) in (10, 12)  # SGLang's responses are two shorter


def test_an_error_arrives_whole(client: http.client.HTTPConnection) -> None:
    for stream_too in (False, True):
        status, _, content = ask(client, "/v1/completions", {"prompt": [7] * 5000, "stream": stream_too})
        assert (status, json.loads(content)["error"]["code"]) == (400, "context_length_exceeded")


def test_a_large_body(client: http.client.HTTPConnection, request: pytest.FixtureRequest) -> None:
    """Above nginx's buffers in both; above its own limit of 1 MiB where the configuration says so."""
    is_default = "default" in request.node.callspec.id
    body = {**STREAMS["/v1/completions"], "user": "u" * 900_000}
    assert ask(client, "/v1/completions", body)[0] == 200
    body["user"] = "u" * 4_000_000
    assert ask(client, "/v1/completions", body)[0] == (413 if is_default else 200)


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_aborts_its_request(
    router: RunningRouter, engines: list[Engine], client: http.client.HTTPConnection, is_stream: bool
) -> None:
    before = router.metric("sglang_ext_router_aborts_total")
    body = {"prompt": "def parse(", "max_tokens": 1900, "ignore_eos": True, "stream": is_stream}
    client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    wait_for(lambda: not router.is_idle())
    client.close()
    wait_for(lambda: router.metric("sglang_ext_router_aborts_total") == before + 1)
    for engine in engines:
        engine.wait_idle()
    wait_for(router.is_idle)


def test_the_live_page_moves(client: http.client.HTTPConnection) -> None:
    client.request("GET", "/ui/stream", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    reply = client.getresponse()
    assert reply.status == 200
    events = [reply.readline(), reply.readline(), reply.readline()]
    assert events[0].startswith(b'data: {"kind":"hello"')
    assert events[2].startswith(b'data: {"kind":"frame"')


def wait_for(is_so: Any) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_events_come_one_by_one(name: str, tmp_path: Path) -> None:
    """By what is recommended each arrives before the next is made; by nginx's default they arrive in the end."""
    asyncio.run(_events_one_by_one(name, tmp_path))


async def _events_one_by_one(name: str, folder: Path) -> None:
    events = [event({"text": f"piece {number}"}) for number in range(5)]
    may_go_on = [asyncio.Event() for _ in events]

    async def play(turn: Any) -> None:
        await stream(events[0], end=b"")(turn)
        for following, gate in zip([*events[1:], DONE], may_go_on, strict=True):
            await gate.wait()
            await turn.write(chunk(following))
        await turn.write(CHUNKED_END)

    async with cluster() as served:
        served.decode[0].script = play
        nginx = running_nginx(CONFIGURATIONS[name], served.port, folder)
        port = await asyncio.to_thread(nginx.__enter__)
        try:
            async with await RawClient.connect(port) as client:
                body = json.dumps({"text": "x", "stream": True}).encode()
                await client.send(request_bytes("POST", "/generate", body))
                if name == "default":
                    for gate in may_go_on:
                        gate.set()
                    reply = await client.reply()
                    assert reply.body == b"".join([*events, DONE])
                else:
                    assert (await client.head())[0] == 200
                    for expected, gate in zip(events, may_go_on, strict=True):
                        assert await client.chunk() == expected
                        gate.set()
                    assert await client.chunk() == DONE
                    assert await client.chunk() == b""
        finally:
            await asyncio.to_thread(nginx.__exit__, None, None, None)

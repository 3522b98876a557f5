"""The service over plain HTTP: strange requests, large ones, and what they leave behind."""

from __future__ import annotations

import http.client
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from sglang_ext.cli import main
from support.batch_endpoint import batch_endpoint
from support.batch_service import RunningService, chat_line, jsonl, running_service, wait_batch

MIB = 1 << 20
LIMIT_MIB = 64


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    with (
        batch_endpoint() as endpoint,
        running_service(folder, endpoint.url, "--max-file-mb", str(LIMIT_MIB), "--max-lines", "5", key="") as service,
    ):
        yield service


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """An error in the router's shape, checked."""
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == reply.status_code
    assert error["message"]
    return error


def stored_files(service: RunningService) -> set[str]:
    return set(os.listdir(service.folder / "store" / "files"))


def upload(service: RunningService, name: str, content: bytes = b"{}", **fields: str) -> httpx.Response:
    return httpx.post(
        f"{service.url}/v1/files", files={"file": (name, content)}, data={"purpose": "batch", **fields}, timeout=60
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("PUT", "/v1/files", 405),
        ("DELETE", "/v1/batches", 405),
        ("GET", "/v1/files/file-nothing", 404),
        ("GET", "/v1/files/..%2f..%2fbatches.sqlite", 404),
        ("GET", "/v1/files/..%2fbatches.sqlite/content", 404),
        ("GET", "/v1/files/%2e%2e/content", 404),
        ("GET", "/v1/files/%00/content", 404),
        ("GET", "/v1/files/%ff%fe", 404),
        ("DELETE", "/v1/files/..%2fbatches.sqlite", 404),
        ("GET", "/v1/batches/" + "x" * 5000, 404),
        ("POST", "/v1/batches/batch_none/cancel", 404),
        ("GET", "/v1/batches?limit=0", 400),
        ("GET", "/v1/batches?limit=101", 400),
        ("GET", "/v1/batches?limit=x", 400),
        ("GET", "/v1/files?order=sideways", 400),
        ("GET", "/v1/files?after=batch_1", 400),
        ("GET", "/v1/files?after=file-nothing", 400),
        ("GET", "/v1/files?after=file-" + "f" * 32, 400),
        ("GET", "/v1/files?after=", 400),
        ("GET", "/v1/batches?after=batch_nothing", 400),
        ("POST", "/v1/batches", 400),
        ("POST", "/v1/files", 400),
    ],
)
def test_requests_that_fit_nothing(service: RunningService, method: str, path: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    connection.request(method, path)
    with connection.getresponse() as answer:
        body = answer.read()
    connection.close()
    assert answer.status == status, body
    error_of(httpx.Response(answer.status, content=body))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'{"input_file_id": 3, "endpoint": "/generate", "completion_window": "1h"}', "input_file_id"),
        (b'{"endpoint": "/generate", "completion_window": "1h"}', "input_file_id"),
        (b'{"input_file_id": "f", "endpoint": "/generate", "completion_window": "1h", "speed": 3}', "speed"),
        (b'{"input_file_id": "f", "endpoint": "/generate", "completion_window": 24}', "completion_window"),
        (
            b'{"input_file_id": "f", "endpoint": "/generate", "completion_window": "1h", "metadata": {"a": 1}}',
            "metadata",
        ),
        (
            b'{"input_file_id": "f", "endpoint": "/generate", "completion_window": "1h", "metadata": {"a": "\\ud800"}}',
            "metadata",
        ),
        (b'{"input_file_id": "f", "endpoint": "/generate", "completion_window": "\\ud800"}', "completion_window"),
        (
            b'{"input_file_id": "f", "endpoint": "/generate", "completion_window": "1h", "metadata": {"\\ud800": "a"}}',
            "metadata",
        ),
        (b'{"input_file_id": "\\ud800", "endpoint": "/generate", "completion_window": "1h"}', "input_file_id"),
        (b"\xff\xfe", None),
    ],
)
def test_bodies_that_are_no_batch(service: RunningService, body: bytes, param: str | None) -> None:
    reply = httpx.post(f"{service.url}/v1/batches", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = error_of(reply)
    assert param is None or error["param"].startswith(param)


def test_a_batch_that_is_no_batch_but_large_is_not_read_to_its_end(service: RunningService) -> None:
    reply = httpx.post(
        f"{service.url}/v1/batches", content=b" " * (1 << 20), headers={"content-type": "application/json"}
    )
    assert reply.status_code == 413


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["../../escaped", "/etc/passwd", "a\x00b", "п" * 500, "", "x\r\ny", '"quoted"; a=b', ".."]
)
def test_strange_names_stay_names(service: RunningService, name: str) -> None:
    before = stored_files(service)
    reply = upload(service, name or " ")
    assert reply.status_code == 200, reply.text
    described = reply.json()
    assert stored_files(service) - before == {described["id"]}
    content = httpx.get(f"{service.url}/v1/files/{described['id']}/content")
    assert content.content == b"{}"
    assert "/" not in described["filename"]
    assert content.headers["content-disposition"].startswith("attachment;")
    assert httpx.delete(f"{service.url}/v1/files/{described['id']}").json()["deleted"]
    assert stored_files(service) == before


@pytest.mark.slow
def test_expiry_of_an_uploaded_file(service: RunningService) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    described = upload(service, "x", **fields).json()
    assert described["expires_at"] == described["created_at"] + 3600
    for wrong in (
        {"expires_after[seconds]": "3599"},
        {"expires_after[seconds]": "١٢٣٤٥"},
        {"expires_after[anchor]": "x"},
    ):
        reply = upload(service, "x", **fields | wrong)
        assert reply.status_code == 400
        assert error_of(reply)["param"] == next(iter(wrong))


@pytest.mark.slow
def test_a_file_that_is_too_large_is_refused_and_leaves_nothing(service: RunningService) -> None:
    form_head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    before = stored_files(service)
    reply = upload(service, "large", b"x" * (LIMIT_MIB * MIB + 1))
    assert reply.status_code == 413
    assert error_of(reply)["param"] == "file"

    # A client that sends all of it before it reads the answer.
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    content = form_head + b"x" * ((LIMIT_MIB + 8) * MIB)
    connection.request("POST", "/v1/files", content, {"content-type": "multipart/form-data; boundary=b"})
    with connection.getresponse() as answer:
        assert answer.status == 413
        answer.read()
    connection.close()

    def body() -> Iterator[bytes]:  # no length is announced
        yield form_head
        for _ in range(LIMIT_MIB + 8):
            yield b"x" * MIB

    reply = httpx.post(
        f"{service.url}/v1/files",
        content=body(),
        headers={"content-type": "multipart/form-data; boundary=b"},
        timeout=60,
    )
    assert reply.status_code == 413
    error_of(reply)
    assert stored_files(service) == before


def test_a_client_that_asks_first_sends_nothing_that_is_too_large(service: RunningService) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            b"Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_client_that_leaves_leaves_nothing(service: RunningService) -> None:
    before = stored_files(service)
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            b"Content-Length: 10000000\r\n\r\n"
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * (3 * MIB)
        )
        wait_until(lambda: len(stored_files(service)) > len(before))
    wait_until(lambda: stored_files(service) == before)


@pytest.mark.slow
def test_uploads_and_downloads_take_constant_memory(service: RunningService) -> None:
    assert service.process is not None
    process = psutil.Process(service.process.pid)
    small = upload(service, "small").json()["id"]
    httpx.get(f"{service.url}/v1/files/{small}/content")
    before = process.memory_info().rss
    content = b"0123456789abcdef" * (LIMIT_MIB * MIB // 16)
    peak = 0
    described = upload(service, "large", content).json()
    peak = max(peak, process.memory_info().rss)
    assert described["bytes"] == len(content)
    size = 0
    with httpx.stream("GET", f"{service.url}/v1/files/{described['id']}/content") as reply:
        assert int(reply.headers["content-length"]) == len(content)
        for piece in reply.iter_bytes():
            size += len(piece)
        peak = max(peak, process.memory_info().rss)
    assert size == len(content)
    assert peak - before < 24 * MIB
    part = httpx.get(f"{service.url}/v1/files/{described['id']}/content", headers={"range": "bytes=16-31"})
    assert (part.status_code, part.content) == (206, b"0123456789abcdef")
    httpx.delete(f"{service.url}/v1/files/{described['id']}")


@pytest.mark.slow
def test_a_batch_of_too_many_lines_fails(service: RunningService) -> None:
    with service.client() as client:
        file = client.files.create(file=("x", jsonl([chat_line(f"r{i}", "x") for i in range(6)])), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        batch = wait_batch(client, batch.id)
        assert batch.status == "failed"
        assert batch.errors
        assert batch.errors.data
        assert [(one.code, one.line) for one in batch.errors.data] == [("too_many_lines", 6)]
        output = _output_of_a_good_batch(service)
        with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
            client.batches.create(input_file_id=output, endpoint="/v1/chat/completions", completion_window="24h")


def _output_of_a_good_batch(service: RunningService) -> str:
    with service.client() as client:
        file = client.files.create(file=("x", b"\xef\xbb\xbf\n" + jsonl([chat_line("a", "x")])), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        output = wait_batch(client, batch.id).output_file_id
        assert output
        return output


def wait_until(is_so: Any, within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--endpoint", "nonsense", "--store", "{}"], "--endpoint"),
        (["--endpoint", "http://127.0.0.1:1", "--store", "/dev/null/x"], "--store /dev/null/x"),
        (["--endpoint", "http://127.0.0.1:1", "--store", "{}", "--port", "70000"], "--port must be"),
        (["--endpoint", "http://127.0.0.1:1", "--store", "{}", "--host", "256.1.1.1"], "--host 256.1.1.1"),
        (["--endpoint", "http://127.0.0.1:1", "--store", "{}", "--max-lines", "0"], "--max-lines must be"),
        (["--endpoint", "http://127.0.0.1:1", "--store", "{}", "--api-key", "a b"], "--api-key must be"),
    ],
)
def test_options_that_cannot_be_are_told_in_one_line(
    options: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", "serve", *(option.format(tmp_path) for option in options)]) == 2
    captured = capfd.readouterr().err
    assert captured.startswith("sglang-ext batch serve: ")
    assert message in captured
    assert captured.count("\n") == 1


@pytest.mark.slow
def test_a_store_in_use_is_told_in_one_line(service: RunningService, capfd: pytest.CaptureFixture[str]) -> None:
    store = str(service.folder / "store")
    assert main(["batch", "serve", "--endpoint", "http://127.0.0.1:1", "--store", store, "--port", "0"]) == 2
    assert "in use by another process" in capfd.readouterr().err

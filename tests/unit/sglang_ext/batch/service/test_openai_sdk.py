"""The service through the `openai` SDK, as it is installed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from support.batch_endpoint import BatchEndpoint, batch_endpoint
from support.batch_service import RunningService, chat_line, jsonl, parse_jsonl, running_service, wait_batch

KEPT = {"anchor": "created_at", "seconds": 3600}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[BatchEndpoint]:
    with batch_endpoint() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def service(endpoint: BatchEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("service"), endpoint.url) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: RunningService) -> Iterator[openai.OpenAI]:
    with service.client() as client:
        yield client


def upload(client: openai.OpenAI, lines: list[object], name: str = "input.jsonl") -> str:
    return client.files.create(file=(name, jsonl(lines)), purpose="batch").id


def create(client: openai.OpenAI, lines: list[object], window: str = "24h", **options: object) -> openai.types.Batch:
    return client.batches.create(
        input_file_id=upload(client, lines),
        endpoint="/v1/chat/completions",
        completion_window=window,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.slow
def test_upload_create_poll_download_delete(client: openai.OpenAI) -> None:
    lines = [chat_line(f"r{i}", f"hello {i}") for i in range(20)]
    lines[7] = chat_line("r7", "status 400")
    batch = create(client, lines, metadata={"run": "one"}, output_expires_after=KEPT)
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"run": "one"})
    assert batch.expires_at == batch.created_at + 86400
    batch = wait_batch(client, batch.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 20, "completed": 19, "failed": 1}
    assert batch.usage
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (57, 38, 95)
    assert batch.output_file_id
    assert batch.error_file_id
    output = parse_jsonl(client.files.content(batch.output_file_id).read())
    assert [line["custom_id"] for line in output] == [f"r{i}" for i in range(20) if i != 7]
    for line in output:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        choice = line["response"]["body"]["choices"][0]
        assert choice["message"]["content"] == f"hello {line['custom_id'][1:]}"[::-1]
    (failed,) = parse_jsonl(client.files.content(batch.error_file_id).read())
    assert failed["custom_id"] == "r7"
    assert failed["response"]["status_code"] == 400
    assert "told to fail" in failed["error"]["message"]
    described = client.files.retrieve(batch.output_file_id)
    assert (described.purpose, described.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert described.expires_at == described.created_at + 3600
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.output_file_id)


@pytest.mark.slow
def test_what_is_wrong_with_a_file_is_told_by_line(client: openai.OpenAI) -> None:
    wrong_url = chat_line("a", "x") | {"url": "/v1/completions"}
    wrong_url["body"] = {"model": "m", "prompt": "x"}
    content = jsonl(
        [
            chat_line("a", "x"),
            {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions"},
            chat_line("c", "x", stream=True),
            chat_line("d", "x") | {"method": "GET"},
            chat_line("a", "y"),
            wrong_url | {"custom_id": "f"},
            chat_line("", "x"),
        ]
    )
    content += b"{broken\n\n[1]\n"
    file = client.files.create(file=("x.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch = wait_batch(client, batch.id)
    assert batch.status == "failed"
    assert batch.failed_at
    assert batch.output_file_id is None
    assert batch.errors
    assert batch.errors.data
    told = {(one.line, one.code, one.param) for one in batch.errors.data}
    assert told == {
        (2, "missing_required_parameter", "body"),
        (3, "invalid_request", "body.stream"),
        (4, "invalid_method", "method"),
        (5, "duplicate_custom_id", "custom_id"),
        (6, "invalid_url", "url"),
        (7, "invalid_custom_id", "custom_id"),
        (8, "invalid_json_line", None),
        (10, "invalid_json_line", None),
    }
    duplicate = next(one for one in batch.errors.data if one.code == "duplicate_custom_id")
    assert duplicate.message == "custom_id 'a' is on line 1, too"


def test_an_empty_file(client: openai.OpenAI) -> None:
    batch = wait_batch(client, create(client, []).id)
    assert batch.status == "failed"
    assert batch.errors
    assert batch.errors.data
    assert [(one.code, one.line) for one in batch.errors.data] == [("empty_file", None)]


def test_a_cancelled_batch_aborts_what_is_in_flight_and_keeps_what_is_finished(
    client: openai.OpenAI, endpoint: BatchEndpoint
) -> None:
    lines = [chat_line("first", "quick")] + [chat_line(f"r{i}", f"held {i}") for i in range(30)]
    endpoint.hold_prefix = "held"
    aborted = endpoint.aborted
    try:
        batch = create(client, lines)
        while (counts := client.batches.retrieve(batch.id).request_counts) is None or counts.completed < 1:
            pass
        assert client.batches.retrieve(batch.id).status == "in_progress"
        assert endpoint.in_flight > 0
        batch = client.batches.cancel(batch.id)
        assert batch.status == "cancelling"
        assert batch.cancelling_at
        batch = wait_batch(client, batch.id)
        assert batch.status == "cancelled"
        # The endpoint sees a closed connection a little later.
        deadline_s = time.monotonic() + 30
        while endpoint.in_flight:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert endpoint.aborted > aborted
    finally:
        endpoint.hold_prefix = None
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 31, "completed": 1, "failed": 30}
    assert batch.output_file_id
    assert batch.error_file_id
    assert [line["custom_id"] for line in parse_jsonl(client.files.content(batch.output_file_id).read())] == ["first"]
    errors = parse_jsonl(client.files.content(batch.error_file_id).read())
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert [line["custom_id"] for line in errors] == [f"r{i}" for i in range(30)]
    with pytest.raises(openai.ConflictError, match="status 'cancelled' cannot be cancelled"):
        client.batches.cancel(batch.id)


@pytest.mark.slow
def test_an_expired_batch_keeps_what_is_finished(client: openai.OpenAI, endpoint: BatchEndpoint) -> None:
    endpoint.hold_prefix = "held"
    try:
        batch = create(client, [chat_line("first", "quick"), chat_line("late", "held")], "3s")
        batch = wait_batch(client, batch.id)
    finally:
        endpoint.hold_prefix = None
    assert batch.status == "expired"
    assert batch.expired_at
    assert batch.expires_at
    assert batch.finalizing_at
    assert batch.expired_at >= batch.expires_at
    assert batch.output_file_id
    assert batch.error_file_id
    assert [line["custom_id"] for line in parse_jsonl(client.files.content(batch.output_file_id).read())] == ["first"]
    (late,) = parse_jsonl(client.files.content(batch.error_file_id).read())
    assert (late["custom_id"], late["response"], late["error"]["code"]) == ("late", None, "batch_expired")


@pytest.mark.slow
def test_lists_are_paged_and_survive_deletions(client: openai.OpenAI) -> None:
    batches = [create(client, [chat_line("a", "x")]).id for _ in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2)][:5] == batches[::-1]
    page = client.batches.list(limit=2)
    assert page.has_more
    assert [batch.id for batch in page.data] == batches[:2:-1]
    files = [upload(client, [chat_line("a", "x")]) for _ in range(4)]
    assert [file.id for file in client.files.list(limit=3, order="asc", purpose="batch")][-4:] == files
    # A page begins behind a file that was deleted meanwhile, too.
    for batch_id in batches:
        wait_batch(client, batch_id)
    for file in client.files.list(limit=2, purpose="batch"):
        client.files.delete(file.id)
    assert list(client.files.list(purpose="batch")) == []


def test_mistakes_are_told_in_the_sdks_terms(client: openai.OpenAI, service: RunningService) -> None:
    file_id = upload(client, [chat_line("a", "x")])
    wanted = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    cases: list[tuple[dict[str, object], str]] = [
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {f"k{i}": "v" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 10}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "now", "seconds": 4000}}, "output_expires_after"),
    ]
    for changed, param in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**wanted | changed)  # type: ignore[arg-type]
        assert caught.value.param
        assert caught.value.param.startswith(param)
        assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.batches.create(**wanted | {"input_file_id": "file-nothing"})  # type: ignore[arg-type]
    assert unknown.value.param == "input_file_id"
    for call in (client.batches.retrieve, client.batches.cancel, client.files.retrieve, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call("batch_nothing")
    with pytest.raises(openai.BadRequestError, match="purpose: must be 'batch'"):
        client.files.create(file=("x", b"{}"), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="is not an id of this list"):
        client.batches.list(after="nothing")
    stranger = service.client(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.files.list()
    with pytest.raises(openai.AuthenticationError):
        stranger.batches.create(**wanted)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_endpoint_gets_the_key_and_the_low_priority(client: openai.OpenAI, endpoint: BatchEndpoint) -> None:
    wait_batch(client, create(client, [chat_line("a", "for the headers")]).id)
    headers = endpoint.headers[-1]
    assert headers["authorization"] == "Bearer key-of-the-tests"
    assert headers["x-sgl-priority"] == "low"


@pytest.mark.slow
def test_health_and_metrics_need_no_key(service: RunningService, client: openai.OpenAI) -> None:
    wait_batch(client, create(client, [chat_line("a", "counted"), chat_line("b", "status 422")]).id)
    assert httpx.get(f"{service.url}/health").json() == {"status": "ok"}
    text = httpx.get(f"{service.url}/metrics").text
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(samples['sglang_ext_batch_batches{status="completed"}']) >= 1
    assert float(samples['sglang_ext_batch_batches{status="cancelling"}']) == 0
    assert float(samples['sglang_ext_batch_requests_total{outcome="succeeded"}']) >= 1
    assert float(samples['sglang_ext_batch_requests_total{outcome="failed"}']) >= 1
    assert float(samples["sglang_ext_batch_requests_in_flight"]) == 0


@pytest.mark.full
def test_sigterm_ends_it_and_running_batches_go_on(tmp_path: Path, endpoint: BatchEndpoint) -> None:
    endpoint.hold_prefix = "term"
    try:
        with running_service(tmp_path, endpoint.url) as service, service.client() as client:
            batch = create(client, [chat_line(f"r{i}", f"term {i}") for i in range(5)])
            wait_batch(client, batch.id, "in_progress")
            assert service.process is not None
            service.process.send_signal(signal.SIGTERM)
            assert service.process.wait(20) == 0
            endpoint.hold_prefix = None
            service.start()
            batch = wait_batch(client, batch.id)
            assert batch.status == "completed"
            assert batch.request_counts is not None
            assert batch.request_counts.completed == 5
    finally:
        endpoint.hold_prefix = None

"""What is written, and that it is whole or not there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_ext.batch.lines import LineOptions, Mode, parse_line
from sglang_ext.batch.outputs import (
    OutputError,
    OutputFormat,
    OutputOptions,
    choose_output,
    error_line,
    export,
    generate_row,
    generate_table,
    output_line,
)
from sglang_ext.batch.store import BatchStore, LineResult, StoredResult

COMPLETION = {
    "id": "c",
    "choices": [{"text": "hello", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 2},
}


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """One job of 30 lines, finished from last to first; every tenth failed, one of them without a reply."""
    with BatchStore.open(tmp_path / "s") as opened:
        job = opened.create_job("job", {})
        options = LineOptions(model="m")
        opened.add_lines(job, [parse_line({"prompt": [1, number]}, options, "in", number) for number in range(30)])
        opened.make_ready(job)
        for one in reversed(opened.lease(job, 30)):
            number = one.line.number
            if number % 10:
                body = json.dumps(COMPLETION, indent=1 if number == 5 else None).encode()
                opened.finish([LineResult(one.id, True, 200, f"r{number}", None, body)])
            else:
                status = 400 if number else None
                opened.finish([LineResult(one.id, False, status, "", "no good", b'{"x": 1}' if status else b"")])
        yield opened


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_openai_files(store: BatchStore, tmp_path: Path) -> None:
    options = choose_output(tmp_path / "out.jsonl", Mode.GENERATE, None)
    exported = export(store, 1, options)
    assert (exported.rows, exported.failures) == (27, 3)
    good, bad = lines_of(tmp_path / "out.jsonl"), lines_of(tmp_path / "out.jsonl.errors.jsonl")
    assert [one["custom_id"] for one in good] == [f"in:{number}" for number in range(30) if number % 10]
    assert good[0]["response"] == {"status_code": 200, "request_id": "r1", "body": COMPLETION}
    assert good[0]["error"] is None
    assert len({one["id"] for one in good + bad}) == 30
    assert bad[0]["response"] is None
    assert bad[0]["error"] == {"code": "no_reply", "message": "no good"}
    assert bad[1]["response"] == {"status_code": 400, "request_id": bad[1]["id"], "body": {"x": 1}}
    assert bad[1]["error"]["code"] == "http_400"


def test_compressed(store: BatchStore, tmp_path: Path) -> None:
    for name in ("out.jsonl", "out.jsonl.gz", "out.jsonl.zst"):
        export(store, 1, choose_output(tmp_path / name, Mode.GENERATE, None))
    plain = (tmp_path / "out.jsonl").read_bytes()
    assert gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()) == plain
    with pa.CompressedInputStream(str(tmp_path / "out.jsonl.zst"), "zstd") as opened:
        assert opened.read() == plain


def test_parquet_has_every_line(store: BatchStore, tmp_path: Path) -> None:
    export(store, 1, choose_output(tmp_path / "out.parquet", Mode.GENERATE, None))
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in rows] == [f"in:{number}" for number in range(30)]
    assert rows[0] == dict.fromkeys(rows[0]) | {"custom_id": "in:0", "error": "no good"}
    assert rows[3] == {
        "custom_id": "in:3",
        "prompt_token_ids": [1, 3],
        "completion_token_ids": None,
        "text": "hello",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 4, "completion_tokens": 2},
        "error": None,
        "embeddings": None,
    }
    assert pq.ParquetFile(tmp_path / "out.parquet").metadata.row_group(0).column(0).compression == "ZSTD"


def test_a_reply_that_cannot_be_read_ends_no_export(tmp_path: Path) -> None:
    replies = [COMPLETION, {"text": 5}, {"choices": [7]}, COMPLETION]
    with BatchStore.open(tmp_path / "odd") as opened:
        job = opened.create_job("job", {})
        opened.add_lines(job, [parse_line({"prompt": [1, i]}, LineOptions(model="m"), "in", i) for i in range(4)])
        opened.make_ready(job)
        for one in opened.lease(job, 4):
            body = json.dumps(replies[one.line.number]).encode()
            opened.finish([LineResult(one.id, True, 200, "", None, body)])
        export(opened, job, choose_output(tmp_path / "out.parquet", Mode.GENERATE, None))
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in rows] == [f"in:{number}" for number in range(4)]
    assert [row["text"] for row in rows] == ["hello", None, None, "hello"]
    assert ["cannot be read" in (row["error"] or "") for row in rows] == [False, True, True, False]


@pytest.mark.parametrize("end", ["\u0085", "\u2028", "\u2029", "\u2028\u2029", "a\n\u2028b"])
def test_no_line_ends_within_a_result(end: str) -> None:
    body = json.dumps({**COMPLETION, "text": end}, ensure_ascii=False).encode()
    result = StoredResult(1, f"id{end}", True, 200, "r", None, body, b"", None)
    for write in (output_line, error_line):
        (line,) = write(result).decode().splitlines()
        content = json.loads(line)
        assert (content["custom_id"], content["response"]["body"]["text"]) == (f"id{end}", end)


def test_a_folder_gets_parts(store: BatchStore, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "part-00009.parquet").write_text("of an export before")
    options = OutputOptions(folder, Mode.GENERATE, OutputFormat.PARQUET, is_folder=True, rows_per_file=12)
    exported = export(store, 1, options)
    assert sorted(path.name for path in folder.iterdir()) == [
        "errors.jsonl",
        "part-00000.parquet",
        "part-00001.parquet",
        "part-00002.parquet",
    ]
    assert exported.rows == 30
    counts = [pq.read_metadata(path).num_rows for path in sorted(folder.glob("part-*"))]
    assert counts == [12, 12, 6]


def test_an_export_that_fails_leaves_what_was_there(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("before")

    def fail(result: StoredResult) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sglang_ext.batch.outputs.output_line", fail)
    with pytest.raises(OSError, match="No space"):
        export(store, 1, choose_output(path, Mode.GENERATE, None))
    assert path.read_text() == "before"
    assert not list(tmp_path.glob(".*partial"))


def test_rows_of_every_endpoint() -> None:
    def row(reply: object, sent: object) -> dict[str, object]:
        return generate_row(
            StoredResult(1, "a", True, 200, "r", None, json.dumps(reply).encode(), json.dumps(sent).encode(), None)
        )

    chat = row({"choices": [{"message": {"content": "hi"}, "finish_reason": "length"}]}, {"messages": []})
    assert (chat["text"], chat["finish_reason"], chat["prompt_token_ids"]) == ("hi", "length", None)
    reply = {"text": "t", "output_ids": [7, 8], "meta_info": {"prompt_tokens": 2, "finish_reason": {"type": "stop"}}}
    generated = row(reply, {"input_ids": [3, 4]})
    assert generated["completion_token_ids"] == [7, 8]
    assert generated["prompt_token_ids"] == [3, 4]
    assert generated["finish_reason"] == "stop"
    assert row([reply, reply], {"text": "x"})["text"] == "t"
    assert row("odd", {})["text"] is None


@pytest.mark.parametrize(
    ("name", "mode", "wanted", "vocabulary", "reason"),
    [
        ("out.jsonl", Mode.GENERATE, OutputFormat.PARQUET, 0, "does not go with"),
        ("out.parquet", Mode.GENERATE, OutputFormat.JSONL, 0, "does not go with"),
        ("out.parquet.gz", Mode.GENERATE, None, 0, "leave .gz"),
        ("out.parquet", Mode.GENERATE, OutputFormat.DISTILLKIT, 9, "for --mode score"),
        ("out.parquet", Mode.SCORE, OutputFormat.DISTILLKIT, 0, "--vocabulary"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, name: str, mode: Mode, wanted: OutputFormat | None, vocabulary: int, reason: str
) -> None:
    with pytest.raises(OutputError, match=reason):
        choose_output(tmp_path / name, mode, wanted, vocabulary=vocabulary)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            {
                "type": "message",
                "content": [{"type": "thinking", "thinking": "no"}, {"type": "text", "text": "yes"}],
                "stop_reason": "end_turn",
                "usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 2},
            },
            {"text": "yes", "finish_reason": "end_turn", "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
        ),
        (
            {
                "object": "response",
                "status": "completed",
                "output": [
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "no"}]},
                    {"type": "message", "content": [{"type": "output_text", "text": "yes"}]},
                ],
                "usage": {"input_tokens": 7, "output_tokens": 2},
            },
            {"text": "yes", "finish_reason": "completed", "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
        ),
        (
            {
                "object": "list",
                "data": [{"embedding": [0.5, -1.0]}, {"embedding": "AAAAPwAAgL8="}],
                "usage": {"prompt_tokens": 7},
            },
            {"embeddings": [[0.5, -1.0]] * 2, "usage": {"prompt_tokens": 7, "completion_tokens": 0}},
        ),
    ],
)
def test_rows_of_replies_in_other_forms(reply: dict[str, Any], expected: dict[str, Any]) -> None:
    stored = StoredResult(1, "a", True, 200, "r", None, orjson.dumps(reply), b"{}", None)
    row = generate_table([stored]).to_pylist()[0]
    assert row == dict.fromkeys(row) | {"custom_id": "a"} | expected

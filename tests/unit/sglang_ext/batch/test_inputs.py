"""Which files, which lines, and what is wrong with them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_ext.batch.inputs import Findings, InputError, add_input, find_inputs, identify, read_lines
from sglang_ext.batch.lines import LineOptions
from sglang_ext.batch.store import BatchStore

OPTIONS = LineOptions(model="m")


def read(*patterns: Path, options: LineOptions = OPTIONS) -> tuple[list[str], Findings]:
    findings = Findings()
    lines = list(read_lines(find_inputs([str(one) for one in patterns]), options, findings))
    return [json.loads(line.body)["prompt"] for line in lines], findings


def jsonl(count: int, start: int = 0) -> bytes:
    return b"".join(b'{"prompt": "p%d"}\n' % number for number in range(start, start + count))


@pytest.mark.slow
def test_every_format_gives_the_same_lines(tmp_path: Path) -> None:
    expected = [f"p{number}" for number in range(2500)]
    (tmp_path / "plain.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl(2500).replace(b"p7}", b"p7}\n\r\n  "))
    with gzip.open(tmp_path / "packed.jsonl.gz", "wb") as packed:
        packed.write(jsonl(2500))
    with pa.CompressedOutputStream(str(tmp_path / "packed.jsonl.zst"), "zstd") as stream:
        stream.write(jsonl(2500))
    table = pa.table({"prompt": expected, "nothing": pa.nulls(2500, pa.string())})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    for name in ("plain.jsonl", "packed.jsonl.gz", "packed.jsonl.zst", "rows.parquet"):
        found, findings = read(tmp_path / name)
        assert found == expected, name
        assert not findings.count


def test_parquet_holds_messages_and_openai_lines(tmp_path: Path) -> None:
    messages = [[{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]]
    pq.write_table(pa.table({"messages": messages}), tmp_path / "chat.parquet")
    (line,) = read_lines(find_inputs([str(tmp_path / "chat.parquet")]), OPTIONS, Findings())
    assert json.loads(line.body)["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u", "name": "n"},
    ]
    columns = {"custom_id": ["a"], "url": ["/v1/completions"], "body": ['{"model": "x", "prompt": "p"}']}
    pq.write_table(pa.table(columns), tmp_path / "lines.parquet")
    (line,) = read_lines(find_inputs([str(tmp_path / "lines.parquet")]), OPTIONS, Findings())
    assert (line.custom_id, json.loads(line.body)) == ("a", {"model": "x", "prompt": "p"})


def test_folders_and_globs_are_read_in_order_and_name_their_lines(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.jsonl").write_bytes(jsonl(2))
    (tmp_path / "b" / "c.jsonl").write_bytes(jsonl(2, 2))
    (tmp_path / "notes.txt").write_text("not input")
    lines = list(read_lines(find_inputs([str(tmp_path)]), OPTIONS, Findings()))
    assert [line.custom_id for line in lines] == ["a.jsonl:1", "a.jsonl:2", "b/c.jsonl:1", "b/c.jsonl:2"]
    again = find_inputs([str(tmp_path / "*.jsonl"), str(tmp_path / "a.jsonl")])
    assert [file.name for file in again] == ["a.jsonl"]


@pytest.mark.parametrize("pattern", ["missing.jsonl", "*.none", "empty", "notes.txt"])
def test_what_stands_for_nothing_is_named(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=pattern.replace("*", r"\*")):
        find_inputs([str(tmp_path / pattern)])


def test_all_that_is_wrong_is_told_with_its_place(tmp_path: Path) -> None:
    bad = [
        '{"prompt": "good"}',
        "{not json",
        '{"prompt": 3}',
        "",
        '{"prompt": "p", "stream": true}',
        '{"messages": [{"role": "user", "content": "another url"}]}',
        "[]",
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(bad))
    found, findings = read(tmp_path / "in.jsonl")
    assert found == ["good"]
    places = [one.split(": ")[0] for one in findings.shown]
    assert places == ["in.jsonl:2", "in.jsonl:3", "in.jsonl:5", "in.jsonl:6", "in.jsonl:7"]
    assert "url: is /v1/chat/completions, and in.jsonl:1 has /v1/completions" in findings.shown[3]


def test_findings_are_counted_after_twenty(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n" * 50)
    _, findings = read(tmp_path / "in.jsonl")
    assert (len(findings.shown), findings.count) == (20, 50)
    assert findings.text.endswith("and 30 more")


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(os.urandom(100) + jsonl(5000))
    (tmp_path / "in.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "in.parquet").write_bytes(b"PAR1 no more")
    (tmp_path / "in.jsonl.zst").write_bytes(b"no frame")
    for name in ("in.jsonl.gz", "in.parquet", "in.jsonl.zst"):
        with pytest.raises(InputError, match=name):
            read(tmp_path / name)


def test_a_job_is_ready_only_when_nothing_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"custom_id": "x", "prompt": "p"}\n{"custom_id": "y", "prompt": "p"}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"custom_id": "z", "prompt": "p"}\n{"custom_id": "x", "prompt": "p"}\n')
    with BatchStore.open(tmp_path / "s") as store:
        findings = Findings()
        job = store.create_job("bad", {})
        assert add_input(store, job, find_inputs([str(tmp_path)]), OPTIONS, findings) == 4
        assert findings.shown == ["b.jsonl:2: custom_id: 'x' is on a.jsonl:1, too"]
        assert not store.job(job).is_ready
        job = store.create_job("good", {})
        findings = Findings()
        assert add_input(store, job, find_inputs([str(tmp_path / "a.jsonl")]), OPTIONS, findings) == 2
        assert store.job(job).is_ready
        (tmp_path / "empty.jsonl").write_text("\n\n")
        add_input(store, store.create_job("none", {}), find_inputs([str(tmp_path / "empty.jsonl")]), OPTIONS, findings)
        assert findings.shown == ["empty.jsonl: there is no line in it"]


def test_a_file_is_known_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl(3))
    (file,) = find_inputs([str(path)])
    before = identify(file)
    assert identify(file, before) == before
    os.utime(path, ns=(1, 1))
    assert identify(file, before).sha256 == before.sha256
    path.write_bytes(jsonl(3, 1))
    after = identify(file, before)
    assert (after.size_bytes, after.sha256) != (before.size_bytes, before.sha256)
    assert after.sha256 != before.sha256

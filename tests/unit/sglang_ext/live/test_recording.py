"""Recordings of the simulator and of `sglang-ext live record` are read, played and drawn; other files are refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from sglang_ext.cli import main
from sglang_ext.live.decide.messages import MAX_MESSAGE_BYTES, PromptRow, RequestRow, SpanRow, schema
from sglang_ext.live.recording import RecordingError, check_lines, read_recording, write_page
from sglang_ext.live.timeline import Activity, timeline_of_recording
from support.live_recordings import StreamingRouter, shared_recording, simulated_recording, streaming_router
from support.settings import sets


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_recording(tmp_path_factory.mktemp("recording"), seconds=10.0)


def test_a_simulated_run_is_recorded_whole(recording: Path) -> None:
    """Every request of the workload is in it with the simulation's times, and counts add up at every frame."""
    arrivals = [float(line.split(",")[0]) for line in (recording.parent / "workload.csv").read_text().split()[1:]]
    validator = jsonschema.Draft202012Validator(schema())
    ended = 0
    for line in recording.read_bytes().splitlines():
        message = json.loads(line)
        assert len(line) <= MAX_MESSAGE_BYTES
        validator.validate(message)
        if message["kind"] == "frame":
            came = sum(at_s <= message["at_s"] for at_s in arrivals)
            assert sum(sum(row[1:7]) for row in message["classes"]) == came
            ended = sum(row[5] for row in message["classes"])
            for values in message.get("requests", ()):
                row = RequestRow(*values)
                times = (row.received_s, row.started_s, row.prefilled_s, row.first_token_s, row.ended_s)
                assert all(at_s is None or at_s <= message["at_s"] for at_s in times), "told before it was so"
    recorded = read_recording(recording)
    assert ended == len(arrivals)
    assert sorted(one.received_s for one in recorded.requests.values()) == pytest.approx(arrivals, abs=1e-3)
    for one in recorded.requests.values():
        assert one.outcome == "ok"
        assert one.started_s is not None
        assert one.first_token_s is not None
        assert one.prefilled_s is not None
        assert one.ended_s is not None
        assert one.received_s <= one.started_s < one.first_token_s <= one.ended_s
        assert one.prefilled_s >= one.first_token_s, "its KV arrives after the last layer"
        assert recorded.instances[one.prefill or 0].pool in {"short", "long"}
        assert recorded.instances[one.decode or 0].pool == "decode"


def test_decode_instances_hold_what_they_decode(recording: Path) -> None:
    """Load and KV use of both are, at every frame, those of the requests that the simulator gave them."""
    recorded = read_recording(recording)
    decoded = [one for one in recorded.requests.values() if one.decode is not None]
    names = {number for number, row in recorded.instances.items() if row.pool == "decode"}
    assert {one.decode for one in decoded} == names
    assert len(names) == 2
    hello, *frames = [json.loads(line) for line in recording.read_bytes().splitlines()]
    loads: dict[int, dict[str, float]] = {}
    most_used = 0.0
    for frame in frames:
        for values in frame.get("loads", ()):
            load = dict(zip(hello["fields"]["loads"], values, strict=True))
            loads[load["instance"]] = load
        at_s = frame["at_s"]
        for name in names:
            there = [one for one in decoded if one.decode == name and one.first_token_s <= at_s < one.ended_s]
            running = [one for one in there if one.prefilled_s <= at_s]
            assert abs(loads[name]["in_flight"] - len(there)) <= 1, "the times in the file are rounded"
            assert abs(loads[name]["running"] - len(running)) <= 1
            used = sum(one.prompt_tokens + one.output_tokens for one in running) / 1_000_000
            assert loads[name]["kv_used"] == pytest.approx(used, abs=0.04)
            most_used = max(most_used, used)
    assert most_used > 0


def test_a_run_without_decode_says_so(recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    workload = str(recording.parent / "workload.csv")
    assert main(["simulate", *sets(f"workload.file={workload}", "instances.prefill=8"), "--record", str(out)]) == 0
    recorded = read_recording(out)
    assert all(one.decode is None for one in recorded.requests.values())
    assert "of prefill only" in recorded.hello["notes"][0]


def test_a_run_of_a_cluster_that_shares_prompts_and_a_warm_up_are_recorded(tmp_path: Path) -> None:
    workload = tmp_path / "w.csv"
    rows = [f"{number * 0.4:.1f},{8000 if number % 3 else 200},10" for number in range(40)]
    workload.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows))
    out = tmp_path / "r.jsonl"
    common = ["simulate", *sets(f"workload.file={workload}", "instances.prefill=4"), "--record", str(out)]
    assert main([*common, *sets("policy.name=pool", "workload.warm_up=0.5")]) == 0
    recorded = read_recording(out)
    assert len(recorded.requests) == 20
    assert len(recorded.instances) == 4
    assert main([*common, *sets("policy.name=pool", "instances.short=1")]) == 0
    pools = [one.pool for one in read_recording(out).instances.values()]
    assert pools == ["short", "long", "long", "long"]


def test_prompts_that_instances_share_are_told_with_their_chunks(tmp_path: Path) -> None:
    """As a coordinator tells them: every new token in one chunk, or computed by the owner once that has collected the
    rest; each where the lanes have it, and nothing early."""
    prompts: dict[int, PromptRow] = {}
    planned: set[tuple[int, int]] = set()  # prompt, and how many chunks it had begun
    names: dict[int, str] = {}
    worked: set[tuple[str, float, float]] = set()
    spans: set[tuple[str, str, float, float, int]] = set()  # request, instance, times and tokens
    frames = [json.loads(line) for line in shared_recording(tmp_path).read_bytes().splitlines()[1:]]
    for frame in frames:
        names |= {row[0]: row[1] for row in frame.get("instances", ())}
        worked |= {(names[row[0]], row[2], row[3]) for row in frame.get("spans", ())}
        spans |= {
            (span.label, names[span.instance], span.start_s, span.end_s, span.tokens)
            for span in map(SpanRow._make, frame.get("spans", ()))
            if span.kind == "prefill"
        }
        for row in map(PromptRow._make, frame.get("prompts", ())):
            assert row.offered_s <= frame["at_s"]
            assert all(start_s <= frame["at_s"] for _, _, start_s, _ in row.chunks)
            prompts[row.prompt] = row
            done = sum(tokens for tokens, *_ in row.chunks) + sum(tokens for tokens, _ in row.planned)
            assert done <= row.tokens - row.cached_tokens
            if row.planned:
                assert row.ended_s is None
                assert all(members for _, members in row.planned)
                planned.add((row.prompt, len(row.chunks)))
    assert any(begun for _, begun in planned), "a chunk waits for its members while another one is computed"
    ended = [row for row in prompts.values() if row.ended_s is not None]
    assert len(ended) > 20
    assert any(len(row.chunks) > 1 for row in ended)
    assert {row.outcome for row in ended} == {"streamed", "collected"}
    for row in ended:
        shared = {
            (f"request {row.prompt}", member, start_s, end_s)
            for _, members, start_s, end_s in row.chunks
            for member in members
        }
        own = [span for span in spans if span[0] == f"request {row.prompt}" and span[:4] not in shared]
        left = row.tokens - row.cached_tokens - sum(tokens for tokens, *_ in row.chunks)
        if row.outcome == "streamed":
            assert not own
            assert left == 0
        else:
            ((_, member, start_s, _, tokens),) = own
            assert (member, start_s, tokens) == (row.owner, row.ended_s, left)
            assert start_s >= row.chunks[-1][3]
        assert row.owner in {member for _, members, _, _ in row.chunks for member in members}
        for _, members, start_s, end_s in row.chunks:
            assert {(member, start_s, end_s) for member in members} <= worked
    assert {len(members) for row in ended for _, members, _, _ in row.chunks} >= {1, 2, 4}


def test_parked_prompts_and_transfers_of_a_simulated_run_are_lanes_as_those_of_a_served_one(recording: Path) -> None:
    recorded = read_recording(recording)
    names = {number: row.pool for number, row in recorded.instances.items()}
    lines = recording.read_bytes().splitlines()
    spans = [SpanRow._make(row) for line in lines[1:] for row in json.loads(line).get("spans", ())]
    transfers = [span for span in spans if span.kind == "transfer"]
    ended = [one for one in recorded.requests.values() if one.outcome == "ok"]
    assert len(transfers) >= len(ended)
    by_label = {span.label: span for span in transfers}
    for one in ended:
        span = by_label[one.id]
        assert (span.start_s, span.end_s) == (one.first_token_s, one.prefilled_s)
        assert (span.tokens, names[span.instance] != "decode") == (one.prompt_tokens, True)
    parked = [span for span in spans if span.kind == "parked"]
    assert parked
    batches = [span for span in spans if span.kind == "prefill"]
    for wait in parked:
        assert any(
            one.instance == wait.instance and wait.start_s <= one.start_s and one.end_s <= wait.end_s for one in batches
        )
        assert wait.length_class == "long"
        assert wait.tokens is None or wait.tokens > 0


def test_moves_of_a_simulated_run_have_their_reason(recording: Path) -> None:
    events = [event for line in recording.read_bytes().splitlines() for event in json.loads(line).get("events", ())]
    texts = [text for _, kind, _, text in events if kind == "move"]
    assert texts == ["prefill 2 moved: from short to long (pressure)"]


def test_it_takes_one_run(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = str(recording.parent / "workload.csv")
    assert main(["simulate", *sets(f"workload.file={workload}", "workload.rate=1,2"), "--record", "x"]) == 2
    assert "--record takes one run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "it is empty"),
        ([b"no json"], "line 1 is not JSON"),
        ([b"{}"], "line 1 is not a hello"),
        ([b'{"kind":"hello","version":7}'], "line 1: version 7 is not 1"),
        ([b'{"kind":"hello","version":1,"fields":{}}'], "line 1: the fields are not those of this version"),
        (["hello", b"{", b"{}"], "line 2 is not JSON"),
        (["hello", b"[]"], "line 2 is neither"),
        (["hello", b'{"kind":"frame"}'], "line 2: at_s must be a number"),
        (["hello", b" " * (2 << 20) + b"1"], "line 2 is longer than"),
    ],
)
def test_what_is_no_recording_is_named_by_its_line(recording: Path, lines: list[bytes | str], problem: str) -> None:
    hello = recording.read_bytes().splitlines()[0]
    with pytest.raises(RecordingError, match=problem):
        list(check_lines(hello if line == "hello" else line for line in lines))  # type: ignore[misc]


def test_a_last_line_that_is_cut_off_is_left_out(recording: Path) -> None:
    lines = recording.read_bytes().splitlines()[:5]
    assert len(list(check_lines([*lines, lines[2][:40]]))) == 5


def test_a_wrong_row_is_named(recording: Path, tmp_path: Path) -> None:
    hello = recording.read_bytes().splitlines()[0]
    wrong = tmp_path / "r.jsonl"
    wrong.write_bytes(hello + b'\n{"kind":"frame","at_s":1,"requests":[[1,2]]}\n')
    with pytest.raises(RecordingError, match=r"frame 1: .*missing"):
        read_recording(wrong)


def test_a_stream_that_begins_anew_keeps_what_had_ended_and_forgets_what_was_under_way(
    recording: Path, tmp_path: Path
) -> None:
    hello, *frames = recording.read_bytes().splitlines()
    hello = json.dumps(json.loads(hello) | {"began_unix_s": 5.0}).encode()
    again = tmp_path / "again.jsonl"
    again.write_bytes(b"\n".join([hello, *frames[:30], hello, *frames[40:42]]))
    before, told = tmp_path / "before.jsonl", read_recording(again)
    before.write_bytes(b"\n".join([hello, *frames[:30]]))
    had = read_recording(before).requests
    after = {row[0] for frame in frames[40:42] for row in json.loads(frame).get("requests", ())}
    ended = {number for number, row in had.items() if row.ended_s is not None}
    assert set(told.requests) == ended | after
    assert set(had) - ended - after, "one of them was under way, and nothing of it is told any more"
    assert told.frames == 32


def test_the_page_holds_a_recording_whatever_its_texts_are(recording: Path, tmp_path: Path) -> None:
    text = recording.read_text().replace("prefill 0", "</script><b>")
    hostile = tmp_path / "r.jsonl"
    hostile.write_text(text)
    out = tmp_path / "r.html"
    messages = write_page(hostile, out)
    content = out.read_text()
    held = content.partition('id="recording">')[2].partition("</script>")[0]
    assert [json.loads(line) for line in held.split("\n") if line] == [json.loads(line) for line in text.splitlines()]
    assert messages == len(text.splitlines())


@pytest.mark.slow
def test_the_timeline_of_a_recording(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = read_recording(recording)
    timeline = timeline_of_recording(recorded, 15)
    latest = list(recorded.requests.values())[-15:]
    assert [one.tokens for one in timeline.requests] == [one.prompt_tokens for one in latest]
    computing = {bar.request: bar for bar in timeline.bars if bar.activity is Activity.COMPUTE}
    for position, one in enumerate(latest):
        assert one.started_s is not None
        assert one.first_token_s is not None
        assert computing[position].start_s == pytest.approx(one.started_s - timeline.began_s)
        assert computing[position].end_s == pytest.approx(one.first_token_s - timeline.began_s)
        assert computing[position].instance == recorded.instances[one.prefill or 0].name
    picture = tmp_path / "t.png"
    assert main(["live", "timeline", "--recording", str(recording), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["live", "timeline", "--recording", str(recording), "--out", str(tmp_path / "t.html")]) == 0
    assert "liveView" in (tmp_path / "t.html").read_text()
    capsys.readouterr()
    assert main(["live", "timeline", "--recording", str(picture), "--out", str(picture)]) == 1
    assert main(["live", "timeline", "--recording", str(tmp_path / "none"), "--out", str(picture)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"sglang-ext live timeline: --recording {picture}: line 1 is not JSON",
        f"sglang-ext live timeline: {tmp_path / 'none'}: No such file or directory",
    ]


@pytest.fixture
def router(recording: Path) -> Iterator[StreamingRouter]:
    with streaming_router(recording.read_bytes().splitlines()[:20]) as server:
        yield server


@pytest.mark.slow
def test_what_a_router_streams_is_recorded_until_it_ends(
    router: StreamingRouter,
    recording: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_EXT_ADMIN_API_KEY", "the key")
    out = tmp_path / "r.jsonl"
    assert main(["live", "record", f"{router.url}/ui", "--out", str(out)]) == 1
    assert router.asked == [("/ui/stream", "Bearer the key")]
    assert out.read_bytes().splitlines() == recording.read_bytes().splitlines()[:20]
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"frames": 19, "file": str(out)}
    assert "the router has ended the stream: 19 frames" in shown.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_recording_with_status_0(
    router: StreamingRouter, tmp_path: Path, number: signal.Signals
) -> None:
    router.waits = True
    out = tmp_path / "r.jsonl"
    command = [sys.executable, "-m", "sglang_ext.cli", "live", "record", router.url, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ})
    end_s = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < 20:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    process.send_signal(number)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(shown)["frames"] == 19
    assert read_recording(out).frames == 19


@pytest.mark.slow
def test_what_cannot_be_recorded_is_one_line(
    router: StreamingRouter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "r.jsonl")
    assert main(["live", "record", "ftp://x", "--out", out]) == 2
    assert main(["live", "record", router.url, "--out", out, "--seconds", "0"]) == 2
    router.code = 401
    assert main(["live", "record", router.url, "--out", out]) == 1
    router.code = 404
    assert main(["live", "record", router.url, "--out", out]) == 1
    good = router.answer
    router.code, router.answer = 200, b"data: {}\n\n"
    assert main(["live", "record", router.url, "--out", out]) == 1
    router.answer = good
    assert main(["live", "record", router.url, "--out", str(tmp_path / "none" / "r")]) == 1
    lines = capsys.readouterr().err.splitlines()
    for line, words in zip(
        lines,
        (
            "is not of the form",
            "--seconds",
            "(--api-key)",
            "it has no live page",
            "line 1 is not a hello",
            "No such file",
        ),
        strict=True,
    ):
        assert line.startswith("sglang-ext live record: ")
        assert words in line

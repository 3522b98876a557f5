"""`sglang-ext live top`: what the stream says as text of any size, in a real terminal and without one."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.cli import main
from sglang_ext.live.top_command import TerminalView
from support.live_recordings import StreamingRouter, long_pool_recording, simulated_recording, streaming_router

STYLE = re.compile(r"\x1b\[\d+m")
START_S = 60.0


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """A simulated run up to 9 s."""
    recording = simulated_recording(tmp_path_factory.mktemp("recording"), seconds=10.0)
    return recording.read_bytes().splitlines()[:37]


@pytest.fixture
def router(messages: list[bytes]) -> Iterator[StreamingRouter]:
    with streaming_router(messages) as server:
        yield server


def view_of(messages: list[bytes]) -> TerminalView:
    view = TerminalView()
    for message in messages:
        view.take(json.loads(message))
    return view


def test_requests_of_other_processes_are_told_beside_its_own(messages: list[bytes]) -> None:
    last = json.loads(messages[-1])
    last["elsewhere"] = {"routers": 2, "in_flight": 1234, "ended": 5, "failed": 0}
    view = view_of([*messages, json.dumps(last).encode()])
    assert f"in flight {last['in_flight']} here, 1,234 elsewhere" in "\n".join(view.screen(140, 40, has_colours=False))
    assert f"in flight {last['in_flight']} here, 1,234 elsewhere;" in view.line()


def test_it_says_what_the_stream_says(messages: list[bytes]) -> None:
    last: dict[str, Any] = json.loads(messages[-1])
    lines = view_of(messages).screen(140, 40, has_colours=False)
    text = "\n".join(lines)
    assert f"in flight {last['in_flight']}" in text
    assert "10 of 10 instances ready" in text
    for name, *values in last["classes"][:2]:
        (row,) = [line.split() for line in lines if line.startswith(name)]
        assert [int(cell.replace(",", "")) for cell in row[1:7]] == values[:6]
        assert row[7:9] == [f"{1000 * values[6]:.0f}", "ms"] if values[6] < 0.9995 else [f"{values[6]:.2f}", "s"]
    assert sum(line.startswith("prefill ") for line in lines) == 8
    assert "prefill 2 has moved from the short to the long pool" in text
    assert re.search(r"prefill 0 +short +ready +=+\.+ +\d+%", text)
    assert re.search(r"prefill 4 +long +ready +#+\.* +\d+%", text)


def test_a_class_over_its_objective_says_so(messages: list[bytes]) -> None:
    lines = view_of(messages).screen(140, 40, has_colours=False)
    assert [line.split()[0] for line in lines if "over 1.00 s" in line] == ["long"]


@pytest.mark.slow
@given(columns=st.integers(1, 200), rows=st.integers(1, 60), has_colours=st.booleans())
def test_it_never_takes_more_room_than_there_is(
    messages: list[bytes], columns: int, rows: int, has_colours: bool
) -> None:
    lines = view_of(messages[:20]).screen(columns, rows, has_colours)
    assert len(lines) <= rows
    assert all(len(STYLE.sub("", line)) <= columns for line in lines)


def test_instances_that_do_not_fit_are_counted_and_those_that_are_out_come_first(messages: list[bytes]) -> None:
    view = view_of(messages)
    names = json.loads(messages[0])["fields"]["instances"]
    rows = [
        [number, f"host:{number}", "short", "m", "unhealthy" if number == 250 else "ready", None, "it is away"]
        for number in range(100, 300)
    ]
    assert len(names) == len(rows[0])
    view.take({**json.loads(messages[-1]), "instances": rows})
    lines = view.screen(120, 30, has_colours=False)
    assert any(line.startswith("host:250") and "it is away" in line for line in lines)
    (more,) = [line for line in lines if line.startswith("and ")]
    shown = sum(line.startswith(("host:", "prefill ")) and " has " not in line for line in lines)
    assert more == f"and {210 - shown} more"


def test_what_a_stream_brings_cannot_move_the_cursor(messages: list[bytes]) -> None:
    view = view_of(messages)
    hostile = [900, "a\x1b[2Jb\rc", "short", "m", "ready", None, ""]
    view.take({**json.loads(messages[-1]), "instances": [hostile]})
    lines = view.screen(120, 40, has_colours=False)
    assert any("a?[2Jb?c" in line for line in lines)
    assert not any("\x1b" in line or "\r" in line for line in lines)


def test_a_stream_that_begins_anew_forgets_what_was(messages: list[bytes], tmp_path: Path) -> None:
    view = view_of(messages)
    for message in long_pool_recording(tmp_path).read_bytes().splitlines()[:3]:
        view.take(json.loads(message))
    text = "\n".join(view.screen(120, 40, has_colours=False))
    assert "prefill " not in text
    assert text.count("host:") == 4


@pytest.mark.slow
def test_plain_lines_without_a_terminal(
    router: StreamingRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sglang_ext.live.top_command.LINE_INTERVAL_S", 0.0)
    assert main(["live", "top", router.url, "--lines", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert re.fullmatch(
            r"\d+ s; in flight \d+; [\d.]+ requests/s; short TTFT P50 .* answered \d+ failed 0; "
            r"long TTFT .*; ready 10 of 10",
            line,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [b"{", b"[]", b'{"kind":"frame","instances":[[1]]}', b'{"kind":"frame","at_s":1,"instances":3}']
)
def test_a_message_that_cannot_be_read_is_told_and_the_router_asked_again(
    messages: list[bytes], wrong: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sglang_ext.live.top_command.RETRY_S", 0.0)
    monkeypatch.setattr("sglang_ext.live.top_command.LINE_INTERVAL_S", 0.0)
    with streaming_router([*messages[:3], wrong]) as server:
        assert main(["live", "top", server.url, "--lines", "3"]) == 0
        assert len(server.asked) == 2
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 3
    (line,) = told.err.splitlines()
    assert line.startswith("sglang-ext live top: a message cannot be read (")
    assert line.endswith("); trying again")


def test_a_pool_of_another_version_stands_behind_the_others(messages: list[bytes]) -> None:
    view = view_of(messages)
    view.take({**json.loads(messages[-1]), "instances": [[1, "new:1", "encode", "m", "ready", None, ""]]})
    lines = [line for line in view.screen(140, 40, has_colours=False) if " ready " in line]
    assert lines[-1].startswith("new:1 ")


@pytest.mark.slow
def test_a_key_is_not_carried_to_where_a_router_sends_its_client(
    router: StreamingRouter, messages: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    with streaming_router(messages) as elsewhere:
        router.code, router.location = 302, f"{elsewhere.url}/ui/stream"
        assert main(["live", "top", router.url, "--api-key", "secret", "--lines", "1"]) == 1
        assert elsewhere.asked == []
    assert router.asked == [("/ui/stream", "Bearer secret")]
    assert "answers 302" in capsys.readouterr().err


@pytest.mark.slow
def test_what_cannot_be_shown_is_one_line(router: StreamingRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", "top", "ftp://x"]) == 2
    assert main(["live", "top", router.url, "--lines", "0"]) == 2
    router.code = 401
    assert main(["live", "top", router.url]) == 1
    router.code, router.answer = 200, b"data: {}\n\n"
    assert main(["live", "top", router.url]) == 1
    lines = capsys.readouterr().err.splitlines()
    for line, words in zip(
        lines, ("is not of the form", "--lines", "(--api-key)", "line 1 is not a hello"), strict=True
    ):
        assert line.startswith("sglang-ext live top: ")
        assert words in line


@pytest.mark.slow
def test_in_a_terminal_it_draws_again_connects_again_and_leaves_the_screen_as_it_was(router: StreamingRouter) -> None:
    owner, child = pty.openpty()
    os.set_blocking(owner, False)
    command = [sys.executable, "-m", "sglang_ext.cli", "live", "top", router.url]
    environment = {**os.environ, "COLUMNS": "120", "LINES": "35", "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True
    )
    os.close(child)
    seen = ""

    def read_until(words: str) -> None:
        nonlocal seen
        end_s = time.monotonic() + START_S
        while words not in seen:
            assert time.monotonic() < end_s, seen[-2000:]
            assert process.poll() is None, seen[-2000:]
            if select.select([owner], [], [], 0.1)[0]:
                seen += os.read(owner, 1 << 16).decode(errors="replace")

    try:
        read_until("\x1b[?1049h")
        read_until("10 of 10 instances ready")
        read_until("\x1b[34m")
        read_until("the router has ended the stream; trying again")
        router.waits = True
        seen = ""
        read_until("10 of 10 instances ready")
        assert len(router.asked) >= 2
        process.send_signal(signal.SIGINT)
        end_s = time.monotonic() + START_S
        # A terminal that is not read from fills, and the program that writes to it waits.
        while process.poll() is None or "\x1b[?1049l" not in seen:
            assert time.monotonic() < end_s, seen[-500:]
            try:
                seen += os.read(owner, 1 << 16).decode(errors="replace")
            except (BlockingIOError, OSError):
                time.sleep(0.05)
        assert process.returncode == 0
        assert "Traceback" not in seen
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(owner)

"""The Gantt chart of a long pool: its bars, its picture, and what the command says where there is none."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.live.timeline import (
    Activity,
    Bar,
    ShownRequest,
    TimelineError,
    TimelinePictureError,
    add_arguments,
    draw_timeline,
    plan_text,
    run,
    timeline_of,
    timeline_of_stages,
)
from sglang_ext.long_pool.coordinator.coordinator_server import StatusEncoder
from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts, prior_candidates
from sglang_ext.long_pool.coordinator.pool_history import (
    FormerMember,
    MemberStatus,
    PoolStatus,
    PrefillEnd,
    PrefillRecord,
    StepKind,
    StepRecord,
)
from sglang_ext.long_pool.coordinator.pool_protocol import PoolProtocol
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.step_clock import StepTimes


def described(status: PoolStatus) -> dict[str, Any]:
    """The status as a coordinator's HTTP answer has it."""
    answer: dict[str, Any] = json.loads(StatusEncoder().encode(status))
    return answer


def status(**changes: object) -> dict[str, Any]:
    """One prompt alone, then on two, then collected; one that has failed on an instance that is gone, and goes on."""
    first = PrefillRecord(1, 0, 3000, 0, 100.0, ended_s=116.0, outcome=PrefillEnd.COLLECTED)
    alone = StepRecord(StepKind.CHUNK, (0,), 1024, 0, 101.0, 105.0)
    alone.record_times(0, StepTimes(4.0, 0.0, 0.0), 105.0)
    both = StepRecord(StepKind.CHUNK, (0, 1), 1976, 512, 105.0, 115.0)
    both.record_times(0, StepTimes(9.0, 2.0, 1.0), 114.0)
    both.record_times(1, StepTimes(8.0, 3.0, 1.0), 115.0)
    first.steps += [alone, both, StepRecord(StepKind.COLLECT, (0, 1), 0, 1500, 115.0, 116.0)]
    second = PrefillRecord(2, 1, 2000, 0, 116.0)
    second.steps += [
        StepRecord(StepKind.CHUNK, (1, 2), 2000, 0, 116.0, 117.0, has_failed=True),
        StepRecord(StepKind.CHUNK, (1,), 2000, 0, 118.0),
    ]
    never = PrefillRecord(3, 1, 2000, 0, 90.0, ended_s=91.0, outcome=PrefillEnd.CANCELLED)
    members = tuple(MemberStatus(number, name, "n", 0.0, 10, 0, 0, 0.0, True) for number, name in ((0, "a"), (1, "b")))
    former = (FormerMember(2, "c", 117.0, "was killed"), FormerMember(9, "x", 1.0, "long ago"))
    pool = PoolProtocol(PoolSettings(), PoolCosts(prior_candidates((1, 2)))).status(120.0)
    full = PoolStatus(
        *(120.0, "m", members, (second,), (never, first), 1, 0, 0, 2, 1.0, 0.05, former),
    )
    assert set(described(pool)) == set(described(full))
    return {**described(full), **changes}


def test_bars_are_where_the_time_went() -> None:
    timeline = timeline_of(status())
    assert timeline.instances == ("a", "b", "c")
    assert timeline.requests == (
        ShownRequest("a", 3000, "1,024 @ 1 -> 1,976 @ 2", 0.0, 16.0, "collected"),
        ShownRequest("b", 2000, "", 16.0, None, None),
    )
    assert [bar for bar in timeline.bars if bar.request == 0] == [
        Bar("a", 0, Activity.COMPUTE, 1.0, 5.0),
        Bar("a", 0, Activity.REBALANCE, 5.0, 6.0),
        Bar("a", 0, Activity.COMPUTE, 6.0, 12.0),
        Bar("a", 0, Activity.RING, 12.0, 14.0),
        Bar("a", 0, Activity.IDLE, 14.0, 15.0),
        Bar("b", 0, Activity.IDLE, 5.0, 7.0),
        Bar("b", 0, Activity.REBALANCE, 7.0, 8.0),
        Bar("b", 0, Activity.COMPUTE, 8.0, 12.0),
        Bar("b", 0, Activity.RING, 12.0, 15.0),
        Bar("a", 0, Activity.COLLECT, 15.0, 16.0),
        Bar("b", 0, Activity.COLLECT, 15.0, 16.0),
    ]
    assert [bar for bar in timeline.bars if bar.request == 1] == [
        Bar("b", 1, Activity.FAILED, 16.0, 17.0),
        Bar("c", 1, Activity.FAILED, 16.0, 17.0),
        Bar("b", 1, Activity.IDLE, 18.0, 20.0),
    ]
    assert timeline.losses == (("c", 17.0),)


def test_the_latest_prompts_alone() -> None:
    timeline = timeline_of(status(), max_requests=1)
    assert [one.tokens for one in timeline.requests] == [2000]
    assert min(bar.start_s for bar in timeline.bars) == 0.0


def test_a_pool_that_has_done_nothing() -> None:
    timeline = timeline_of(status(recent=[], requests=[]))
    assert (timeline.requests, timeline.bars, timeline.losses) == ((), (), ())


@pytest.mark.parametrize("wrong", [None, [], {}, {"members": 1}, "text"])
def test_what_is_no_status(wrong: object) -> None:
    with pytest.raises(TimelineError, match="not a coordinator's status"):
        timeline_of(wrong)


@pytest.mark.slow
def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "pool.png"
    draw_timeline(timeline_of(status()), path, name_of=str.upper)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(TimelinePictureError, match="cannot be written: No such file"):
        draw_timeline(timeline_of(status()), tmp_path / "no" / "pool.png")
    with pytest.raises(TimelinePictureError, match="Format 'xyz' is not supported"):
        draw_timeline(timeline_of(status()), tmp_path / "pool.xyz")


@contextmanager
def serving(answer: bytes, code: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.slow
def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool.svg"
    with serving(json.dumps(status()).encode()) as url:
        assert run(parse("--coordinator", url.removeprefix("http://"), "--out", str(path))) == 0
    assert capsys.readouterr().out == f"2 prompts on 3 instances: {path}\n"
    assert path.read_text().startswith("<?xml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (b"{", 200, "/status is not JSON"),
        (b"[]", 200, "not a coordinator's status"),
        (b"", 404, "/status answered 404"),
        (json.dumps(status(recent=[], requests=[])).encode(), 200, "no prompt has been shared yet"),
    ],
)
def test_one_line_where_there_is_nothing_to_draw(
    answer: bytes, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(answer, code) as url:
        assert run(parse("--coordinator", url, "--out", str(tmp_path / "x.png"))) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"sglang-ext live timeline: --coordinator {url}: {message}")
    assert errors.count("\n") == 1
    assert not (tmp_path / "x.png").exists()


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(parse("--coordinator", "https://x")) == 1
    assert run(parse("--coordinator", "http://127.0.0.1:1")) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("is not an http:// address")
    assert "does not answer" in second


def stages(*rounds: list[tuple[float, float]]) -> dict[str, Any]:
    """`GET /laps/stages`: when each stage computed which batch."""
    return {
        "stages": [
            {
                "pp_rank": stage,
                "rounds": [
                    {
                        "number": number,
                        "start_s": 100.0 + start_s,
                        "end_s": 100.0 + end_s,
                        "requests": 1 + number,
                        "new_tokens": 10,
                        "prefix_tokens": 1000,
                    }
                    for number, (start_s, end_s) in enumerate(found)
                ],
            }
            for stage, found in enumerate(rounds)
        ]
    }


@pytest.mark.slow
def test_stages_have_lanes_of_their_own_with_their_bubbles(tmp_path: Path) -> None:
    """Two batches follow each other, then nothing runs, then a third one is alone."""
    status = stages([(0, 2), (2, 4), (20, 21)], [(2, 3), (4, 7), (21, 23)])
    found = timeline_of_stages({"a:1": status})
    assert found.instances == ("a:1 stage 0", "a:1 stage 1")
    assert [(one.tokens, one.plan) for one in found.requests] == [
        (10, "behind 1,000"),
        (10, "2 prompts"),
        (10, "3 prompts"),
    ]
    bubbles = {
        (bar.instance, bar.request, bar.start_s, bar.end_s) for bar in found.bars if bar.activity is Activity.BUBBLE
    }
    assert bubbles == {
        ("a:1 stage 0", 1, 4.0, 7.0),
        ("a:1 stage 0", 2, 21.0, 23.0),
        ("a:1 stage 1", 0, 0.0, 2.0),
        ("a:1 stage 1", 1, 3.0, 4.0),
        ("a:1 stage 1", 2, 20.0, 21.0),
    }
    computed = [(bar.request, bar.start_s, bar.end_s) for bar in found.bars if bar.activity is Activity.COMPUTE]
    assert sorted(computed) == [(0, 0, 2), (0, 2, 3), (1, 2, 4), (1, 4, 7), (2, 20, 21), (2, 21, 23)]
    draw_timeline(found, tmp_path / "stages.svg")
    assert "stage 1" in (tmp_path / "stages.svg").read_text()


def test_of_each_instance_the_latest_batches_are_shown() -> None:
    found = timeline_of_stages({"a": stages([(0, 1), (1, 2)], [(1, 2), (2, 3)]), "b": stages([(5, 6)], [])}, 1)
    assert found.instances == ("a stage 0", "a stage 1", "b stage 0", "b stage 1")
    assert [(one.owner, one.offered_s) for one in found.requests] == [("a", 0.0), ("b", 4.0)]
    assert timeline_of_stages({"a": stages([], [])}).bars == ()


@pytest.mark.parametrize(
    "status", [None, {}, {"stages": [{"pp_rank": 0}]}, {"stages": [{"pp_rank": 0, "rounds": [{}]}]}]
)
def test_what_is_no_status_of_stages_draws_no_timeline(status: object) -> None:
    with pytest.raises(TimelineError, match="not the status of stages"):
        timeline_of_stages({"a": status})


def test_the_command_says_what_it_cannot_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(parse("--instance", "127.0.0.1:1")) == 1
    assert "timeline: --instance 127.0.0.1:1: does not answer" in capsys.readouterr().err


def test_chunks_on_as_many_instances_are_one_entry() -> None:
    assert plan_text([]) == ""
    assert plan_text([(1024, 1)]) == "1,024 @ 1"
    assert plan_text([(256, 1), (256, 2), (1000, 2), (50, 4)]) == "256 @ 1 -> 1,256 @ 2 in 2 -> 50 @ 4"

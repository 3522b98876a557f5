"""Workload files of every kind, and one clear line for each that is wrong."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest

from sglang_ext.planner.simulation.events import Prefix, SimRequest
from sglang_ext.planner.simulation.workload import (
    Turn,
    WorkloadError,
    bursty_s,
    drawn_requests,
    load_workload,
    poisson_s,
    scaled,
    session_requests,
)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_mooncake_times_are_milliseconds(tmp_path: Path) -> None:
    text = '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [0]}\n'
    text += '{"timestamp": 1500, "input_length": 20, "output_length": 0}\n'
    workload = load_workload(written(tmp_path, "trace.jsonl", text))
    assert workload.requests == (SimRequest(0, 0.0, 10, 5, 0, Prefix(512, ())), SimRequest(1, 1.5, 20, 1))
    assert workload.lengths == ()


def test_azure_times_count_from_the_first(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    text += "2023-11-16 18:15:50.9951690,396,109\n"
    requests = load_workload(written(tmp_path, "azure.csv", text)).requests
    assert [one.prompt_tokens for one in requests] == [374, 396]
    assert [one.arrival_s for one in requests] == pytest.approx([0.0, 4.314579])


def test_csv_with_and_without_times(tmp_path: Path) -> None:
    timed = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,10,2\n0.5,11,3\n"
    assert load_workload(written(tmp_path, "a.csv", timed)).requests[1] == SimRequest(1, 0.5, 11, 3)
    lengths = "num_prefill_tokens,num_decode_tokens\n10,2\n11,3\n"
    assert load_workload(written(tmp_path, "b.csv", lengths)).lengths == ((10, 2), (11, 3))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "is empty"),
        ("a.csv", "\n\n", "is empty"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n", "has no requests"),
        ("a.csv", "num_prefill_tokens\n5\n", r"column num_decode_tokens is missing \(there are: num_prefill_tokens\)"),
        ("a.csv", "TIMESTAMP,ContextTokens\nx,1\n", "column GeneratedTokens is missing"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n0,1\n", "line 2: num_prefill_tokens 0 is not a whole number"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\nx,1\n", "line 2: num_prefill_tokens 'x' is no number"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n1\n", "line 2: num_decode_tokens None is no number"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n1,-1\n", "line 2: num_decode_tokens -1 is not a whole number"),
        ("a.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n-1,1,1\n", "line 2: the time -1 s is negative"),
        (
            "a.csv",
            "arrived_at,num_prefill_tokens,num_decode_tokens\n2,1,1\n1,1,1\n",
            r"line 3: times are not sorted \(1 s after 2 s\)",
        ),
        (
            "a.csv",
            "arrived_at,num_prefill_tokens,num_decode_tokens\nnan,1,1\n",
            "line 2: arrived_at 'nan' is no number",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2: TIMESTAMP 'noon' is no time"),
        ("a.jsonl", "{}\n", "line 1: timestamp None is no number"),
        ("a.jsonl", "[]\n", "line 1: not an object"),
        ("a.jsonl", '{"timestamp": 0\n', "line 1: not JSON"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(WorkloadError, match=message) as caught:
        load_workload(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"cannot be read: No such file"):
        load_workload(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="is not text"):
        load_workload(tmp_path / "bytes.csv")


def test_arrivals_have_their_rate_and_bursts_vary_more() -> None:
    for shape in (None, 0.25):
        random = Random(0)
        times = poisson_s(5.0, random) if shape is None else bursty_s(5.0, shape, random)
        times_s = list(islice(times, 20_000))
        gaps = [later - earlier for earlier, later in pairwise(times_s)]
        mean = sum(gaps) / len(gaps)
        variation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean
        assert mean == pytest.approx(0.2, rel=0.05)
        assert variation == pytest.approx(1.0 if shape is None else 2.0, rel=0.06)


def test_a_seed_gives_the_same_lengths_and_pattern_at_every_rate() -> None:
    lengths = [(tokens, 1) for tokens in range(1, 50)]
    slow, fast = (list(drawn_requests(lengths, 100, rate, seed=3)) for rate in (1.0, 4.0))
    assert [one.prompt_tokens for one in slow] == [one.prompt_tokens for one in fast]
    assert [one.arrival_s for one in slow] == pytest.approx([4 * one.arrival_s for one in fast])
    assert slow != list(drawn_requests(lengths, 100, 1.0, seed=0))


def test_a_trace_is_stretched_to_a_rate() -> None:
    requests = [SimRequest(0, 2.0, 1, 1), SimRequest(1, 3.0, 1, 1), SimRequest(2, 6.0, 1, 1)]
    assert [one.arrival_s for one in scaled(requests, 0.5)] == pytest.approx([0.0, 1.0, 4.0])
    with pytest.raises(ValueError, match="arrive at once"):
        scaled(requests[:1], 1.0)


# ---- prefixes and sessions ----

TURNS = "conv,part,turn,new_input_tokens,history_tokens,output_tokens\n"


def test_full_blocks_of_a_mooncake_prompt_are_its_prefix(tmp_path: Path) -> None:
    text = '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
    text += '{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [7, 8]}\n'
    requests = load_workload(written(tmp_path, "trace.jsonl", text)).requests
    assert [one.prefix for one in requests] == [Prefix(512, (7, 8))] * 2


@pytest.mark.parametrize("hash_ids", ["3", '["a"]', "[1.5]", "[true]", "{}"])
def test_hashes_that_are_none_are_one_line(tmp_path: Path, hash_ids: str) -> None:
    text = f'{{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": {hash_ids}}}\n'
    with pytest.raises(WorkloadError, match="line 1: hash_ids is not a list of whole numbers"):
        load_workload(written(tmp_path, "trace.jsonl", text))


def test_turns_make_sessions(tmp_path: Path) -> None:
    text = TURNS + "0,0,1,34,0,244\n0,0,2,36,278,320\n0,1,1,5,0,6\n1,0,3,0,8,0\n"
    workload = load_workload(written(tmp_path, "turns.csv", text))
    assert workload.sessions == ((Turn(0, 34, 244), Turn(278, 36, 320)), (Turn(0, 5, 6),), (Turn(8, 1, 1),))
    assert workload.requests == workload.lengths == ()
    assert workload.drawn_lengths() == ((34, 244), (314, 320), (5, 6), (9, 1))
    without_parts = "conv,turn,new_input_tokens,history_tokens,output_tokens\n0,1,34,0,244\n0,2,36,278,320\n"
    assert len(load_workload(written(tmp_path, "b.csv", without_parts)).sessions) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TURNS, "has no requests"),
        ("conv,turn,new_input_tokens,output_tokens\n0,1,1,1\n", "column history_tokens is missing"),
        (TURNS + "0,0,2,1,0,1\n0,0,1,1,0,1\n", r"line 3: turns are not sorted \(turn 1 after 2\)"),
        (TURNS + "0,0,x,1,0,1\n", "line 2: turn 'x' is no number"),
        (TURNS + "0,0,1,-1,0,1\n", "line 2: new_input_tokens -1 is not a whole number of at least 0"),
        (TURNS + "0,0,1,1,-1,1\n", "line 2: history_tokens -1 is not a whole number of at least 0"),
        (TURNS + "0,0,1,1,0,0.5\n", "line 2: output_tokens 0.5 is not a whole number of at least 0"),
    ],
)
def test_wrong_turns_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, "turns.csv", text)
    with pytest.raises(WorkloadError, match=message) as caught:
        load_workload(path)
    assert str(path) in str(caught.value)


@pytest.mark.slow
def test_turns_of_a_session_follow_each_other_and_share_their_prefix() -> None:
    sessions = [(Turn(0, 100, 50), Turn(150, 30, 100), Turn(280, 40, 1)), (Turn(0, 64, 1),)]
    requests = session_requests(sessions, 4000, 5.0, seed=1, think_s=10.0, burst_shape=1.0)
    assert [one.key for one in requests] == list(range(4000))
    assert all(one.arrival_s <= later.arrival_s for one, later in pairwise(requests))
    assert len(requests) / requests[-1].arrival_s == pytest.approx(5.0, rel=0.1)
    turns: dict[int, list[SimRequest]] = {}
    for one in requests:
        assert one.prefix is not None
        assert len(one.prefix.blocks) == one.prompt_tokens // 64
        turns.setdefault(one.prefix.blocks[0], []).append(one)
    thought_s = []
    for one in turns.values():
        assert [later.prompt_tokens for later in one] in ([100, 180, 320][: len(one)], [64])
        for before, later in pairwise(one):
            assert later.prefix is not None
            assert before.prefix is not None
            assert later.prefix.blocks[: len(before.prefix.blocks)] == before.prefix.blocks
            thought_s.append(later.arrival_s - before.arrival_s - 0.02 * before.output_tokens)
    assert min(thought_s) >= 0
    assert sum(thought_s) / len(thought_s) == pytest.approx(10.0, rel=0.1)
    assert requests == session_requests(sessions, 4000, 5.0, seed=1, think_s=10.0, burst_shape=1.0)
    assert requests != session_requests(sessions, 4000, 5.0, seed=2, think_s=10.0, burst_shape=1.0)


def test_the_first_requests_do_not_depend_on_how_many_there_are() -> None:
    sessions = [(Turn(0, 100, 50), Turn(150, 30, 100)), (Turn(0, 64, 1),)]
    many = session_requests(sessions, 300, 5.0, seed=1, think_s=10.0, burst_shape=0.5)
    assert many[:100] == session_requests(sessions, 100, 5.0, seed=1, think_s=10.0, burst_shape=0.5)

"""Workload files of every kind, and one clear line for each that is wrong."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest

from sglang_ext.simulation.arrivals import bursty_s, drawn_requests, poisson_s, scaled
from sglang_ext.simulation.records import SimRequest
from sglang_ext.simulation.workload import WorkloadError, load_workload


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_mooncake_times_are_milliseconds(tmp_path: Path) -> None:
    text = '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [0]}\n'
    text += '{"timestamp": 1500, "input_length": 20, "output_length": 0}\n'
    workload = load_workload(written(tmp_path, "trace.jsonl", text))
    assert workload.requests == (SimRequest(0, 0.0, 10, 5), SimRequest(1, 1.5, 20, 1))
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

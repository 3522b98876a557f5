"""The profile that is read is the one that was written; anything else is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.costs.engine_profile import (
    FORMAT,
    FrontEnd,
    IterationCost,
    ProfileError,
    load_profile,
    sp_entry,
    write_profile,
)
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost

SP = {"size": 1, "a_s": 0.03, "b_s_per_token": 5e-5, "c_s_per_token2": 2e-9, "d_s_per_token2": 1e-9}
PREFILL = {"alpha_s": 1e-10, "token_s": 2e-5, "read_s": 0.0, "kappa_s": 0.01}
STAGES = {"stages": 2, "prefill": PREFILL, "hop": {"fixed_s": 0.001, "token_s": 1e-8}}
ITERATION = IterationCost(0.01, 0.001, 1e-5, 0.0, 1e-10, 2e-9, 1e-9)
FRONT_END = FrontEnd(0.002, 1e-6, 0.003, 0.0)
HEAD = {"format": FORMAT, "version": 1, "model": "m"}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    cost = SpCost(0.03, 5e-5, 2e-9, 1e-9)
    content = {
        "model": "m",
        "device": "d",
        "sp": [sp_entry(1, cost), sp_entry(2, cost)],
        "prefill": PREFILL,
        "iteration": ITERATION._asdict(),
        "gap_s": 0.001,
        "busy_request_s": 0.002,
        "front_end": FRONT_END._asdict(),
        "points": [],
    }
    write_profile(path, content)
    profile = load_profile(path)
    assert profile.candidates == (SpCandidate(1, cost), SpCandidate(2, cost))
    assert profile.coefficients == CostCoefficients(**PREFILL)
    assert (profile.iteration, profile.front_end, profile.gap_s) == (ITERATION, FRONT_END, 0.001)
    assert profile.busy_request_s == 0.002
    assert (profile.model, profile.device) == ("m", "d")
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]


def test_a_profile_of_a_few_lines_will_do(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**HEAD, "prefill": PREFILL}))
    profile = load_profile(path)
    assert profile.candidates == ()
    assert (profile.iteration, profile.front_end, profile.gap_s, profile.device) == (None, None, 0.0, None)


def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, {"model": "m", "prefill": PREFILL})
    before = path.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_profile(path, {"model": "m", "gap_s": float("nan")})
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no", "is not JSON"),
        ("[]", '"format" is not "sglang-ext engine profile"'),
        ({"version": 1, "model": "m", "prefill": PREFILL}, '"format" is not "sglang-ext engine profile"'),
        ({"format": FORMAT, "model": "m", "prefill": PREFILL}, "version missing is not the one this program reads, 1"),
        ({**HEAD, "version": 2, "prefill": PREFILL}, "version 2 is not the one this program reads, 1"),
        ({"format": FORMAT, "version": 1, "prefill": PREFILL}, '"model" is missing'),
        (HEAD, 'a profile has "sp", "prefill" or "pipelines"'),
        ({**HEAD, "sp": []}, '"sp" is a list of at least one SP size'),
        ({**HEAD, "sp": [{"size": 1}]}, '"sp": a_s must be a number of at least 0'),
        ({**HEAD, "sp": [{**SP, "size": 1.5}]}, "size 1.5 is not a whole number of at least 1"),
        ({**HEAD, "sp": [SP, SP]}, '"sp" has a size twice'),
        ({**HEAD, "sp": [{**dict.fromkeys(SP, 0), "size": 1}]}, '"sp": a chunk on size 1 costs nothing'),
        ({**HEAD, "prefill": {"alpha_s": -1}}, '"prefill": alpha_s must be a number of at least 0'),
        ({**HEAD, "prefill": {**PREFILL, "kappa_s": True}}, '"prefill": kappa_s must be a number of at least 0'),
        ({**HEAD, "prefill": {**PREFILL, "token_s": 0, "alpha_s": 0}}, '"prefill": a token costs nothing'),
        ({**HEAD, "prefill": PREFILL, "iteration": {}}, '"iteration": fixed_s must be a number of at least 0'),
        (
            {**HEAD, "prefill": PREFILL, "iteration": dict.fromkeys(IterationCost._fields, 0)},
            '"iteration": a token costs nothing',
        ),
        ({**HEAD, "prefill": PREFILL, "front_end": {"before_s": "x"}}, '"front_end": before_s must be a number'),
        ({**HEAD, "pipelines": []}, '"pipelines" is a list of at least one number of stages'),
        ({**HEAD, "pipelines": [{"stages": 1}]}, '"pipelines": 1 stages are not a whole number of at least 2'),
        ({**HEAD, "pipelines": [{"stages": 2}]}, '"pipelines", 2 stages: "prefill" is missing'),
        ({**HEAD, "pipelines": [STAGES, STAGES]}, '"pipelines" has a number of stages twice'),
        (
            {**HEAD, "pipelines": [{**STAGES, "hop": {"fixed_s": -1}}]},
            '"pipelines", 2 stages: "hop": fixed_s must be a number of at least 0',
        ),
        (
            {**HEAD, "pipelines": [{**STAGES, "relative": [0.5, 0.9]}]},
            "2 stages: relative times of 2 stages are as many numbers above 0, the largest 1",
        ),
        ({**HEAD, "prefill": PREFILL, "gap_s": -1}, "gap_s must be a number of at least 0"),
        ({**HEAD, "prefill": PREFILL, "fit": {}}, "max_error must be a number of at least 0"),
        ({**HEAD, "prefill": PREFILL, "max_error": 0.2, "fit": {"sp 1": {}}}, '"fit, sp 1": error_p90 must be'),
    ],
)
def test_a_wrong_profile_is_one_line(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"none\.json cannot be read: No such file"):
        load_profile(tmp_path / "none.json")

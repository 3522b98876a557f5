"""The partial file: an interruption loses nothing that was finished, and nothing foreign is continued."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.planner.profiling.facts import Scalar
from sglang_ext.planner.profiling.measured_points import (
    MeasuredHandOver,
    MeasuredPoint,
    Notes,
    NotesError,
    SkippedPoint,
    partial_path,
)
from sglang_ext.planner.profiling.points import Point

IDENTITY: dict[str, Scalar] = {"model": "llama", "dtype": "bfloat16", "tp_size": 1}
ONE = MeasuredPoint(Point(256, 8), (0.01, 0.0101), (0.001, 0.001), (0.002, 0.002))
OTHER = MeasuredPoint(Point(0, 8, 4), (0.02,), (0.001,), (0.002,))


def filled(path: Path) -> None:
    notes = Notes(path, IDENTITY)
    notes.add_point(ONE)
    notes.add_skipped(SkippedPoint(Point(0, 512), "cut"))
    notes.add_hand_over(MeasuredHandOver(128, (0.01, 0.02), (0.03, 0.04)))
    notes.add_gaps((0.001, 0.002))
    notes.add_point(OTHER)


def test_everything_that_was_noted_is_there_again(tmp_path: Path) -> None:
    path = partial_path(tmp_path / "profile.json")
    assert path.name == "profile.json.partial"
    filled(path)
    notes = Notes(path, IDENTITY)
    assert notes.points == {ONE.point: ONE, OTHER.point: OTHER}
    assert notes.skipped == {Point(0, 512): SkippedPoint(Point(0, 512), "cut")}
    assert notes.hand_overs == {128: MeasuredHandOver(128, (0.01, 0.02), (0.03, 0.04))}
    assert notes.gaps_s == (0.001, 0.002)
    notes.remove()
    assert not path.exists()
    notes.remove()


@pytest.mark.parametrize("lost", [1, 20])
def test_a_line_that_was_cut_off_is_measured_again(lost: int, tmp_path: Path) -> None:
    path = tmp_path / "partial"
    filled(path)
    path.write_text(path.read_text()[:-lost])
    notes = Notes(path, IDENTITY)
    assert set(notes.points) == {ONE.point}
    notes.add_point(OTHER)
    assert set(Notes(path, IDENTITY).points) == {ONE.point, OTHER.point}


def test_a_file_cut_off_in_its_head_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    path.write_text('{"format": "sgl')
    Notes(path, IDENTITY).add_point(ONE)
    assert set(Notes(path, IDENTITY).points) == {ONE.point}


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({**IDENTITY, "dtype": "float8"}, "was measured with dtype bfloat16, the instance has float8"),
        ({**IDENTITY, "page_size": 64}, "was measured with page_size None, the instance has 64"),
    ],
)
def test_measurements_of_something_else_are_not_continued(
    identity: dict[str, Scalar], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "partial"
    filled(path)
    before = path.read_text()
    with pytest.raises(NotesError) as caught:
        Notes(path, identity)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "no partial measurement of this version"),
        ('{"format": "sglang-ext engine measurements", "version": 9, "identity": {}}\n', "of this version"),
    ],
)
def test_another_file_is_left_alone(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "partial"
    path.write_text(text)
    with pytest.raises(NotesError, match=message):
        Notes(path, IDENTITY)
    assert path.read_text() == text


@pytest.mark.parametrize("line", ["[]", "{}", '{"point": [1, 2]}', '{"hand_over": 8, "after_s": ["x"]}'])
def test_a_broken_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "partial"
    Notes(path, IDENTITY)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(NotesError, match="line 2, is no measurement"):
        Notes(path, IDENTITY)

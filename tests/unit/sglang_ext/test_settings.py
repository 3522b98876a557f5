"""Settings of a command: of the file, of `--set`, their defaults; every error is one line that names the setting."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from sglang_ext.settings import REQUIRED, Setting, SettingsError, read

ROOT = Path(__file__).parents[3]
SETTINGS = (
    Setting("load", "file", Path, REQUIRED, "a file"),
    Setting("load", "rates", float, (), "rates", is_list=True),
    Setting("load", "requests", int, None, "how many", dest="count"),
    Setting("policy", "name", str, "fcfs", "which", ("fcfs", "laps")),
    Setting("policy", "moves", bool, False, "whether"),
)
DEFAULTS = {"rates": (), "count": None, "name": "fcfs", "moves": False}


def written(folder: Path, text: str) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_setting_of_the_command_line_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, "load: {file: trace.csv, rates: [1, 2.5], requests: 7}\npolicy: {moves: true}\n")
    values = read(SETTINGS, file, ["load.requests=9", "policy.name=laps"])
    expected = {"file": Path("trace.csv"), "rates": [1.0, 2.5], "count": 9, "name": "laps", "moves": True}
    assert values == expected
    assert read(SETTINGS, None, ["load.file=x"]) == {**DEFAULTS, "file": Path("x")}


def test_lists_have_commas_on_the_command_line_and_may_be_one_value_in_the_file(tmp_path: Path) -> None:
    assert read(SETTINGS, None, ["load.file=x", "load.rates=1,2"])["rates"] == [1.0, 2.0]
    assert read(SETTINGS, written(tmp_path, "load: {file: x, rates: 3}"), [])["rates"] == [3.0]


def test_an_empty_file_has_no_settings(tmp_path: Path) -> None:
    assert read(SETTINGS, written(tmp_path, ""), ["load.file=x"]) == {**DEFAULTS, "file": Path("x")}


ERRORS = {
    "load: [1]": "the scenario: load must be a section of settings",
    "[1]": "the scenario: .* must hold sections: load, policy",
    "{": "the scenario: .* is not YAML: ",
    "lod: {file: x}": "the scenario: lod.file: there is no section 'lod'; known are load, policy",
    "load: {fiel: x}": "the scenario: load.fiel: load has no 'fiel'; known are file, rates, requests",
    "load: {file: 3}": "the scenario: load.file must be a path, not 3",
    "load: {file: x, requests: 1.5}": "the scenario: load.requests must be a whole number, not 1.5",
    "load: {file: x, requests: true}": "the scenario: load.requests must be a whole number, not True",
    "load: {file: x, rates: [1, y]}": "the scenario: load.rates must be a number, not 'y'",
    "policy: {name: sjf}": "the scenario: policy.name must be one of fcfs, laps, not 'sjf'",
    "policy: {moves: 1}": "the scenario: policy.moves must be true or false, not 1",
    "policy: {name: laps}": "load.file is needed",
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_of_the_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        read(SETTINGS, written(tmp_path, text), [], option="the scenario")
    assert re.match(ERRORS[text], str(raised.value))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("load.file", "--set: 'load.file' is not of the form SECTION.KEY=VALUE"),
        ("load.requests=x", "--set load.requests must be a whole number, not 'x'"),
        ("load.rates=1,x", "--set load.rates must be a number, not 'x'"),
        ("policy.moves=yes", "--set policy.moves must be true or false, not 'yes'"),
        ("requests=1", "--set requests: there is no section 'requests'; known are load, policy"),
    ],
)
def test_errors_of_the_command_line(assignment: str, message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read(SETTINGS, None, [assignment])
    assert str(raised.value) == message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--config: .*none\.yaml"):
        read(SETTINGS, tmp_path / "none.yaml", [])


def test_the_reference_page_is_what_the_tool_makes() -> None:
    assert runpy.run_path(str(ROOT / "tools" / "render_options.py"))["render"]() == (
        ROOT / "docs" / "reference" / "command-line.md"
    ).read_text(encoding="utf-8")

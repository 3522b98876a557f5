"""Errors of command lines: one line that begins with the command, and status 2."""

from __future__ import annotations

import argparse

import pytest

from sglang_ext.cli import COMMANDS, main
from sglang_ext.command_parser import RaisingParser, one_line_errors

WORDS = [
    *([name] for name, command in COMMANDS.items() if not command.kinds),
    *([name, kind] for name, command in COMMANDS.items() for kind in command.kinds),
]
# What each refuses: an option that nobody has, and where it has one a value that it cannot take.
BAD_VALUES = [
    (["router", "--port", "http"], "argument --port: invalid int value: 'http'"),
    (["router", "--log-level", "loud"], "argument --log-level: invalid choice: 'loud' (choose from 'debug', "),
    (["worker", "--role", "short"], "the following arguments are required: --model-path"),
    (
        ["worker", "--role", "tall", "--model-path", "m"],
        "argument --role: 'tall' is not one of short, long, both, decode, plain",
    ),
    (["worker", "--role", "short", "--model-path", "m", "--port", "0"], "argument --port: 0 is not a port"),
    (["coordinator", "--port"], "argument --port: expected one argument"),
    (["up", "--short", "two"], "argument --short: invalid int value: 'two'"),
    (["up", "m", "--prefil", "2"], "unrecognized arguments: --prefil 2; did you mean --prefill?"),
    (["router", "--plan=http://a"], "unrecognized arguments: --plan=http://a; did you mean --plain?"),
    (["up", "--model", "m"], "unrecognized arguments: --model; give MODEL as a word of its own"),
    (["batch"], "the following arguments are required: WHAT"),
    (["batch", "walk"], "argument WHAT: invalid choice: 'walk'"),
]


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_an_unknown_option_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of([*words, "--no-such-option"], capsys).startswith(f"sglang-ext {' '.join(words)[:4]}")


@pytest.mark.parametrize(("words", "message"), BAD_VALUES, ids=lambda value: str(value)[:50])
def test_a_bad_value_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(words, capsys)
    assert error.startswith(f"sglang-ext {words[0]}")
    assert f": error: {message}" in error


def test_a_parser_may_raise_instead() -> None:
    parser = RaisingParser()
    parser.add_argument("--n", type=int)
    with pytest.raises(ValueError, match=r"^argument --n: invalid int value: 'x'$"):
        parser.parse_args(["--n", "x"])


def test_a_parser_of_others_is_made_to_write_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="theirs")
    parser.add_argument("--n", type=int)
    with pytest.raises(SystemExit), one_line_errors("sglang-ext worker"):
        parser.parse_args(["--n", "x"])
    assert capsys.readouterr().err == "sglang-ext worker: error: argument --n: invalid int value: 'x'\n"
    with pytest.raises(SystemExit):
        parser.parse_args(["--n", "x"])
    assert capsys.readouterr().err.startswith("usage: theirs")

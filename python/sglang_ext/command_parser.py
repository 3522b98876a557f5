"""Parsers of command lines whose errors are one line, without the usage of every option before it."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

USAGE_ERROR = 2
Choice = TypeVar("Choice", bound=StrEnum)


def any_of(kind: type[Choice]) -> Callable[[str], Choice]:
    """Return an argparse type for the values of an enumeration; its error lists them."""

    def parse(text: str) -> Choice:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(kind)}") from None

    return parse


class CommandParser(argparse.ArgumentParser):
    """Print `PROGRAM: error: …`, one line, and exit with status 2 where the words cannot be parsed.

    Options have no abbreviations: a misspelt option would be taken for another.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: error: {_one_line(message)}{self._meant(message)}\n")

    def _meant(self, message: str) -> str:
        """Return a hint at the option that is spelt like an unknown one."""
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        option = words.split()[0].partition("=")[0] if is_unknown else ""
        near = difflib.get_close_matches(option, self._option_string_actions, n=1, cutoff=0.8)
        return f"; did you mean {near[0]}?" if near and option.startswith("--") else ""


class RaisingParser(argparse.ArgumentParser):
    """Raise ValueError with one line that names the option where the words cannot be parsed."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(_one_line(message))


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Let every parser made by others, as SGLang's is, print its errors as `CommandParser` does in the block."""
    kind: Any = argparse.ArgumentParser
    before = kind.error
    kind.error = lambda parser, message: parser.exit(USAGE_ERROR, f"{program}: error: {_one_line(message)}\n")
    try:
        yield
    finally:
        kind.error = before


def _one_line(message: str) -> str:
    return " ".join(message.split())

"""Every `sglang-ext` command of a code block in a document is one that the program takes."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from sglang_ext import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]
# What a line of a document has that no shell takes, and what stands for it here.
PLACEHOLDERS = {"…": "", "...": "", "INSTANCE:30000": "127.0.0.1:30000", "PORT": "30000"}
ENDS = {"(", ")", "|", "||", "&", "&&", ";", ">", ">>", "<", "2>&1"}


class DocumentCommand(NamedTuple):
    """A command with the page where it stands."""

    page: str
    words: tuple[str, ...]


def code_blocks(text: str) -> Iterator[str]:
    for block in re.findall(r"^( *)```(?:bash|sh|console)?\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
        yield block[1].replace("\\\n", " ")


def commands() -> Iterator[DocumentCommand]:
    for page in PAGES:
        for block in code_blocks(page.read_text(encoding="utf-8")):
            for line in block.splitlines():
                yield from (DocumentCommand(str(page.relative_to(ROOT)), words) for words in commands_of(line))


def commands_of(line: str) -> Iterator[tuple[str, ...]]:
    """Return the words of each `sglang-ext` command in a line of shell, without redirections and comments."""
    if "sglang-ext " not in line or line.lstrip().startswith("#"):
        return
    for placeholder, value in PLACEHOLDERS.items():
        line = line.replace(placeholder, value)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[str] | None = None
    for word in lexer:
        if Path(word).name == "sglang-ext":
            found = []
        elif found is not None and word in ENDS:
            yield tuple(found)
            found = None
        elif found is not None:
            found.append(word)
    if found is not None:
        yield tuple(found)


COMMANDS = sorted({command for command in commands() if command.words and command.words[0] in cli.COMMANDS})


@pytest.mark.parametrize("command", COMMANDS, ids=[f"{page}: {shlex.join(words)}"[:150] for page, words in COMMANDS])
def test_a_command_is_taken(command: DocumentCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[argparse.Namespace] = []
    fill = cli._fill

    def fill_without_running(parser: argparse.ArgumentParser, command: cli.Command) -> ModuleType:
        module = fill(parser, command)
        parser.set_defaults(run_command=taken.append)
        return module

    monkeypatch.setattr(cli, "_fill", fill_without_running)
    cli.main(list(command.words))
    assert len(taken) == 1


def test_many_commands_were_found() -> None:
    assert len(COMMANDS) > 60

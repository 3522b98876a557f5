"""Every row of the table of faults and abuses names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs/explanation/routing.md"


def rows() -> list[list[str]]:
    text = DOCUMENT.read_text(encoding="utf-8").partition("## What happens when")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert text.count("\n|") == len(lines)
    table = text[text.index("|") :].split("\n\n")[0].splitlines()
    assert table == lines, "the table is one, without an empty line"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_row_is_shown_by_tests_that_exist() -> None:
    files: list[Path] = []  # named so far: a test without a file is in one of them
    seen = 0
    for row in rows():
        named = re.findall(r"`(?:([\w/]+\.py): )?(test_\w+)`", row[-1])
        assert named, f"no test is named: {row[0]}"
        for path, name in named:
            if path:
                assert (TESTS / path).is_file(), f"{row[0]}: {path} does not exist"
                files.append(TESTS / path)
            found = [file for file in files if f"def {name}(" in file.read_text(encoding="utf-8")]
            assert found, f"{row[0]}: there is no {name}"
            assert not path or files[-1] in found, f"{row[0]}: {path} has no {name}"
            seen += 1
    assert seen >= 50

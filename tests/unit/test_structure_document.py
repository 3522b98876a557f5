"""`docs/explanation/architecture.md` names files and functions that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
# A path is written from a package on, as long as only one file can be meant.
PATHS = sorted(set(re.findall(r"`((?:[\w]+/)*\w+\.py)(?:: [\w.]+)?`", TEXT)))
FOLDERS = sorted(set(re.findall(r"`((?:[\w]+/)+)`", TEXT)))
NAMES = sorted(set(re.findall(r"`((?:[\w]+/)*\w+\.py): ([\w.]+)`", TEXT)))
ROOTS = ("python", "router", "kernels", "cuda_graphs")
SOURCES = [path for root in ROOTS for path in (ROOT / root).rglob("*.py")] + [Path(__file__)]


def files(path: str) -> list[Path]:
    return [source for source in SOURCES if str(source).endswith(f"/{path}")]


def defined(source: Path) -> set[str]:
    names = set()
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | functions):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, functions)}
    return names


@pytest.mark.parametrize("path", PATHS)
def test_files_are_there(path: str) -> None:
    assert files(path), path


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_there(folder: str) -> None:
    assert (
        any(found.is_dir() for root in ROOTS for found in ROOT.glob(f"{root}/**/{folder}")) or (ROOT / folder).is_dir()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("path", "name"), NAMES)
def test_functions_are_there(path: str, name: str) -> None:
    assert any(name in defined(source) for source in files(path)), f"{path}: {name}"


def test_the_document_was_read() -> None:
    assert len(PATHS) > 30
    assert len(NAMES) > 20

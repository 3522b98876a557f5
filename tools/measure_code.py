"""Print how large the code is and how it is written: `python tools/measure_code.py [--checkout FOLDER] [--json FILE]`.

Counts files, lines, code lines (without blank lines, comments and docstrings) and classes of the product, options of
each command, modules that pack bytes by hand, the files that `docs/explanation/architecture.md` names for one
request and one chunk, and the habits of prose that the project drops. `--checkout` measures another checkout, for a
table of before and after.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("python", "router", "kernels", "cuda_graphs")
PROSE = (*PRODUCT, "docs", "deploy", "bench", "tools", "examples", "README.md", "CONTRIBUTING.md")
NATIVE = (".cpp", ".hpp")
PREPOSITIONS = "Of|In|From|To|With|By|For|On|At|As|Under|Behind|Between|Until|Within|Without|Against|After|Before|Than"
# The name of each habit and the pattern that finds it.
TEXT_HABITS = {
    "tell, told": r"\b(?:tells?|told|telling)\b",
    "one that": r"\bone that\b",
    "those that": r"\bthose that\b",
    "so many, so much, so long": r"\bso (?:many|much|long)\b",
    "alone": r"\balone\b",
    "anew": r"\banew\b",
    "whatever": r"\bwhatever\b",
    "beside": r"\bbeside\b",
    "lately": r"\blately\b",
}
NAME_HABITS = {
    "variable one": r"\bone\b(?= (?:in|=|for)\b|\.\w|\[|\))",
    "most_, least_": r"\b_?(?:most|least)_\w+",
    "why_": r"\b_?why_\w+",
    "note_": r"\b_?note_\w+",
}
DOCSTRING_HABITS = {
    "docstring: What": r"What\b",
    "docstring: Whether": r"Whether\b",
    "docstring: a bare preposition": rf"(?:{PREPOSITIONS})\b",
}
_OPTIONS = """
import argparse, json
from sglang_ext import cli
counts = {}
def count(name, command):
    parser = argparse.ArgumentParser(add_help=False)
    cli._fill(parser, command)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    counts[name] = sum(bool(action.option_strings) for action in shown)
for name, command in cli.COMMANDS.items():
    for kind, its in command.kinds.items():
        count(f"{name} {kind}", its)
    if not command.kinds:
        count(name, command)
print(json.dumps(counts))
"""


def main() -> int:
    """Print the table, and write it as JSON where `--json` names a file. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure the size and the prose of the code.")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[1], help="folder to measure")
    parser.add_argument("--json", type=Path, help="file that the figures are written to")
    arguments = parser.parse_args()
    checkout: Path = arguments.checkout.resolve()
    figures = {**_sizes(checkout), **_options(checkout), **_structure(checkout), **_habits(checkout)}
    for name, figure in figures.items():
        print(f"{figure:>8,}  {name}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def _tracked(checkout: Path, roots: tuple[str, ...]) -> list[Path]:
    command = ["git", "-C", str(checkout), "ls-files", *roots]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in map(checkout.joinpath, names) if path.is_file()]


def _sizes(checkout: Path) -> dict[str, int]:
    figures: dict[str, int] = {}
    for title, roots in (("product", PRODUCT), ("bench", ("bench",)), ("tests", ("tests",))):
        files = [path for path in _tracked(checkout, roots) if path.suffix in {".py", *NATIVE}]
        figures[f"{title}: files"] = len(files)
        figures[f"{title}: lines"] = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
        figures[f"{title}: code lines"] = sum(_code_lines(path) for path in files)
    files = [path for path in _tracked(checkout, PRODUCT) if path.suffix == ".py"]
    figures["product: code lines of the planner"] = sum(_code_lines(path) for path in files if _is_planner(path))
    figures["product: classes"] = sum(
        isinstance(node, ast.ClassDef) for path in files for node in ast.walk(_parse(path))
    )
    figures["product: modules that pack bytes with struct"] = sum(
        bool(re.search(r"^import struct$|^from struct import", path.read_text(encoding="utf-8"), re.M))
        for path in files
    )
    return figures


def _is_planner(path: Path) -> bool:
    return bool({"planner", "profiling", "simulation", "sizing", "costs"} & set(path.parts[:-1]))


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first


def _code_lines(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    comment = "#" if path.suffix == ".py" else "//"
    kept = {number for number, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith(comment)}
    if path.suffix == ".py":
        for docstring in _docstrings(ast.parse(text)):
            kept -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(kept)


def _options(checkout: Path) -> dict[str, int]:
    folders = os.pathsep.join(str(checkout / root) for root in PRODUCT)
    command = [sys.executable, "-c", _OPTIONS]
    environment = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout.splitlines()[-1])
    figures = {f"options: {name}": count for name, count in counts.items()}
    return {**figures, "options: all commands": sum(counts.values()), "commands": len(counts)}


def _structure(checkout: Path) -> dict[str, int]:
    sections = re.split(
        r"^## ", (checkout / "docs/explanation/architecture.md").read_text(encoding="utf-8"), flags=re.M
    )
    figures = {}
    for title, start in (("one request", "The life of a request"), ("one chunk", "One chunk of a long prompt")):
        text = next(section for section in sections if section.startswith(start))
        figures[f"structure: files named for {title}"] = len(set(re.findall(r"[\w/]+\.py\b", text)))
    return figures


def _habits(checkout: Path) -> dict[str, int]:
    prose = [path for path in _tracked(checkout, PROSE) if path.suffix in {".py", ".md", ".yaml", ".tpl", *NATIVE}]
    prose = [
        path
        for path in prose
        if path.name not in {"handbook.md", "logbook.md", "check_structure.py", "measure_code.py"}
    ]
    texts = [path.read_text(encoding="utf-8") for path in prose if "results" not in path.parts]
    sources = [path.read_text(encoding="utf-8") for path in _tracked(checkout, PRODUCT) if path.suffix == ".py"]
    figures = {}
    for name, pattern in TEXT_HABITS.items():
        figures[f"habit: {name}"] = sum(len(re.findall(pattern, text, re.IGNORECASE)) for text in texts)
    for name, pattern in NAME_HABITS.items():
        figures[f"habit: {name}"] = sum(len(re.findall(pattern, source)) for source in sources)
    docstrings = [ast.literal_eval(node.value) for source in sources for node in _docstrings(ast.parse(source))]
    for name, pattern in DOCSTRING_HABITS.items():
        figures[f"habit: {name}"] = sum(bool(re.match(pattern, docstring.lstrip())) for docstring in docstrings)
    return figures


if __name__ == "__main__":
    sys.exit(main())

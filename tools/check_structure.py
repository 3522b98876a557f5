"""Check rules of structure that no other linter knows: `python tools/check_structure.py [PATH PREFIX ...]`.

- a module under 80 lines has two importers in the product, or belongs into the module that uses it;
- no class name stands twice in the product;
- no module is called after what it is made of (`records.py`, `arguments.py`, `command.py`).

Exit status 1 with a line per finding, 0 without any.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path, PurePosixPath

ROOTS = ("python", "router", "kernels", "cuda_graphs")
FULL_LINES = 80
VAGUE_NAMES = frozenset({"records.py", "arguments.py", "command.py"})
# Modules that something other than an import or a string in the product reaches: an entry point in `pyproject.toml`.
# `compiled` must be importable where what it checks is not.
REACHED_OTHERWISE = frozenset({"sglang_ext.engine.entry_point", "sglang_ext_router.compiled"})


def main(prefixes: list[str]) -> int:
    """Print what is found in tracked files that start with one of `prefixes` (none: all). Returns the exit status."""
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    files = [name for name in tracked if Path(name).is_file()]
    findings = _structure(files)
    kept = [line for line in findings if not prefixes or line.startswith(tuple(prefixes))]
    print("\n".join(kept) if kept else "structure: nothing found")
    return 1 if kept else 0


def _structure(files: list[str]) -> list[str]:
    modules = {_module(name): name for name in files if name.endswith(".py") and name.split("/")[0] in ROOTS}
    importers: dict[str, set[str]] = defaultdict(set)
    classes: dict[str, list[str]] = defaultdict(list)
    lines: dict[str, int] = {}
    reached = set(REACHED_OTHERWISE)
    for module, name in modules.items():
        source = Path(name).read_text(encoding="utf-8")
        lines[module] = source.count("\n")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                reached.add(node.value.partition(":")[0])  # a hook's implementation, a command, `python -m`
            for imported in _imported(node):
                if imported in modules and imported != module:
                    importers[imported].add(module)
    findings = []
    for module, name in modules.items():
        base = PurePosixPath(name).name
        if base in VAGUE_NAMES:
            findings.append(f"{name}: called after what it is made of, not what it holds")
        if base == "__init__.py" or module in reached or lines[module] >= FULL_LINES:
            continue
        if len(importers[module]) < 2:
            only = next(iter(importers[module]), "no module")
            findings.append(f"{name}: {lines[module]} lines, and imported only by {only}")
    for class_name, places in sorted(classes.items()):
        if len(places) > 1:
            findings += [
                f"{place}: class {class_name} is also in {', '.join(set(places) - {place}) or place}"
                for place in places
            ]
    return findings


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _module(name: str) -> str:
    parts = PurePosixPath(name).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

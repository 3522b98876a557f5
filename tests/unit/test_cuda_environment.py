"""What the CUDA environment needs is in its lock, and what is imported from SGLang there is in SGLang: checked on the
sources, as a machine without a GPU cannot import all of it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements/cuda.lock"
PRODUCT = ("python", "router", "kernels", "cuda_graphs")
# Packages that the CPU's environment lacks, by the name that is imported.
ON_CUDA_ALONE = {"flashinfer": "flashinfer-python", "nixl": "nixl", "sgl_kernel": "sglang-kernel", "triton": "triton"}
IN_THEIR_OWN_FOLDERS = {"botocore", "mooncake", "ray"}  # `make s3-env`, `make mooncake-env`, `make ray-env`
OTHER_VERSIONS = {"0.5.22": os.environ.get("SGLANG_EXT_TEST_SGLANG_0522")}  # folder of an unpacked wheel, if any


class Import(NamedTuple):
    """One imported name of the product; `name` is None for `import module`."""

    file: str
    line: int
    module: str
    name: str | None
    is_tried: bool  # inside a `try` or its handlers: it may be missing


def imports_of(source: str, file: str) -> Iterator[Import]:
    """All imports of a file, those inside functions too."""
    tree = ast.parse(source)
    tries = [one for one in ast.walk(tree) if isinstance(one, ast.Try)]
    tried = {id(node) for one in tries for node in ast.walk(one)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, None, id(node) in tried)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module is not None
            for alias in node.names:
                yield Import(file, node.lineno, node.module, alias.name, id(node) in tried)


@cache
def product_imports() -> list[Import]:
    files = [*(path for root in PRODUCT for path in (ROOT / root).rglob("*.py")), *(ROOT / "examples").glob("demo*.py")]
    return [one for path in files for one in imports_of(path.read_text(), str(path.relative_to(ROOT)))]


def locked() -> dict[str, str]:
    """Distribution to version."""
    lines = (line.partition("#")[0].strip() for line in LOCK.read_text().splitlines())
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


@cache
def installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def distribution_of(module: str) -> str | None:
    """The distribution that a module comes from, None for an unknown one."""
    if module in ON_CUDA_ALONE:
        return ON_CUDA_ALONE[module]
    found = installed().get(module)
    return canonicalize_name(found[0]) if found else None


def names_defined(tree: ast.Module) -> set[str]:
    """Names that a module has after its import, whatever branches it takes; `*` where another module decides."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            pending += ast.iter_child_nodes(node)
    return names


def module_file(root: Path, module: str) -> Path | None:
    """The source of `sglang.…` under the folder that holds SGLang."""
    path = root.joinpath(*module.split("."))
    found = (path / "__init__.py", path.with_suffix(".py"))
    return next((one for one in found if one.is_file()), root if path.is_dir() else None)


def missing_from_sglang(root: Path, imports: list[Import]) -> list[str]:
    """One line for each import that SGLang's sources do not have."""
    missing = []
    known: dict[Path, set[str]] = {}
    for one in imports:
        if one.module.partition(".")[0] != "sglang" or one.is_tried:
            continue
        where = f"{one.file}:{one.line}: {one.module}"
        file = module_file(root, one.module)
        if file is None:
            missing.append(f"{where}: no such module")
        elif one.name is not None and file.suffix == ".py":
            if file not in known:
                known[file] = names_defined(ast.parse(file.read_text()))
            is_module = module_file(root, f"{one.module}.{one.name}") is not None
            if not known[file] & {one.name, "*"} and not is_module:
                missing.append(f"{where}: no {one.name}")
    return missing


def sglang_folder() -> Path:
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).parent


@pytest.mark.slow
def test_all_that_is_imported_is_locked() -> None:
    packages = locked()
    unlocked = {}
    for one in product_imports():
        module = one.module.partition(".")[0]
        own = module.startswith(("sglang_ext", "demo")) or module in sys.stdlib_module_names
        if not own and module not in IN_THEIR_OWN_FOLDERS and distribution_of(module) not in packages:
            unlocked[module] = f"{one.file}:{one.line}"
    assert not unlocked


@pytest.mark.slow
def test_all_that_is_imported_from_sglang_is_there() -> None:
    imports = product_imports()
    assert sum(one.module.startswith("sglang.") for one in imports) > 50
    assert not missing_from_sglang(sglang_folder(), imports)


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_all_that_is_imported_from_another_sglang_is_there(version: str) -> None:
    folder = OTHER_VERSIONS[version]
    if folder is None:
        pytest.skip(f"no sources of SGLang {version}")
    assert not missing_from_sglang(Path(folder), product_imports())


def test_what_is_not_there_is_noticed(tmp_path: Path) -> None:
    package = tmp_path / "sglang/srt"
    package.mkdir(parents=True)
    for folder in (tmp_path / "sglang", package):
        (folder / "__init__.py").write_text("")
    (package / "a.py").write_text(
        "try:\n    from b import c\nexcept ImportError:\n    c = None\nif c:\n    D: int = 1\n"
    )
    source = (
        "from sglang.srt.a import c, D, e\nfrom sglang.srt import a, z\nimport sglang.srt.y\n"
        "def f():\n    from sglang.srt.gone import g\n"
        "try:\n    from sglang.srt.a import h\nexcept ImportError:\n    from sglang.srt.a import i\n"
    )
    assert missing_from_sglang(tmp_path, list(imports_of(source, "f.py"))) == [
        "f.py:1: sglang.srt.a: no e",
        "f.py:2: sglang.srt: no z",
        "f.py:3: sglang.srt.y: no such module",
        "f.py:5: sglang.srt.gone: no such module",
    ]


def test_the_lock_is_within_the_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    wanted += [text for name in ("cuda", "dev", "batch", "bench") for text in extras[name]]
    packages = locked()
    outside = []
    for requirement in map(Requirement, wanted):
        version = packages.get(canonicalize_name(requirement.name), None)
        is_own = canonicalize_name(requirement.name) == "sglang-ext"
        if not is_own and (version is None or not requirement.specifier.contains(version, prereleases=True)):
            outside.append(f"{requirement}: {version}")
    assert not outside


def test_both_environments_test_with_the_same_tools() -> None:
    lines = (line.partition("==") for line in (ROOT / "requirements/cpu.lock").read_text().splitlines() if "==" in line)
    of_cpu = {canonicalize_name(name): version for name, _, version in lines}
    of_cuda = locked()
    assert not set(of_cpu) - set(of_cuda)
    tools = {"sglang", "pytest", "mypy", "ruff", "hypothesis", "import-linter", "nanobind", "hatchling", "transformers"}
    assert {name: of_cuda[name] for name in tools} == {name: of_cpu[name] for name in tools}


@pytest.mark.full
def test_pip_finds_that_the_locked_packages_go_together_and_need_no_others() -> None:
    """Downloads what tells its needs only inside a wheel; the registry has to be there."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "-r", str(LOCK)]
    done = subprocess.run([*command, "--report", "-"], capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [one["metadata"] for one in json.loads(done.stdout)["install"]]
    assert {canonicalize_name(one["name"]): one["version"] for one in found} == locked()

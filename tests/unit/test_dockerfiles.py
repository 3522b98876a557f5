"""The Dockerfiles: what they copy is there and makes a wheel, with which a router runs without torch and engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))
# A path that a wheel is made of: what Docker does not send is not there to be copied.
SENT = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
# Runs with the wheel (first argument) in front of all else, and without the modules that are named after it.
ROUTER_RUN = """
import sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    sys.modules[name] = None
import sglang_ext_router.main, sglang_ext_router.router
import sglang_ext_router.instances.discovery, sglang_ext_router.group.peers
for module in ("sglang_ext", "sglang_ext_router"):
    assert sys.modules[module].__file__.startswith(sys.argv[1]), sys.modules[module].__file__
from sglang_ext.cli import main
main(["router", "--help"])
"""


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, the rest) of each line, continuation lines joined."""
    text = re.sub(r"\\\n", " ", path.read_text())
    lines = [line.strip() for line in text.splitlines()]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]


def copied(path: Path) -> list[tuple[str, str]]:
    """(source, destination) of what comes from the repository."""
    found = []
    for name, rest in instructions(path):
        if name == "COPY" and not rest.startswith("--from"):
            *sources, destination = rest.split()
            found += [(source, destination) for source in sources]
    return found


def runtime_closure() -> set[str]:
    """Distributions that the package needs, and those that these need."""
    pending, found = ["sglang-ext"], set()
    while pending:
        name = canonicalize_name(pending.pop())
        if name in found:
            continue
        found.add(name)
        for text in requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of what router.Dockerfile copies, and of nothing else; as plain Python."""
    source = tmp_path_factory.mktemp("source")
    for name, destination in copied(ROOT / "deploy/docker/router.Dockerfile"):
        target = source / destination
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / Path(name).name)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(source / "dist")],
        cwd=source,
        env={"PATH": "/usr/bin:/bin", "SGLANG_EXT_PURE_PYTHON": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_there_are_two() -> None:
    assert [path.name for path in FILES] == ["router.Dockerfile", "worker.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_image_is_pinned_and_does_not_run_as_root(path: Path) -> None:
    parsed = instructions(path)
    (argument,) = [rest for name, rest in parsed if name == "ARG"]
    assert "=" not in argument, "a default would be built without a digest"
    bases = [rest.partition(" ")[0] for name, rest in parsed if name == "FROM"]
    assert set(bases) == {f"${{{argument}}}"}
    last = max(i for i, (name, _) in enumerate(parsed) if name == "FROM")
    users = [rest for name, rest in parsed[last:] if name == "USER"]
    assert users == ["65532:65532"]
    after = [name for name, _ in parsed[last:]]
    assert not {"RUN", "COPY"} & set(after[after.index("USER") :])
    assert ("CMD", f'["sglang-ext", "{path.stem}", "--help"]') in parsed


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_copied_is_there_and_is_sent(path: Path) -> None:
    for source, _ in copied(path):
        assert (ROOT / source).exists(), source
        assert source in SENT, f".dockerignore leaves {source} out"


@pytest.mark.slow
def test_the_wheel_has_all_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {
        "python/sglang_ext": "sglang_ext",
        "router/sglang_ext_router": "sglang_ext_router",
        "kernels/sglang_ext_kernels": "sglang_ext_kernels",
        "cuda_graphs/sglang_ext_cuda_graphs": "sglang_ext_cuda_graphs",
    }
    tracked = subprocess.run(["git", "ls-files", *packages], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = set()
    for line in tracked.stdout.splitlines():
        folder = next(one for one in packages if line.startswith(one + "/"))
        if (ROOT / line).exists():
            wanted.add(packages[folder] + line.removeprefix(folder))
    assert wanted - set(names) == set()
    assert any(name.endswith("entry_points.txt") for name in names)


@pytest.mark.slow
def test_a_router_runs_from_the_wheel_with_what_it_asks_for(wheel: Path, tmp_path: Path) -> None:
    """Of all that is installed here only what the package names as needed, and what that needs, can be imported."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    needed = runtime_closure()
    absent = [
        module
        for module, owners in packages_distributions().items()
        if module.isidentifier() and not needed & {canonicalize_name(owner) for owner in owners}
    ]
    assert {"torch", "sglang", "transformers", "numpy"} <= set(absent)
    command = [sys.executable, "-c", ROUTER_RUN, str(tmp_path), *absent]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--service-discovery" in done.stdout

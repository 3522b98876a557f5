"""`make dist`: wheel, source distribution and chart of one version; what an empty environment can do with the wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sglang_ext import __version__
from support.chart import CHART, PACKAGES, needs_helm
from support.engines import free_port

ROOT = Path(__file__).parents[2]
COMPARE_CHARTS = """
import sys
sys.path.insert(0, sys.argv[1])
from helm_python import Chart
packed, unpacked = (Chart.load(path).render({}, name="a", namespace="b") for path in sys.argv[2:])
assert packed == unpacked and packed
"""
INSTALL_WITHIN_S = 900  # compiling takes three minutes of a core
START_WITHIN_S = 60


def run(*command: str | Path, timeout_s: float = INSTALL_WITHIN_S) -> str:
    """Run a command outside of the checkout, without this environment's paths; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd="/", env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel that the pip of an empty environment makes of it."""
    folder, empty = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("empty")
    venv.create(empty, with_pip=True)
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=INSTALL_WITHIN_S,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (source,) = folder.glob("*.tar.gz")
    run(empty / "bin/pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source)
    return folder


def wheel_of(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


@contextmanager
def serving(program: Path, *words: str) -> Iterator[None]:
    """Run `sglang-ext` until the block ends."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen([program, *words], cwd="/", env=environment, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.full
@pytest.mark.timeout(2 * INSTALL_WITHIN_S)
def test_the_wheel_is_compiled_and_the_source_makes_one(dist: Path) -> None:
    wheel = wheel_of(dist)
    assert wheel.name.startswith(f"sglang_ext-{__version__}-cp")
    names = zipfile.ZipFile(wheel).namelist()
    assert sum(name.endswith(".so") for name in names) > 10
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md"} <= files
    assert {"requirements/cpu.lock", "tools/compile_hot_path.py", "router/sglang_ext_router/main.py"} <= files


@pytest.mark.full
@pytest.mark.timeout(2 * INSTALL_WITHIN_S)
def test_an_empty_environment_routes_a_request_without_torch(dist: Path, tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=True)
    run(tmp_path / "bin/pip", "install", "--quiet", wheel_of(dist))
    installed = run(tmp_path / "bin/pip", "list", "--format", "freeze")
    assert f"sglang-ext=={__version__}" in installed
    assert not re.search("^(torch|sglang|transformers|numpy)==", installed, re.MULTILINE)
    program = tmp_path / "bin/sglang-ext"
    assert "--service-discovery" in run(program, "router", "--help")
    unfit = subprocess.run([program, "doctor"], cwd="/", env={}, capture_output=True, text=True, timeout=60)
    assert unfit.returncode == 1
    assert "FAIL  sglang                         not installed" in unfit.stdout
    assert "install the wheel with [c" in unfit.stdout
    short, decode, port = free_port(), free_port(), free_port()
    with ExitStack() as stack:
        stack.enter_context(serving(program, "mock-engine", "--role", "short", "--port", str(short)))
        stack.enter_context(serving(program, "mock-engine", "--role", "decode", "--port", str(decode)))
        pair = ("--prefill-short", f"http://127.0.0.1:{short}", "--decode", f"http://127.0.0.1:{decode}")
        stack.enter_context(serving(program, "router", "--port", str(port), *pair))
        wait = ("--retry", str(START_WITHIN_S), "--retry-connrefused", "--retry-delay", "1", "--retry-all-errors")
        run("curl", "-sf", *wait, f"http://127.0.0.1:{port}/readyz")
        reply = run("curl", "-sf", f"http://127.0.0.1:{port}/v1/completions", "-d", '{"model": "mock", "prompt": "hi"}')
        assert "mock" in reply


@pytest.mark.full
@pytest.mark.timeout(2 * INSTALL_WITHIN_S)
def test_an_engine_on_a_cpu_is_fit_with_the_extra(dist: Path, tmp_path: Path) -> None:
    """The ranges of [cpu] resolve, and have all that SGLang imports when it is installed by itself."""
    venv.create(tmp_path, with_pip=True)
    run(tmp_path / "bin/pip", "install", "--quiet", f"{wheel_of(dist)}[cpu]")
    run(tmp_path / "bin/pip", "install", "--quiet", "--no-deps", "sglang==0.5.23")
    assert "This machine can serve." in run(tmp_path / "bin/sglang-ext", "doctor", "--device", "cpu", timeout_s=200)


@pytest.mark.slow
@needs_helm
def test_the_packed_chart_is_one_to_helm(tmp_path: Path) -> None:
    subprocess.run(["make", "chart", f"DIST={tmp_path}"], cwd=ROOT, check=True, timeout=60)
    (packed,) = tmp_path.iterdir()
    assert packed.name == f"sglang-ext-{__version__}.tgz"
    compared = [sys.executable, "-c", COMPARE_CHARTS, str(PACKAGES), str(packed), str(CHART)]
    done = subprocess.run(compared, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_extra_for_cpus_agrees_with_the_lock() -> None:
    lines = (line for line in (ROOT / "requirements/cpu.lock").read_text().splitlines() if "==" in line)
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    locked = {canonicalize_name(name): version for name, version in locked.items()} | {"torch": "2.13.0"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["optional-dependencies"]["cpu"]]
    wrong = [str(one) for one in wanted if not one.specifier.contains(locked.get(canonicalize_name(one.name), ""))]
    assert wrong == []


def test_versions_agree() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE)[1] == __version__  # type: ignore[index]
    for path in [*(ROOT / "deploy").rglob("*.yaml"), ROOT / "docs/how-to/kubernetes.md"]:
        versions = re.findall(
            r"sglang-ext(?:-(?:router|worker|ray))?:(\d+\.\d+\.\d+)", path.read_text(encoding="utf-8")
        )
        assert set(versions) <= {__version__}, path

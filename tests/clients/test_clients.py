"""Client libraries, unmodified, against the router over real SGLang.

Each script asserts on what its library returns.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.types import Role
from support.client_environments import CLIENTS, has_node, node_modules_of_clients, python_of_clients
from support.engines import FLEET, Engine, EngineSpec
from support.router_cli import RunningRouter, running_router

pytestmark = [pytest.mark.integration, pytest.mark.full]

MODEL = "tiny"
SCRIPT_TIMEOUT_S = 200
# The tests' model writes white space for as long as a schema allows it.
ENGINE_ARGUMENTS = (
    *("--served-model-name", MODEL),
    "--enable-cache-report",
    "--constrained-json-disable-any-whitespace",
    *("--tool-call-parser", "pythonic"),
    *("--reasoning-parser", "deepseek-v3"),  # which reads thought only where a request asks for it
)
# What every script has; some have more.
STEPS = {"answer", "stream", "usage", "context_overflow", "bad_field", "models", "abort"}
NEEDS_NODE = pytest.mark.skipif(not has_node(), reason="node and npm are not there: apt-get install nodejs npm")


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return FLEET.get(
        *(EngineSpec(role, arguments=ENGINE_ARGUMENTS, name="clients") for role in (Role.BOTH, Role.DECODE))
    )


@pytest.fixture(scope="module")
def router(engines: list[Engine]) -> Iterator[RunningRouter]:
    with running_router(engines, strict_models=True) as running:
        yield running


def test_every_script_is_run() -> None:
    scripts = {path.name for path in CLIENTS.iterdir() if path.stem.endswith("_client")}
    assert scripts == {*PYTHON_SCRIPTS, *NODE_SCRIPTS}


PYTHON_SCRIPTS = [
    "anthropic_client.py",
    "instructor_client.py",
    "langchain_client.py",
    "litellm_client.py",
    "llama_index_client.py",
    "openai_client.py",
    "pydantic_ai_client.py",
]
NODE_SCRIPTS = ["ai_sdk_client.mjs", "anthropic_client.mjs", "openai_client.mjs"]


@pytest.mark.parametrize("script", PYTHON_SCRIPTS)
def test_a_library_for_python(router: RunningRouter, engines: list[Engine], tmp_path: Path, script: str) -> None:
    run_script([str(python_of_clients()), str(CLIENTS / script)], router, engines, tmp_path)


@NEEDS_NODE
@pytest.mark.parametrize("script", NODE_SCRIPTS)
def test_a_library_for_javascript(router: RunningRouter, engines: list[Engine], tmp_path: Path, script: str) -> None:
    # A module finds others beside itself and nowhere else.
    (tmp_path / "node_modules").symlink_to(node_modules_of_clients())
    for name in (script, "steps.mjs"):
        shutil.copy(CLIENTS / name, tmp_path)
    run_script(["node", str(tmp_path / script)], router, engines, tmp_path)


def run_script(command: list[str], router: RunningRouter, engines: list[Engine], home: Path) -> None:
    """Run a client's script and check that each of its steps passed, and that nothing is left behind."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        # No library asks the Internet for anything.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "ANONYMIZED_TELEMETRY": "false",
    }
    done = subprocess.run(
        [*command, router.url, MODEL],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
        check=False,
    )
    output = done.stdout[-2000:] + done.stderr[-6000:]
    assert done.returncode == 0, output
    results = json.loads(done.stdout.splitlines()[-1])
    assert results.keys() >= STEPS
    failures = [f"{step}: {trace}" for step, trace in results.items() if trace is not None]
    assert not failures, "\n".join(failures)
    for engine in engines:
        engine.wait_idle()
    assert router.is_idle()

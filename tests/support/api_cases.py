"""schemathesis over a router's own OpenAPI document, in a process of its own.

What would only take long is made short by `support.schemathesis_hooks`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.router_cli import ADMIN_KEY, RunningRouter
from support.schemathesis_hooks import MODEL

TESTS = Path(__file__).resolve().parent.parent
MEMBERSHIP = "^/(workers|pools|flush_cache)"  # paths that change what the router serves with


def check_api(router: RunningRouter, folder: Path, seed: int, *options: str) -> str:
    """Run schemathesis with all of its checks and return its report; AssertionError with it if there is a finding."""
    reply = router.admin("GET", "/openapi.json")
    document = folder / "openapi.json"
    document.write_text(json.dumps(_narrowed(reply.body)))
    # Words of the sources would be names of further fields, which are the instances' business.
    (folder / "schemathesis.toml").write_text("[analysis.constants]\nenabled = false\n")
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(document), "--url", router.url]
    command += [
        "--seed",
        str(seed),
        "--workers",
        "1",
        "--no-color",
        "--generation-database",
        "none",
    ]
    # `"1"` for a number and `yes` for true are taken, as SGLang takes them; a test compares every field with SGLang.
    command += ["--exclude-checks", "negative_data_rejection"]
    command += ["--header", f"Authorization: Bearer {ADMIN_KEY}", "--request-timeout", "30", *options]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "SCHEMATHESIS_HOOKS": "support.schemathesis_hooks"}
    environment[MODEL] = router.admin("GET", "/v1/models").body["data"][0]["id"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=900, check=False)
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-4000:]
    return ran.stdout


def _narrowed(value: Any, name: str = "") -> Any:
    if isinstance(value, list):
        return [_narrowed(item) for item in value]
    if not isinstance(value, dict):
        return value
    narrowed = {key: _narrowed(item, key) for key, item in value.items()}
    if name == "sampling_params":
        narrowed["additionalProperties"] = False  # further names are SGLang's
    return narrowed

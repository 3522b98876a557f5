"""schemathesis over a router's own OpenAPI document, in a process of its own.

What would only take long, thousands of new tokens and many samples, is made short. `shorten` is a hook of schemathesis,
which finds this module by the name in SCHEMATHESIS_HOOKS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import schemathesis

from sglang_ext_router.request_fields import MAX_INT32
from sglang_ext_router.scores import MAX_TOP_LOGPROBS
from support.router_cli import ADMIN_KEY, RunningRouter

TESTS = Path(__file__).resolve().parent.parent
LENGTHS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/generate": "max_new_tokens",
}
MODEL = "SGLANG_EXT_TEST_MODEL"  # what a request that names one asks for
MOST_TOKENS = 4  # of /v1/responses two fewer
MOST_PROMPTS = 8
MOST = {"max_completion_tokens": MOST_TOKENS, "n": 2, "logprobs": 2}
DOCUMENTED = {"logprobs": MAX_TOP_LOGPROBS}  # what is beyond the document's own limit stays
MEMBERSHIP = "^/(workers|pools|flush_cache)"  # paths that change what the router serves with


def check_api(router: RunningRouter, folder: Path, seed: int, *options: str) -> str:
    """Run schemathesis with all of its checks and return its report; AssertionError with it if there is a finding."""
    reply, _ = router.call("GET", "/openapi.json")
    document = folder / "openapi.json"
    document.write_text(json.dumps(_narrowed(reply.body)))
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
    command += ["--header", f"Authorization: Bearer {ADMIN_KEY}", "--request-timeout", "30", *options]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "SCHEMATHESIS_HOOKS": "support.api_cases"}
    environment[MODEL] = router.call("GET", "/v1/models")[0].body["data"][0]["id"]
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


@schemathesis.hook("before_call")
def shorten(context: schemathesis.HookContext, case: schemathesis.Case, **_: Any) -> None:
    """Ask for few tokens and samples where the case allows many, and write whole numbers as such."""
    body = case.body = _whole(case.body)
    path = case.operation.path
    if not isinstance(body, dict) or path not in LENGTHS:
        return
    if isinstance(body.get("model"), str):
        body["model"] = os.environ[MODEL]
    for name in ("prompt", "text", "input_ids"):
        if isinstance(body.get(name), list):
            body[name] = [_of_vocabulary(item) for item in body[name][:MOST_PROMPTS]]
    asked = body
    if path == "/generate":
        asked = body.setdefault("sampling_params", {})
        if not isinstance(asked, dict):
            return  # 128 tokens
    asked.setdefault(LENGTHS[path], MOST_TOKENS)
    for name, most in {**dict.fromkeys(LENGTHS.values(), MOST_TOKENS), **MOST}.items():
        value = asked.get(name)
        if type(value) is int and most < value <= DOCUMENTED.get(name, MAX_INT32):
            asked[name] = most


def _of_vocabulary(value: Any) -> Any:
    """Token ids that the tests' model has and that stand for text; other ids are one test's own."""
    if isinstance(value, list):
        return [_of_vocabulary(item) for item in value]
    return 100 + value % 1000 if type(value) is int and value >= 0 else value


def _whole(value: Any) -> Any:
    """JSON whose integers have no point: 3.0 is an integer by JSON Schema, and no token id."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value

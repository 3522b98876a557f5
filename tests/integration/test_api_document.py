"""The router keeps what its OpenAPI document says, whatever is sent: schemathesis over a live cluster.

No answer is a 5xx, none is undocumented, what the document forbids is refused and what it allows is not; and no request
ends an instance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_ext.types import Role
from support.api_cases import MEMBERSHIP, check_api
from support.engines import FLEET, Engine, EngineSpec
from support.router_cli import RunningRouter, running_router
from support.tenants import tenants_file

pytestmark = pytest.mark.integration


def check_served(router: RunningRouter, engines: list[Engine], folder: Path, seed: int, *options: str) -> None:
    # SGLang itself answers 500 for a parser that it does not know.
    left_out = f"{MEMBERSHIP}|^/(parse_function_call|separate_reasoning)$"
    check_api(router, folder, seed, "--exclude-path-regex", left_out, *options)
    for engine in engines:
        assert engine.is_alive
        engine.wait_idle()
    assert router.is_idle()


def check_membership(engines: list[Engine], folder: Path, seed: int, *options: str) -> None:
    """What changes the members, on a router of its own: an instance that does not exist is no error of the router's."""
    with running_router(engines) as router:
        check_api(router, folder, seed, "--include-path-regex", MEMBERSHIP, "--exclude-path", "/flush_cache", *options)


@pytest.mark.full
def test_every_answer_is_documented(router: RunningRouter, engines: list[Engine], tmp_path: Path) -> None:
    check_served(router, engines, tmp_path, 1, "-n", "5", "--phases", "fuzzing")
    check_membership(engines, tmp_path, 1, "-n", "5", "--phases", "fuzzing")


@pytest.mark.full
@pytest.mark.parametrize("seed", [2, 3])
def test_many_answers_are_documented(router: RunningRouter, engines: list[Engine], tmp_path: Path, seed: int) -> None:
    check_served(router, engines, tmp_path, seed, "-n", "40")
    check_membership(engines, tmp_path, seed, "-n", "40")


def test_every_path_is_in_the_document(router: RunningRouter) -> None:
    reply, _ = router.call("GET", "/openapi.json")
    paths = reply.body["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate", "/v1/models", "/v1/tokenize"):
        assert path in paths
    assert set(paths["/workers"]) == {"get", "post"}
    assert {path for path, methods in paths.items() if "put" in methods} == {"/generate", "/v1/rerank"}
    for methods in paths.values():
        for operation in methods.values():
            assert "422" not in operation["responses"]


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [5, 1 << 20]},
        {"input_ids": [5, -1]},
        {"input_ids": [[]]},
        {"text": [""]},
        {"text": "x", "sampling_params": {"top_k": 1 << 31}},
        {"text": "x", "sampling_params": {"stop_token_ids": [1 << 20], "min_new_tokens": 2}},
        {"text": "x", "sampling_params": {"n": None}},
        {"text": "x", "sampling_params": {"repetition_penalty": 1e-40, "max_new_tokens": 20}},
        {"text": "x", "sampling_params": {"logit_bias": {"5": 1e308}}},
        {"text": "x", "stream": 1},
        {"text": "x", "return_logprob": True, "logprob_start_len": -2},
        {"text": "x", "return_logprob": True, "top_logprobs_num": 5000},
        {"text": "x", "custom_labels": {"team": "a"}},
        {"text": "x", "lora_id": ["a"]},
        {"text": "x", "positional_embed_overrides": 0},
        {"text": "x", "return_hidden_states": []},
        {"text": "x", "return_logprob": True, "top_logprobs_num": [1]},
    ],
    ids=str,
)
def test_what_ends_a_stock_instance_is_refused(
    router: RunningRouter, engines: list[Engine], body: dict[str, Any]
) -> None:
    assert router.post("/generate", body).status == 400
    good = {"text": "def parse(", "sampling_params": {"max_new_tokens": 2}}
    assert router.post("/generate", good).status == 200
    assert all(engine.is_alive for engine in engines)


UNDIVIDED = "^/v1/(embeddings|classify|rerank)$"


@pytest.mark.full
@pytest.mark.parametrize("examples", [5, 60])
def test_answers_of_an_instance_that_embeds_are_documented(tmp_path: Path, examples: int) -> None:
    """Every body that the document allows is answered: an instance that embeds takes them all."""
    arguments = ("--is-embedding", "--served-model-name", "m")
    (engine,) = FLEET.get(EngineSpec(Role.PLAIN, arguments=arguments, name="conformance"))
    with running_router([engine]) as router:
        check_api(router, tmp_path, 4, "--include-path-regex", UNDIVIDED, "-n", str(examples))
        assert router.is_idle()
    assert engine.is_alive
    engine.wait_idle()


OF_TENANTS = "^/v1/(usage|score|responses|messages|messages/count_tokens)$"


@pytest.mark.parametrize(("examples", "most_s"), [(5, 20), pytest.param(60, 300, marks=pytest.mark.full)])
def test_answers_of_an_undivided_instance_to_tenants_are_documented(tmp_path: Path, examples: int, most_s: int) -> None:
    """Usage is shown only where there are tenants, and scores are an undivided instance's."""
    (engine,) = FLEET.get(EngineSpec(Role.PLAIN))
    with running_router([engine], "--tenants-file", str(tenants_file(tmp_path, a={"weight": 2}))) as router:
        bounds = ("-n", str(examples), "--max-time", str(most_s))
        report = check_api(router, tmp_path, 5, "--include-path-regex", OF_TENANTS, *bounds)
        assert "Selected: 5" in report, report
    assert engine.is_alive
    engine.wait_idle()

"""Several models behind one router: which instances a name leads to, and which instances are let in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, RouterConfigError, WorkerAddress
from sglang_ext_router.decide.instance_pressure import DecisionReason
from sglang_ext_router.decide.pool_move import MoveOutcome
from sglang_ext_router.instances import probe
from sglang_ext_router.instances.registry import WorkerRegistry
from sglang_ext_router.instances.workers import PRIOR_TOKENS_PER_S
from sglang_ext_router.request.prompt import measure
from support.event_loops import Complaints
from support.laps_engine import CONTROLLED, LapsEngine, laps
from support.raw_client import Reply
from support.router_process import FAST, RunningRouter, cluster, running_router
from support.scripted_engine import MODEL, ScriptedEngine, reply

SHORT, LONG, DECODE = Role.SHORT, Role.LONG, Role.DECODE
POOLS = (SHORT, LONG, DECODE)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
GENERATION = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/generate": {"text": "hi"},
}
ADMIN = {"Authorization": "Bearer admin"}


class Models(RunningRouter):
    """A router over engines of several models."""

    def __init__(self, running: RunningRouter, engines: dict[str, dict[Role, ScriptedEngine]]) -> None:
        super().__init__(running.router, running.server, running.port)
        self.clients = running.clients
        self.engines = engines

    def requests_of(self, model: str) -> int:
        """Generation requests that its engines have got."""
        return sum(len(engine.requests) for engine in self.engines[model].values())


def engine_of(model: str, role: Role, **facts: Any) -> ScriptedEngine:
    engine = ScriptedEngine(role, reply({"text": f"by {model} {role}", "usage": {"prompt_tokens": 7}}))
    assert isinstance(engine.info, dict)
    engine.info = {**engine.info, "served_model_name": model, "page_size": 1, **facts}
    return engine


def address_of(engine: ScriptedEngine) -> WorkerAddress:
    return WorkerAddress(engine.url, engine.role)


@asynccontextmanager
async def serving(*models: str, roles: tuple[Role, ...] = POOLS, **options: Any) -> AsyncIterator[Models]:
    engines = {model: {role: engine_of(model, role) for role in roles} for model in models}
    all_engines = [engine for group in engines.values() for engine in group.values()]
    for engine in all_engines:
        await engine.start()
    try:
        config = replace(FAST, workers=tuple(address_of(engine) for engine in all_engines), **options)
        async with running_router(config) as running:
            served = Models(running, engines)
            await served.until_ready()
            yield served
            await served.until_idle()
    finally:
        for engine in all_engines:
            await engine.stop()


def assert_unknown(answer: Reply, name: str) -> None:
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"
    assert (answer.error["type"], answer.error["param"]) == ("invalid_request_error", "model")
    assert name in answer.error["message"]


# -- which instances a name leads to ------------------------------------------------------------------------


@pytest.mark.parametrize("path", GENERATION)
async def test_a_request_is_served_by_instances_of_its_model_alone(path: str) -> None:
    async with serving("llama", "org/qwen") as served:
        for model, other in (("llama", "org/qwen"), ("org/qwen", "llama")):
            for prompt in ("hi", "word " * 3000):
                body = json.loads(json.dumps({**GENERATION[path], "model": model}).replace("hi", prompt))
                before = served.requests_of(other)
                answer = await served.ask("POST", path, body)
                assert (answer.status, answer.json["text"]) == (200, f"by {model} decode")
                assert served.requests_of(other) == before
            engines = served.engines[model]
            assert [len(engines[role].requests) for role in POOLS] == [1, 1, 2]
            assert engines[DECODE].requests[0].json["model"] == model


@pytest.mark.slow
@pytest.mark.parametrize("path", [*GENERATION, "/v1/responses"])
@pytest.mark.parametrize("models", [("llama",), ("llama", "qwen")])
async def test_an_unknown_model_gets_404(path: str, models: tuple[str, ...]) -> None:
    async with serving(*models) as served:
        for name in ("mistral", "Llama", "llam", "llama2:x", "x" * 5000):
            answer = await served.ask("POST", path, {**GENERATION.get(path, {"input": "hi"}), "model": name})
            assert_unknown(answer, name[:100])
            assert "llama" in answer.error["message"]
            assert len(answer.body) < 500
        assert served.requests_of("llama") == 0
        refused = served.router.metrics.refused
        assert refused == {"model_not_found": 5}


@pytest.mark.slow
@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": ""}])
async def test_a_request_without_a_model(path: str, fields: dict[str, Any]) -> None:
    body = {**GENERATION[path], **fields}
    async with serving("llama") as served:
        assert (await served.ask("POST", path, body)).status == 200
    async with serving("llama", "qwen") as served:
        answer = await served.ask("POST", path, body)
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert "llama, qwen" in answer.error["message"]


@pytest.mark.parametrize("model", [5, ["llama"], {"a": 1}, True])
async def test_a_model_that_is_no_name(model: object) -> None:
    async with serving("llama") as served:
        answer = await served.ask("POST", "/v1/completions", {"prompt": "x", "model": model})
        assert (answer.status, answer.error["param"]) == (400, "model")


async def test_adapters_and_aliases() -> None:
    async with serving("llama", "qwen", model_alias=("gpt-4=qwen", "llama=qwen", "nothing=mistral")) as served:
        for name, model in (("llama:poems", "llama"), ("gpt-4", "qwen"), ("gpt-4:poems", "qwen"), ("llama", "llama")):
            answer = await served.ask("POST", "/v1/completions", {"prompt": "x", "model": name})
            assert (answer.status, answer.json["text"]) == (200, f"by {model} decode")
            assert served.engines[model][DECODE].requests[-1].json["model"] == name
        assert_unknown(await served.ask("POST", "/v1/completions", {"prompt": "x", "model": "nothing"}), "nothing")


async def test_scores_of_a_prompt_by_an_adapter() -> None:
    """`/generate`, which is asked for these, knows adapters as `lora_path` alone."""
    async with serving("llama") as served:
        body = {"prompt": [[5, 6]], "max_tokens": 1, "prompt_logprobs": 1}
        answer = await served.ask("POST", "/v1/completions", {**body, "model": "llama:poems"})
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert "lora_path" in answer.error["message"]
        assert served.requests_of("llama") == 0


@pytest.mark.slow
async def test_any_name_will_do_if_asked_for() -> None:
    async with serving("llama", accept_any_model=True) as served:
        assert (await served.ask("POST", "/v1/completions", {"prompt": "x", "model": "gpt-4"})).status == 200
    async with serving("llama", "qwen", accept_any_model=True) as served:
        assert_unknown(await served.ask("POST", "/v1/completions", {"prompt": "x", "model": "gpt-4"}), "gpt-4")


async def test_an_engine_that_tells_no_name_serves_any() -> None:
    async with serving("") as served:
        for fields in ({}, {"model": "x"}):
            assert (await served.ask("POST", "/generate", {"text": "hi", **fields})).status == 200
        assert (await served.ask("GET", "/v1/models")).json["data"] == []


async def test_the_list_of_models() -> None:
    async with serving("llama", "org/qwen", model_alias=("gpt-4=org/qwen", "nothing=mistral")) as served:
        listed = (await served.ask("GET", "/v1/models")).json["data"]
        assert {one["id"]: one["root"] for one in listed} == {
            "llama": "llama",
            "org/qwen": "org/qwen",
            "gpt-4": "org/qwen",
        }
        for one in listed:
            answer = await served.ask("GET", f"/v1/models/{one['id']}")
            assert (answer.status, answer.json) == (200, one)
            quoted = await served.ask("GET", f"/v1/models/{one['id'].replace('/', '%2F')}")
            assert (quoted.status, quoted.json) == (200, one)
        assert_unknown(await served.ask("GET", "/v1/models/mistral"), "mistral")


async def test_tokenising_and_model_info_are_asked_of_the_model() -> None:
    async with serving("llama", "qwen") as served:
        for model, other in (("llama", "qwen"), ("qwen", "llama")):
            assert (await served.ask("POST", "/v1/tokenize", {"prompt": "x", "model": model})).status == 200
            assert (await served.ask("GET", f"/model_info?model={model}")).status == 200
            asked = [[one.path for one in engine.control] for engine in served.engines[model].values()]
            assert sum("/v1/tokenize" in paths for paths in asked) == 1
            assert sum("/model_info" in paths for paths in asked) == 1
            for engine in served.engines[other].values():
                engine.control.clear()
        assert_unknown(await served.ask("POST", "/v1/tokenize", {"prompt": "x", "model": "z"}), "z")
        assert_unknown(await served.ask("GET", "/model_info?model=z"), "z")


# -- while instances come and go ----------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_model_whose_instances_are_out_is_not_unknown() -> None:
    async with serving("llama", "qwen", queue_timeout_secs=0.1) as served:
        engine = served.engines["qwen"][DECODE]
        await engine.stop()
        await served.until(lambda: not served.worker(engine.url).is_healthy)
        answer = await served.ask("POST", "/v1/completions", {"prompt": "x", "model": "qwen"})
        assert answer.status == 503
        assert (await served.ask("POST", "/v1/completions", {"prompt": "x", "model": "llama"})).status == 200
        assert (await served.ask("GET", "/readyz")).status == 200
        for one in served.engines["qwen"].values():
            served.router.remove_worker(served.worker(one.url))
        assert_unknown(await served.ask("POST", "/v1/completions", {"prompt": "x", "model": "qwen"}), "qwen")
        # Now there is one model.
        assert (await served.ask("POST", "/v1/completions", {"prompt": "x"})).status == 200


async def test_a_model_may_still_come_while_an_instance_has_not_answered() -> None:
    async with serving("llama", health_check_timeout_secs=5.0) as served:
        late = engine_of("qwen", DECODE)
        late.health_status = None
        await late.start()
        body = {"prompt": "x", "model": "qwen"}
        try:
            served.router.add_worker(address_of(late))
            assert (await served.ask("POST", "/v1/completions", body)).status == 503
            assert (await served.ask("GET", "/v1/models/qwen")).status == 503
            assert (await served.ask("POST", "/v1/completions", {"prompt": "x", "model": "llama"})).status == 200
        finally:
            await late.stop()
        worker = served.worker(late.url)
        await served.until(lambda: worker.is_checked)
        assert_unknown(await served.ask("POST", "/v1/completions", body), "qwen")
        assert late.requests == []


async def test_no_model_is_known_before_the_first_instance_answers() -> None:
    async with running_router(FAST) as running:
        for fields in ({}, {"model": "llama"}):
            assert (await running.ask("POST", "/v1/completions", {"prompt": "x", **fields})).status == 503
        answer = await running.ask("GET", "/readyz")
        assert (answer.status, "prefill, decode" in answer.error["message"]) == (503, True)


async def test_ready_needs_all_roles_of_one_model() -> None:
    async with serving("llama", roles=(SHORT,)) as served:
        decode = engine_of("qwen", DECODE)
        await decode.start()
        served.router.add_worker(address_of(decode))
        await served.until_ready(2)
        answer = await served.ask("GET", "/readyz")
        assert answer.status == 503
        assert "decode of llama" in answer.error["message"]
        assert "prefill of qwen" in answer.error["message"]
        for model in ("llama", "qwen"):
            assert (await served.ask("POST", "/v1/completions", {"prompt": "x", "model": model})).status == 503
        await decode.stop()
        assert decode.requests == []


async def test_a_queued_request_is_served_by_what_its_model_has_then() -> None:
    async with serving("llama", "qwen", max_concurrent_requests=1) as served:
        held = asyncio.Event()
        engine = served.engines["llama"][DECODE]

        async def wait(turn: Any) -> None:
            await held.wait()
            await reply()(turn)

        engine.plan(wait)
        ask = served.ask
        first = asyncio.create_task(ask("POST", "/v1/completions", {"prompt": "x", "model": "llama"}))
        await engine.received(1)
        waiting = asyncio.create_task(ask("POST", "/v1/completions", {"prompt": "x", "model": "qwen"}))
        await served.until(lambda: served.router.requests_queued == 1)
        for one in served.engines["qwen"].values():
            served.router.remove_worker(served.worker(one.url))
        held.set()
        assert (await first).status == 200
        assert (await waiting).status == 503
        assert served.requests_of("qwen") == 0


# -- which instances are let in -----------------------------------------------------------------------------

MISMATCHES = [
    ("KV cache dtype", {"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "fp8_e5m2"}, ("auto", "fp8_e5m2")),
    ("page size", {"page_size": 1}, {"page_size": 64}, ("1", "64")),
    (
        "transfer backend",
        {"disaggregation_transfer_backend": "mooncake"},
        {"disaggregation_transfer_backend": "nixl"},
        ("mooncake", "nixl"),
    ),
    (
        "KV cache element type",
        {"kv_cache_dtype": "auto", "dtype": "half"},
        {"kv_cache_dtype": "auto", "sglang_ext": {"kv_element_type": "bfloat16"}},
        ("float16", "bfloat16"),
    ),
    (
        "model architecture",
        {"sglang_ext": {"architecture": "LlamaForCausalLM of 2 layers"}},
        {"sglang_ext": {"architecture": "LlamaForCausalLM of 4 layers"}},
        ("2 layers", "4 layers"),
    ),
    (
        "--disaggregation-enable-kv-checksum",
        {"disaggregation_enable_kv_checksum": True},
        {"disaggregation_enable_kv_checksum": False},
        ("True", "False"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "own", "others", "values"), MISMATCHES, ids=[case[0] for case in MISMATCHES])
@pytest.mark.parametrize("role", [SHORT, DECODE])
async def test_an_instance_that_does_not_fit_is_refused(
    what: str,
    own: dict[str, Any],
    others: dict[str, Any],
    values: tuple[str, str],
    role: Role,
    complaints: Complaints,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill, decode = engine_of("llama", SHORT, **own), engine_of("llama", DECODE, **own)
    misfit = engine_of("llama", role, **others)
    engines = (prefill, decode, misfit)
    for engine in engines:
        await engine.start()
    first = (address_of(prefill), address_of(decode))
    config = replace(FAST, workers=first, admin_api_key="admin")
    try:
        async with running_router(config) as served:
            await served.until_ready()
            # With POST /workers it is told at once.
            body = {"url": misfit.url, "role": role.value}
            answer = await served.ask("POST", "/workers", body, ADMIN)
            assert answer.status == 409
            assert served.router.registry.find(misfit.url) is None
            # Given otherwise, or not up when it is added, its checks find out.
            served.router.add_worker(address_of(misfit))
            worker = served.worker(misfit.url)
            await served.until(lambda: worker.failed_checks >= 2)
            shown = (await served.ask("GET", f"/workers/127.0.0.1:{misfit.port}")).json
            assert (shown["state"], shown["last_error"]) == ("refused", worker.last_error)
            (logged,) = [text for text in caplog.messages if "is refused" in text]  # once, not at every check
            for message in (answer.error["message"], worker.last_error, logged):
                assert what in message
                assert all(value in message for value in values)
                assert misfit.url in message
                assert prefill.url in message or decode.url in message
            for _ in range(5):
                assert (await served.ask("POST", "/generate", {"text": "x"})).status == 200
            assert misfit.requests == []
            # What kept it out leaves.
            for engine in (prefill, decode):
                served.router.remove_worker(served.worker(engine.url))
            await served.until(lambda: worker.is_healthy)
    finally:
        for engine in engines:
            await engine.stop()
    assert complaints.messages == []


@pytest.mark.slow
async def test_of_two_that_do_not_fit_one_serves_whatever_the_order_of_their_answers() -> None:
    for first in (0, 1):
        engines = [engine_of("llama", SHORT, page_size=1), engine_of("llama", DECODE, page_size=64)]
        for engine in engines:
            await engine.start()
        engines[first].health_status = 503
        try:
            async with running_router(replace(FAST, workers=tuple(map(address_of, engines)))) as served:
                await served.until(lambda e=engines, f=first: served.worker(e[1 - f].url).is_healthy)  # type: ignore[misc]
                engines[first].health_status = 200
                refused = served.worker(engines[first].url)
                await served.until(lambda r=refused: r.is_refused)  # type: ignore[misc]
                assert (await served.ask("POST", "/generate", {"text": "x"})).status == 503
                assert [engine.requests for engine in engines] == [[], []]
        finally:
            for engine in engines:
                await engine.stop()


@pytest.mark.slow
async def test_an_instance_that_comes_back_different_is_refused() -> None:
    async with serving("llama") as served:
        engine = served.engines["llama"][DECODE]
        worker = served.worker(engine.url)
        await engine.stop()
        await served.until(lambda: not worker.is_healthy)
        assert isinstance(engine.info, dict)
        engine.info = {**engine.info, "page_size": 16}
        await engine.start()
        await served.until(lambda: worker.is_refused)
        # What it says now keeps none out that comes back as it was.
        short = served.engines["llama"][SHORT]
        await short.stop()
        await served.until(lambda: not served.worker(short.url).is_healthy)
        await short.start()
        await served.until(lambda: served.worker(short.url).is_healthy)
        assert worker.is_refused
        engine.info = {**engine.info, "page_size": 1}
        await served.until(lambda: worker.is_healthy)
        assert (await served.ask("POST", "/generate", {"text": "x"})).status == 200


@pytest.mark.slow
async def test_all_instances_of_a_model_come_back_different() -> None:
    """What one was counts no more once it says that it is another."""
    async with serving("llama", roles=(SHORT, DECODE)) as served:
        engines = served.engines["llama"]
        for engine in engines.values():
            await engine.stop()
        await served.until(lambda: not any(worker.is_healthy for worker in served.router.registry))
        first = served.worker(engines[SHORT].url)
        for engine in engines.values():
            assert isinstance(engine.info, dict)
            engine.info = {**engine.info, "page_size": 64}
            await engine.start()
            if engine.role is SHORT:
                await served.until(lambda: first.is_refused)
        await served.until_ready()
        assert (await served.ask("POST", "/generate", {"text": "x"})).status == 200


@pytest.mark.slow
async def test_a_misfit_does_not_take_over_while_the_others_are_out_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    misfit = engine_of("llama", DECODE, page_size=64)
    await misfit.start()
    try:
        async with serving("llama") as served:
            engines = served.engines["llama"].values()
            served.router.add_worker(address_of(misfit))
            worker = served.worker(misfit.url)
            await served.until(lambda: worker.is_refused)
            for engine in engines:
                await engine.stop()
            await served.until(lambda: not any(one.is_healthy for one in served.router.registry))
            checks = misfit.health_checks
            await served.until(lambda: misfit.health_checks >= checks + 2)
            assert worker.is_refused
            for engine in engines:
                await engine.start()
            await served.until_ready(3)
            assert worker.is_refused
            # Those that stay away count no more.
            monkeypatch.setattr(probe, "RETURN_S", 0.1)
            for engine in engines:
                await engine.stop()
            await served.until(lambda: worker.is_healthy)
    finally:
        await misfit.stop()
    assert misfit.requests == []


async def test_an_instance_of_the_wrong_mode_is_refused_when_it_is_added() -> None:
    async with cluster(admin_api_key="admin") as served:
        engine = await served.extra_engine(SHORT)
        answer = await served.ask("POST", "/workers", {"url": engine.url, "role": "decode"}, ADMIN)
        assert answer.status == 409
        assert "--disaggregation-mode prefill" in answer.error["message"]


@pytest.mark.slow
async def test_what_does_not_answer_yet_is_added() -> None:
    async with cluster(admin_api_key="admin") as served:
        engine = await served.extra_engine(DECODE)
        await engine.stop()
        answer = await served.ask("POST", "/workers", {"url": engine.url, "role": "decode"}, ADMIN)
        assert (answer.status, answer.json["model"]) == (202, None)
        await engine.start()
        await served.until(lambda: served.worker(engine.url).model == MODEL)


# -- pools --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def controlled_models(**options: Any) -> AsyncIterator[Models]:
    """Two models, each with two short instances that can be moved, a long one, and one for decode."""
    engines: dict[str, dict[Role, ScriptedEngine]] = {"llama": {}, "qwen": {}}
    all_engines: list[ScriptedEngine] = []
    for model, by_role in engines.items():
        for role in (SHORT, SHORT, LONG, DECODE):
            engine = engine_of(model, role) if role is DECODE else LapsEngine(role)
            assert isinstance(engine.info, dict)
            engine.info = {**engine.info, "served_model_name": model}
            await engine.start()
            by_role[role] = engine
            all_engines.append(engine)
    config = replace(CONTROLLED, workers=tuple(address_of(engine) for engine in all_engines), **options)
    try:
        async with running_router(config) as running:
            served = Models(running, engines)
            await served.until_ready()
            yield served
            await served.until_idle()
    finally:
        for engine in all_engines:
            await engine.stop()


async def test_an_instance_moves_between_the_pools_of_its_own_model_alone() -> None:
    async with controlled_models() as served:
        laps(served.engines["qwen"][LONG]).tell(backlog_s=60.0, utilisation=1.0)
        controller = served.router.controller
        await served.until(lambda: len(controller.moves) == 1)
        (move,) = controller.moves
        assert (move.outcome, move.model) == (MoveOutcome.MOVED, "qwen")
        shown = (await served.ask("GET", "/pools")).json
        async with asyncio.timeout(5):  # a round in which a report comes late decides nothing
            while shown["models"]["llama"]["decision"]["reason"] != "balanced":
                shown = (await served.ask("GET", "/pools")).json
        sizes = {
            model: [pools["pools"][role.value]["instances"] for role in POOLS]
            for model, pools in shown["models"].items()
        }
        assert sizes == {"llama": [2, 1, 1], "qwen": [1, 2, 1]}
        assert shown["models"]["llama"]["cooldown_left_s"] == 0.0
        assert shown["pools"]["short"]["instances"] == 3
        assert shown["controller"]["decision"] is None
        page = (await served.ask("GET", "/metrics")).body.decode()
        assert 'sglang_ext_router_pool_instances{model="qwen",pool="long"} 2.0' in page
        assert 'sglang_ext_router_pool_instances{model="llama",pool="long"} 1.0' in page


async def test_another_model_cannot_take_over_while_an_instance_moves() -> None:
    """The only short instance of its model goes on serving while it is moved, however many another model has."""
    async with controlled_models(controller="off", controller_drain_timeout_secs=5.0) as served:
        engine = laps(served.engines["qwen"][SHORT])
        for worker in served.router.registry:
            if worker.model == "qwen" and worker.role is SHORT and worker.url != engine.url:
                served.router.remove_worker(worker)
        engine.behaviour = "ignore"  # so that the move does not end soon
        answer = await served.ask("POST", "/pools/move", {"url": engine.url, "to": "long"}, ADMIN)
        assert answer.status == 202
        await served.until(lambda: bool(engine.switches))
        assert served.router.controller.current is not None
        assert served.worker(engine.url).is_ready


async def test_each_model_is_judged_by_its_own_instances() -> None:
    """What one model lacks the other cannot give, and one that reports nonsense does not stop the other."""
    async with controlled_models() as served:
        for role in (SHORT, LONG):
            laps(served.engines["llama"][role]).report = {"mode": "nonsense"}  # type: ignore[assignment]
        laps(served.engines["qwen"][LONG]).tell(backlog_s=60.0, utilisation=1.0)
        controller = served.router.controller
        await served.until(lambda: len(controller.moves) == 1)
        assert controller.moves[0].model == "qwen"
        decision = controller.control("llama").decision
        assert decision is not None
        assert decision.reason is DecisionReason.SIGNALS_MISSING


async def test_what_is_expected_of_an_instance_is_what_its_own_model_has_shown() -> None:
    async with serving("llama", "qwen") as served:
        registry = served.router.registry
        shown = served.worker(served.engines["qwen"][SHORT].url).rate
        for second in range(10):
            shown.observe(second * 100_000, second * 1_000_000, float(second))
        served.router.registry._shown_s = float("-inf")
        llama, qwen = (served.worker(served.engines[model][LONG].url) for model in ("llama", "qwen"))
        short = registry.add(WorkerAddress("http://127.0.0.1:1", SHORT))
        short.model = "llama"
        assert registry.expected_tokens_per_s(short, 0.0) == PRIOR_TOKENS_PER_S
        short.model = "qwen"
        assert registry.expected_tokens_per_s(short, 0.0) > 10 * PRIOR_TOKENS_PER_S
        assert registry.expected_tokens_per_s(llama, 0.0) == registry.expected_tokens_per_s(qwen, 0.0)
        registry.remove(short)


def test_a_model_that_is_gone_has_no_instances() -> None:
    registry = WorkerRegistry(RouterConfig(workers=(WorkerAddress("http://a:1", SHORT),)))
    (worker,) = registry
    worker.model, worker.is_healthy = "llama", True
    registry.refresh()
    pools = registry.find_model("llama")
    assert pools is not None
    assert pools.ready_prefill == (worker,)
    registry.remove(worker)
    assert (pools.ready_prefill, registry.find_model("llama"), registry.find_model(None)) == ((), None, None)


async def test_the_load_of_one_model() -> None:
    async with serving("llama", "qwen") as served:
        waits, now_s = served.router.services.online_waits, served.router.loop.time()
        waits.record(served.engines["qwen"][SHORT].url, 0.5, now_s)
        waiting = served.worker(served.engines["qwen"][SHORT].url)
        waiting.pending_tokens += 100_000
        try:
            told = {}
            for query in ("", "?model=llama", "?model=qwen"):
                answer = await served.ask("GET", f"/load{query}")
                assert answer.status == 200
                told[query] = answer.json["classes"]["short"]
        finally:
            waiting.pending_tokens -= 100_000
        assert [one["online_wait_s"] for one in told.values()] == [0.5, None, 0.5]
        assert [one["instances"] for one in told.values()] == [2, 1, 1]
        assert told["?model=llama"]["backlog_s"] == 0.0
        assert told[""]["backlog_s"] == told["?model=qwen"]["backlog_s"] > 1.0
        assert_unknown(await served.ask("GET", "/load?model=z"), "z")


async def test_the_queued_work_of_each_model_s_pools_is_shown() -> None:
    """What a scaler goes by; the routers of a group count what the others sent, too."""
    async with serving("llama", "qwen") as served:
        waiting = served.worker(served.engines["qwen"][SHORT].url)
        waiting.pending_tokens += 100_000
        waiting.sibling_tokens += 20_000
        try:
            page = (await served.ask("GET", "/metrics")).body.decode()
        finally:
            waiting.pending_tokens -= 100_000
            waiting.sibling_tokens -= 20_000
        start = "sglang_ext_router_pool_"
        assert start + 'pending_tokens{model="qwen",pool="short"} 120000.0' in page
        assert start + 'pending_tokens{model="llama",pool="short"} 0.0' in page
        rate = f"{waiting.rate.tokens_per_s}"
        assert start + f'prefill_tokens_per_second{{model="qwen",pool="short"}} {rate}' in page
        assert start + 'pending_tokens{model="qwen",pool="decode"}' not in page


async def test_bytes_per_token_are_learned_for_each_model() -> None:
    async with serving("llama", "qwen") as served:
        registry = served.router.registry
        for engine in (served.engines["qwen"][SHORT], served.engines["qwen"][LONG]):
            engine.script = reply({"text": "ok", "usage": {"prompt_tokens": 700}})
        for _ in range(20):
            body = {"prompt": "x" * 700, "model": "qwen"}
            assert (await served.ask("POST", "/v1/completions", body)).status == 200
        await served.until_idle()
        estimates = [registry.models[name].estimator.estimate(700) for name in ("llama", "qwen")]
        assert estimates[0] == 175
        assert estimates[1] > 500


async def test_what_one_model_has_cached_does_not_count_for_another() -> None:
    async with serving("llama", "qwen", length_boundary_tokens=512) as served:
        prompt = "".join(f"{i:07d} " for i in range(1000))
        for _ in range(2):
            for model in ("llama", "qwen"):
                answer = await served.ask("POST", "/v1/completions", {"prompt": prompt, "model": model})
                assert answer.status == 200
        # The first of each is long, the second a turn that the long instance has cached.
        assert [len(served.engines["qwen"][role].requests) for role in POOLS] == [0, 2, 2]
        planner, qwen = served.router.planner, served.router.registry.models["qwen"]
        measured = measure(b"/v1/completions", {"prompt": prompt})
        assert planner.route(qwen, measured, 2000, set(), set(), 0.0).decision.cached_tokens > 1900
        planner.prefixes.index.clear(served.worker(served.engines["qwen"][LONG].url).id)
        assert planner.route(qwen, measured, 2000, set(), set(), 0.0).decision.cached_tokens == 0


# -- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aliases", [("x",), ("a:b=m",), ("a=m", "a=n")])
def test_aliases_that_cannot_be_used(aliases: tuple[str, ...]) -> None:
    with pytest.raises(RouterConfigError, match="--model-alias: "):
        RouterConfig(model_alias=aliases)


async def test_an_instance_with_another_boundary_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    engines = [
        engine_of("llama", role, sglang_ext={"length_boundary_tokens": tokens})
        for role, tokens in ((SHORT, 256), (LONG, 256), (SHORT, 512), (DECODE, None))
    ]
    for engine in engines:
        await engine.start()
    try:
        config = replace(FAST, workers=tuple(map(address_of, engines)), length_boundary_tokens=512)
        async with running_router(config) as served:
            await served.until_ready()
    finally:
        for engine in engines:
            await engine.stop()
    (warning,) = [record for record in caplog.records if "new tokens as short" in record.getMessage()]
    assert warning.levelname == "WARNING"
    assert "256" in warning.getMessage()
    assert "512" in warning.getMessage()


def test_a_new_revision_serves_beside_the_old_one_and_pairs_with_itself() -> None:
    """It may differ in what those of one revision must agree in; `POST /workers` can say which revision one is of."""

    async def main() -> None:
        new = {role: engine_of("llama", role, page_size=16) for role in (SHORT, DECODE)}
        new[SHORT].info = {**new[SHORT].info, "sglang_ext": {"revision": "v2"}}  # type: ignore[dict-item]
        for engine in new.values():
            await engine.start()
        async with serving("llama", admin_api_key="admin") as served:
            refused = await served.ask("POST", "/workers", {"url": new[DECODE].url, "role": "decode"}, headers=ADMIN)
            assert refused.status == 409
            body = {"url": new[DECODE].url, "role": "decode", "revision": "v2", "topology": "zone-a"}
            assert (await served.ask("POST", "/workers", body, headers=ADMIN)).status == 202
            await served.ask("POST", "/workers", {"url": new[SHORT].url, "role": "short"}, headers=ADMIN)
            await served.until_ready(5)
            workers = {one["url"]: one for one in (await served.ask("GET", "/workers")).json["workers"]}
            assert [workers[new[role].url]["revision"] for role in (SHORT, DECODE)] == ["v2", "v2"]
            assert workers[new[DECODE].url]["topology"] == "zone-a"
            for number in range(24):
                answer = await served.ask("POST", "/generate", {"text": f"{number}"})
                pair = [answer.headers[f"x-sglang-ext-{kind}"] for kind in ("prefill", "decode")]
                assert (pair[0] == new[SHORT].url) == (pair[1] == new[DECODE].url)
            assert new[DECODE].requests
            for role in (SHORT, LONG):  # what is left of the old one has no prefill
                await served.ask("DELETE", f"/workers/{workers_name(served.engines['llama'][role])}", headers=ADMIN)
            assert (await served.ask("GET", "/readyz")).status == 200
            await served.ask("DELETE", f"/workers/{workers_name(new[DECODE])}", headers=ADMIN)
            answer = await served.ask("GET", "/readyz")
            assert answer.status == 503
            assert "prefill and decode of one revision" in answer.body.decode()
            await served.until_idle()
        for engine in new.values():
            await engine.stop()

    asyncio.run(main())


def workers_name(engine: ScriptedEngine) -> str:
    return engine.url.removeprefix("http://")

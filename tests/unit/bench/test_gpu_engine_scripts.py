"""The GPU benchmarks that need SGLang: their load, what they compare, how they judge, and what becomes of failures."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from gpu import buckets, serve, sglang_runner, two_engines
from gpu.buckets import Bucket, parse_reprefills
from gpu.measure import Report
from gpu.model_shapes import CONTEXT_TOKENS
from gpu.serve import SYSTEMS, WINDOWS, Answer, Server, System
from gpu.two_engines import TIE, Deviation, compare, deviation, summary
from sglang_ext.engine.options import ENVIRONMENT_VARIABLE, options_from_environment
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.transfer.sglang.transfer_backend import STAND_IN
from support.engines import EngineSpec


def report(tmp_path: Path) -> Report:
    return Report("test", tmp_path / "found.json", is_dry=False)


# --- buckets ---


def test_reprefills_as_they_are_written() -> None:
    assert parse_reprefills("16x4+1024,8x1+32") == [(16, 4, 1024), (8, 1, 32)]
    assert parse_reprefills("") == []
    for bucket in parse_reprefills(buckets.REPREFILLS):
        assert bucket.new_tokens <= 16384
        assert 0 < bucket.prefix_tokens * bucket.requests <= 16384
    for wrong in ("16", "16x1+2+3", "axb+c"):
        with pytest.raises((ValueError, TypeError)):
            parse_reprefills(wrong)


def test_sglangs_own_graphs_have_a_bucket_for_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_runner, "HAS_GPU", True)
    options = {
        own: sglang_runner.engine_options(
            Path("/m"), "bfloat16", buckets.attention_of(own, False), own, [8, 256], [1, 64]
        )
        for own in (None, "breakable", "full")
    }
    assert options["full"]["cuda_graph_config"] == {"prefill": {"full_prefill_max_req": 64}}
    assert options["full"]["attention_backend"] == "flashinfer"
    assert options["breakable"]["attention_backend"] == "triton"  # FlashAttention 3 is not installed here
    assert buckets.attention_of(None, True) == "triton"
    monkeypatch.setattr(buckets, "default_attention", lambda: None)
    assert buckets.attention_of("breakable", False) == "fa3"
    assert options["breakable"]["cuda_graph_bs_prefill"] == [8, 256, 512, 16384]
    assert options[None]["cuda_graph_backend_prefill"] == "disabled"
    for fields in options.values():
        assert (fields["chunked_prefill_size"], fields["max_running_requests"]) == (16384, 64)


def row(
    length: int, requests: int, grid_s: float, eager_s: float, breakable_s: float, prefix: int = 0
) -> dict[str, Any]:
    bucket = Bucket(length, requests, prefix)._asdict()
    times = {"floor_s": 1.0, "grid_s": grid_s, "eager_s": eager_s, "breakable_s": breakable_s, "grid_again_s": grid_s}
    return {**bucket, **times, "error": 1e-3, "grid_eager_runs": 0}


RIGHT = [
    *(row(8, 1, 1.1, 3.0, 1.2), row(64, 2, 1.2, 1.9, 1.3), row(256, 8, 1.4, 1.5, 1.5)),
    *(row(16, 1, 1.1, 2.6, 1.3, 1024), row(64, 4, 1.4, 1.5, 1.5, 4096)),
]


@pytest.mark.parametrize(
    ("at", "changed", "failed"),
    [
        (0, {}, []),
        (0, {"grid_s": 1.3}, ["grid over floor, to 128 tokens"]),
        (1, {"eager_s": 1.7}, ["eager over grid, to 128 tokens"]),
        (2, {"grid_s": 1.6}, ["grid over floor, above"]),
        (3, {"grid_s": 1.4}, ["re-prefills, grid over floor, to 128 tokens"]),
        (4, {"breakable_s": 1.3}, ["re-prefills, SGLang's breakable over grid"]),
        (0, {"error": 0.04}, ["error of logits on the grid"]),
        (1, {"error": float("nan")}, ["error of logits on the grid"]),
        (2, {"grid_eager_runs": 1}, ["forwards that fit a captured shape and ran without"]),
    ],
)
def test_the_worst_batch_is_judged(tmp_path: Path, at: int, changed: dict[str, Any], failed: list[str]) -> None:
    found = report(tmp_path)
    found.record(control_error=1.0)
    rows = [dict(each) for each in RIGHT]
    rows[at] |= changed
    buckets.judge_rightness(found, rows, 0.03)
    buckets.judge_speed(found, rows, ["eager", "grid", "breakable"])
    assert found.end() == bool(failed)
    assert found.found["failed"] == failed


def test_what_was_not_measured_and_a_comparison_that_sees_nothing_fail(tmp_path: Path) -> None:
    found = report(tmp_path)
    buckets.judge_rightness(found, [], 0.03)
    assert set(found.found["failed"] if found.end() else []) == {
        "error of logits on the grid",
        "error of attention to oneself, which must be seen",
    }
    found = report(tmp_path)
    found.record(control_error=0.01)
    buckets.judge_rightness(found, RIGHT, 0.03)
    buckets.judge_speed(found, [{**Bucket(8, 1)._asdict(), "floor_s": 1.0}], ["grid"])
    assert found.end() == 1
    assert "error of attention to oneself, which must be seen" in found.found["failed"]
    assert "grid over floor, to 128 tokens" in found.found["failed"]


# --- serve ---


@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "cuda"])
def test_systems_differ_only_in_queues_and_graphs(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HAS_GPU", has_gpu)
    stock = serve.launch_command(Path("/m"), SYSTEMS["stock"], (1, 2), "triton")
    assert stock[stock.index("--disaggregation-transfer-backend") + 1] == STAND_IN
    assert SYSTEMS["stock"] == System()
    assert all(SYSTEMS["all"][:2])
    for name, system in {**SYSTEMS, **WINDOWS}.items():
        command = serve.launch_command(Path("/m"), system, (1, 2), "triton")
        own = list(system.flags) if has_gpu else []
        assert command == [*stock, *own]
        assert bool(own) == (has_gpu and name == "own-graphs")
        environment = serve.launch_environment(system)
        options = options_from_environment(environment)
        assert options is not None
        assert (options.laps, options.graphs) == system[:2]
        assert (options.cdsp, options.transfer) == (None, None)
        plain = {**serve.launch_environment(System()), ENVIRONMENT_VARIABLE: ""}
        assert {**environment, ENVIRONMENT_VARIABLE: ""} == plain


def test_windows_are_fixed_or_adaptive() -> None:
    for name, system in WINDOWS.items():
        assert system.laps is not None
        if name == serve.ADAPTIVE:
            assert system.laps == LapsOptions()
        else:
            assert system.laps.w_min_ms == float(name)
            assert system.laps.w_max_ms == pytest.approx(float(name), abs=0.01)


def test_clients_do_not_take_the_cores_of_the_server() -> None:
    server, clients = serve.divide_cores(set(range(16)))
    assert server | clients == set(range(16))
    assert not server & clients
    assert len(server) == 12
    assert serve.divide_cores({0, 1}) == ({0, 1}, {0, 1})


def test_each_request_is_in_a_room_of_its_own() -> None:
    server = Server("http://x", 8998)
    bodies = [server.request([1, 2, 3]) for _ in range(100)]
    assert len({body["bootstrap_room"] for body in bodies}) == len(bodies)
    assert bodies[0]["input_ids"] == [1, 2, 3]
    assert bodies[0]["sampling_params"]["max_new_tokens"] == 1


@pytest.mark.slow
def test_turns_begin_with_the_turn_before() -> None:
    prompts = list(islice(serve.turns(7, 1), 2000))
    assert prompts == list(islice(serve.turns(7, 1), 2000))
    new = []
    continued = 0
    for before, prompt in pairwise(prompts):
        is_same_conversation = prompt.tokens[: len(before.tokens)] == before.tokens
        continued += is_same_conversation
        new.append(len(prompt.tokens) - len(before.tokens) * is_same_conversation)
        assert prompt.is_long == (new[-1] >= serve.LONG_TOKENS[0]) or not prompt.is_long
    assert 0.6 < continued / len(new) < 0.8
    assert 0.08 < sum(prompt.is_long for prompt in prompts) / len(prompts) < 0.12
    assert max(len(prompt.tokens) for prompt in prompts) < CONTEXT_TOKENS


@pytest.mark.slow
def test_every_window_gets_the_same_stream_of_short_prompts() -> None:
    stream = serve.arrivals(100.0, 20.0, 1)
    assert stream == serve.arrivals(100.0, 20.0, 1)
    assert len(stream) == pytest.approx(2000, rel=0.1)
    assert all(before.due_s < after.due_s < 20.0 for before, after in pairwise(stream))
    assert all(1 <= len(prompt.tokens) <= serve.MAX_SHORT_TOKENS for prompt in stream)


@pytest.mark.slow
def test_times_run_from_when_a_request_was_due() -> None:
    """A server that answers one after the other makes those wait that are due meanwhile."""
    stream = serve.arrivals(100.0, 0.5, 8)
    broken = stream[3].tokens

    async def run() -> list[Answer]:
        turn = asyncio.Lock()

        async def generate(request: web.Request) -> web.Response:
            async with turn:
                await asyncio.sleep(0.02)
            status = 500 if (await request.json())["input_ids"] == broken else 200
            return web.json_response({"meta_info": {"cached_tokens": 1}}, status=status)

        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await serve.open_loop(Server(f"http://127.0.0.1:{runner.addresses[0][1]}", 1), stream)
        finally:
            await runner.cleanup()

    found = serve.summary(asyncio.run(run()))
    failed = sum(prompt.tokens == broken for prompt in stream)
    assert (found["failed"], found["requests"]) == (failed, len(stream) - failed)
    # The last is answered when all of them have had their turn, one after the other.
    waits = [(number + 1) * 0.02 - prompt.due_s for number, prompt in enumerate(stream) if prompt.tokens != broken]
    assert found["mean_s"] >= sum(waits) / len(waits)
    assert found["requests_per_s"] <= 50.0


def test_times_of_short_and_long_prompts_are_apart() -> None:
    answers = [Answer(number >= 90, 0.0, (number + 1) / 100, number == 99, 10, 5) for number in range(100)]
    found = serve.summary(answers)
    assert (found["requests"], found["failed"], found["seconds"]) == (99, 1, 1.0)
    assert (found["median_s"], found["p90_s"], found["p99_s"]) == (0.5, 0.9, 0.99)
    assert (found["short"]["requests"], found["short"]["median_s"], found["long"]["requests"]) == (90, 0.45, 9)
    assert found["cached_share"] == 0.5
    assert found["requests_per_s_by_half"] == [100, 98]
    assert serve.summary([answers[0]])["long"] == {"requests": 0}


def test_decisions_of_a_level_are_what_was_added_meanwhile() -> None:
    before = {"decisions": {"batches": 100, "seconds": 1.0}}
    after = {"decisions": {"batches": 300, "seconds": 1.5}}
    assert serve.decisions_between(before, after, 10.0) == {"batches": 200, "mean_s": 0.0025, "share": 0.05}
    assert serve.decisions_between(before, before, 10.0) == {"batches": 0, "mean_s": None, "share": 0.0}


def system_found(clients: int, rate: float, mean: float, **more: Any) -> dict[str, Any]:
    level = {"clients": clients, "requests_per_s": rate, "mean_s": mean, "failed": 0, **more}
    return {"levels": [{**level, "clients": 1, "requests_per_s": 1.0}, level]}


@pytest.mark.parametrize(
    ("systems", "failed"),
    [
        ({"stock": (10.0, 2.0), "all": (13.0, 1.5)}, []),
        ({"stock": (10.0, 2.0), "all": (11.0, 1.5)}, ["requests/s, all over stock, 64 clients"]),
        ({"stock": (10.0, 2.0), "all": (13.0, 1.7)}, ["mean TTFT, all over stock, 64 clients"]),
        # The faster of SGLang's own counts.
        (
            {"stock": (10.0, 2.0), "own-graphs": (12.0, 1.6), "all": (13.0, 1.5)},
            ["requests/s, all over stock, 64 clients", "mean TTFT, all over stock, 64 clients"],
        ),
        (
            {"all": (13.0, 1.5)},
            ["requests/s, all over stock, 64 clients", "mean TTFT, all over stock, 64 clients"],
        ),
    ],
)
def test_figure_6_is_judged_at_64_clients(
    tmp_path: Path, systems: dict[str, tuple[float, float]], failed: list[str]
) -> None:
    given = serve.arguments_of(["--concurrencies", "64,1"])
    found = report(tmp_path)
    decided = {"decisions": {"share": 0.01}}
    found.record(systems={name: system_found(64, *numbers, **decided) for name, numbers in systems.items()})
    serve.judge(found, given)
    assert found.end() == bool(failed)
    assert found.found["failed"] == failed


def test_failed_requests_are_a_failure(tmp_path: Path) -> None:
    found = report(tmp_path)
    found.record(systems={"graphs": system_found(64, 10.0, 1.0, failed=2)})
    serve.judge(found, serve.arguments_of(["--systems", "graphs"]))
    assert found.end() == 1
    assert found.found["failed"] == ["graphs: requests that failed"]


def test_the_adaptive_window_is_judged_by_the_best_fixed_one(tmp_path: Path) -> None:
    def window(mean: float, p90: float, rate: float) -> dict[str, Any]:
        return {"levels": [{"rate_per_s": 360.0, "mean_s": mean, "p90_s": p90, "requests_per_s": rate, "failed": 0}]}

    found = report(tmp_path)
    found.record(
        systems={
            "adaptive": window(0.021, 0.05, 19.0),
            "30": window(0.02, 0.06, 20.0),
            "0": window(0.05, 0.04, 15.0),
            "5": {"levels": []},
        }
    )
    serve.judge(found, serve.arguments_of(["--windows", "adaptive,30,0,5"]))
    assert found.end() == 1
    assert found.found["failed"] == ["p90_s, adaptive over the best window"]


@pytest.mark.slow
def test_a_server_that_does_not_start_leaves_its_log_and_the_next_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: Path, system: System, ports: Sequence[int], attention: str | None) -> list[str]:
        return [sys.executable, "-u", "-c", "print('loading'); raise ValueError('no such attention')"]

    monkeypatch.setattr(serve, "launch_command", broken)
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    out = tmp_path / "found.json"
    assert serve.main(["--dry-run", "--systems", "stock,two-queues", "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert found["failed"] == ["stock", "two-queues"]
    for name in ("stock", "two-queues"):
        assert found["systems"][name]["log_end"][-1] == "ValueError: no such attention"
        assert "loading" in (tmp_path / f"found-{name}.log").read_text()
    with pytest.raises(SystemExit):
        serve.arguments_of(["--systems", "stock,other"])


# --- two engines ---

EXPECTED = two_engines.Answer((5, 6, 7), (1.0, TIE / 2, 2.0))


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([5, 6, 7], None),
        ([9, 6, 7], Deviation(40, 0, 1.0)),
        ([5, 8, 8], Deviation(40, 1, TIE / 2)),
        ([5, 6], Deviation(40, 2, 2.0)),
        ([], Deviation(40, 0, 1.0)),
        ([5, 6, 7, 8], Deviation(40, 3, float("inf"))),
    ],
)
def test_the_first_token_that_differs(tokens: list[int], found: Deviation | None) -> None:
    assert deviation(40, EXPECTED, tokens) == found


def test_ties_are_no_errors_and_are_counted(tmp_path: Path) -> None:
    found = summary([None, None, Deviation(3, 1, TIE / 2), Deviation(4, 0, float("inf"))], 0.25)
    assert (found["answers"], found["equal"], found["ties"], found["control_equal"]) == (4, 2, 1, 0.25)
    assert found["different"] == [{"prompt_tokens": 4, "at": 0, "gap": 1e9}]  # JSON has no infinity
    judged = report(tmp_path)
    two_engines.judge(judged, "pool", {**found, "shared": 0})
    judged.end()
    assert judged.found["failed"] == [
        "pool: answers that are one instance's",
        "pool: prompts that both members computed",
    ]


class OneInstance:
    """Its answer is a function of the whole prompt, or of the last token only."""

    def __init__(self, of_last_token: bool) -> None:
        self._of_last_token = of_last_token
        self.asked: list[list[int]] = []

    def tokens(self, prompt: list[int]) -> list[int]:
        seen = prompt[-1:] if self._of_last_token else prompt
        return [sum((at + 1) * token for at, token in enumerate(seen)) % 997 + step for step in range(4)]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        self.asked.append(body["input_ids"])
        assert (path, body["top_logprobs_num"], body["sampling_params"]["temperature"]) == ("/generate", 2, 0)
        tokens = self.tokens(body["input_ids"])
        best_two = [[[-0.1, token, None], [-3.1, 0, None]] for token in tokens]
        reply = {"output_ids": tokens, "meta_info": {"output_top_logprobs": best_two}}
        return type("Reply", (), {"status": 200, "body": reply})()


@pytest.mark.parametrize("of_last_token", [False, True])
def test_right_and_wrong_answers_and_what_the_control_shows(of_last_token: bool) -> None:
    single = OneInstance(of_last_token)
    right = compare(lambda number, prompt: single.tokens(list(prompt)), single, (5, 9))
    assert (right["answers"], right["equal"], right["different"]) == (4, 4, [])
    # Where answers do not depend on the prompt, as with weights that hide attention, the control shows it.
    assert right["control_equal"] == float(of_last_token)
    second = [prompt for prompt in single.asked if len(prompt) > 20]
    assert sorted(map(len, second)) == [5 + 4 + 20, 9 + 4 + 20]

    def with_other_kv(number: int, prompt: Sequence[int]) -> list[int]:
        return single.tokens([*prompt] if number == 0 else [*[0] * (len(prompt) - 1), prompt[-1]])

    wrong = compare(with_other_kv, single, (5, 9))
    assert len(wrong["different"]) == (0 if of_last_token else 2)


@pytest.mark.slow
@pytest.mark.full
def test_the_words_of_a_worker_that_refuses_are_the_failure() -> None:
    """A real worker for a GPU, which ends before it imports SGLang."""
    with two_engines.Engines(time.perf_counter() + 60) as engines:
        options = ("--device", "cuda", "--transfer-backend", "handshake")
        engine = engines.start(EngineSpec(two_engines.Role.DECODE, worker_options=options, name="refused"))
        with pytest.raises(RuntimeError, match=r"refused: .*handshake transport nixl needs NIXL"):
            engines.wait(engine)

"""The load of figure 6, and that its systems differ in nothing but what they are compared by."""

from __future__ import annotations

import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from gpu import figure6
from gpu.figure6 import (
    LONG_TOKENS,
    NO_GRAPHS,
    SYSTEMS,
    Server,
    System,
    decisions_between,
    divide_cores,
    launch_command,
    missing_graphs,
    turns,
)
from gpu.model_shapes import CONTEXT_TOKENS
from gpu.stage_plan import SYSTEMS as PLANNED
from sglang_ext.engine.options import ENVIRONMENT_VARIABLE, options_from_environment
from sglang_ext.graphs.sglang import capture
from sglang_ext.transfer.sglang.transfer_backend import STAND_IN


@pytest.mark.parametrize(
    ("has_gpu", "has_kernels"), [(False, False), (True, False), (True, True)], ids=["cpu", "cuda", "cuda with FA3"]
)
def test_the_systems_differ_in_queues_and_graphs_alone(
    has_gpu: bool, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure6, "has_default_attention", lambda: has_kernels)
    commands = {name: launch_command(Path("/m"), system, (1, 2), has_gpu) for name, system in SYSTEMS.items()}
    assert set(commands) == set(PLANNED)
    stock_argv, stock_environment = commands["stock"]
    for name, (argv, environment) in commands.items():
        if name == "stock-flashinfer" and has_gpu:
            at = argv.index("--attention-backend")
            assert argv[at + 1] == "flashinfer"
            assert ("--attention-backend" in stock_argv) == (not has_kernels)
            argv = argv[:at] + stock_argv[at : at + 2 * (not has_kernels)] + argv[at + 2 :]
        assert argv == stock_argv
        assert argv[argv.index("--disaggregation-transfer-backend") + 1] == STAND_IN
        assert {**environment, ENVIRONMENT_VARIABLE: ""} == {**stock_environment, ENVIRONMENT_VARIABLE: ""}
        options = options_from_environment(environment)
        assert options is not None
        assert (options.laps, options.graphs) == SYSTEMS[name][:2]
        assert (options.cdsp, options.transfer) == (None, None)
    assert SYSTEMS["stock"] == System()
    assert all(SYSTEMS["all"][:2])
    if has_gpu and not has_kernels:
        assert stock_argv[stock_argv.index("--attention-backend") + 1] == "triton"


def test_clients_do_not_take_the_cores_of_the_server() -> None:
    server, clients = divide_cores(set(range(16)))
    assert server | clients == set(range(16))
    assert not server & clients
    assert len(server) == 12
    assert divide_cores({0, 1}) == ({0, 1}, {0, 1})


def test_each_request_is_in_a_room_of_its_own() -> None:
    server = Server("http://x", 8998)
    bodies = [server.request([1, 2, 3]) for _ in range(100)]
    assert len({body["bootstrap_room"] for body in bodies}) == len(bodies)
    assert {(body["bootstrap_host"], body["bootstrap_port"]) for body in bodies} == {("127.0.0.1", 8998)}
    assert bodies[0]["input_ids"] == [1, 2, 3]
    assert bodies[0]["sampling_params"]["max_new_tokens"] == 1


def test_decisions_of_a_level_are_what_was_added_meanwhile() -> None:
    before = {"decisions": {"batches": 100, "seconds": 1.0}}
    after = {"decisions": {"batches": 300, "seconds": 1.5}}
    assert decisions_between(before, after, 10.0) == {"batches": 200, "mean_s": 0.0025, "share": 0.05}
    assert decisions_between(before, before, 10.0) == {"batches": 0, "mean_s": None, "share": 0.0}


@pytest.mark.slow
def test_turns_go_on_where_the_one_before_ended() -> None:
    prompts = list(islice(turns(7, 1), 2000))
    assert prompts == list(islice(turns(7, 1), 2000))
    new = []
    goes_on = 0
    for before, prompt in pairwise(prompts):
        is_same_conversation = prompt[: len(before)] == before
        goes_on += is_same_conversation
        new.append(len(prompt) - len(before) * is_same_conversation)
    assert 0.6 < goes_on / len(new) < 0.8
    assert 0.08 < sum(tokens >= LONG_TOKENS[0] for tokens in new) / len(new) < 0.12
    assert max(map(len, prompts)) < CONTEXT_TOKENS


def test_a_server_without_the_graphs_that_were_asked_for_is_found_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("Load weight end\nthe server is ready\n")
    assert missing_graphs(log) is None
    line = "no prefill graphs by length and batch size: the model has a sliding window; this engine runs without them"
    log.write_text(f"Load weight end\n{line}\nthe server is ready\n")
    assert missing_graphs(log) == line
    assert any(NO_GRAPHS in path.read_text() for path in Path(capture.__file__).parent.glob("*.py"))

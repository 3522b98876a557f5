"""The demonstration's cluster on machines with and without GPUs, up to the command lines of its instances."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sglang_ext.cluster.cluster import Cluster, plan_cluster
from sglang_ext.cluster.config import ConfigError
from sglang_ext.cluster.display import make_display
from sglang_ext.cluster.model import PreparedModel
from sglang_ext.cluster.plan import ADMIN_KEY_VARIABLE, ClusterPlan, Host, count_ports, make_plan, resolve_device
from sglang_ext.types import Role

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CORES = frozenset(range(8))


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    yield demo
    for name in ("demo", "demo_client", "demo_report", "demo_view"):
        sys.modules.pop(name, None)


def plan_of(
    demo: ModuleType, gpu_count: int, device: str = "auto", decode_tp: int = 1, keep: bool = False
) -> ClusterPlan:
    machine = Host(CORES, gpu_count)
    config = demo.cluster_config(argparse.Namespace(device=device, decode_tp=decode_tp, port=0, keep=keep), machine)
    ports = list(range(20000, 20000 + count_ports(config)))
    return make_plan(
        config, model=PreparedModel("/models/m", "m"), machine=machine, free_ports=ports, admin_key="secret"
    )


def gpus_of(plan: ClusterPlan) -> dict[str, str | None]:
    return {program.name: program.env.get("CUDA_VISIBLE_DEVICES") for program in plan.instances}


def options(plan: ClusterPlan, name: str) -> list[str | None]:
    """What each instance is given for an option."""
    found = []
    for program in plan.instances:
        has_it = name in program.command
        found.append(program.command[program.command.index(name) + 1] if has_it else None)
    return found


def test_without_a_gpu_two_instances_share_prompts(demo: ModuleType) -> None:
    plan = plan_of(demo, 0)
    assert gpus_of(plan) == dict.fromkeys(("both-0", "both-1", "decode-0", "plain-0"))
    assert plan.coordinator is not None
    assert options(plan, "--device") == ["cpu"] * 4
    assert options(plan, "--mem-fraction-static") == [None] * 4


def test_one_gpu_serves_prefill_and_decode(demo: ModuleType) -> None:
    plan = plan_of(demo, 1)
    assert gpus_of(plan) == {"both-0": "0", "decode-0": "0"}
    assert options(plan, "--mem-fraction-static") == ["0.40", "0.40"]
    assert options(plan, "--device") == ["cuda"] * 2
    assert plan.start_parallel == 1  # each measures what the one before has left
    assert plan.coordinator is None


def test_two_gpus_serve_one_instance_each(demo: ModuleType) -> None:
    plan = plan_of(demo, 2)
    assert gpus_of(plan) == {"both-0": "0", "decode-0": "1"}
    assert options(plan, "--mem-fraction-static") == [None, None]
    assert plan.start_parallel > 1


def test_a_gpu_for_each_pool(demo: ModuleType) -> None:
    assert gpus_of(plan_of(demo, 3)) == {"short-0": "0", "long-0": "1", "decode-0": "2"}
    assert gpus_of(plan_of(demo, 8, decode_tp=3)) == {"short-0": "0", "long-0": "1", "decode-0": "2,3,4"}
    assert gpus_of(plan_of(demo, 4, decode_tp=3)) == {"both-0": "0", "decode-0": "1,2,3"}


@pytest.mark.parametrize("keep", [False, True])
def test_engines_have_little_memory_unless_they_are_kept(demo: ModuleType, keep: bool) -> None:
    plan = plan_of(demo, 0, keep=keep)
    assert all(("--max-total-tokens" in program.command) is not keep for program in plan.instances)


def test_a_machine_with_gpus_serves_on_its_cpu_when_asked(demo: ModuleType) -> None:
    plan = plan_of(demo, 2, device="cpu")
    assert options(plan, "--device") == ["cpu"] * 4
    assert plan.coordinator is not None


def test_cuda_without_a_gpu_is_refused_by_name(demo: ModuleType) -> None:
    with pytest.raises(ConfigError, match="device: is cuda, but no GPU can be used here"):
        plan_of(demo, 0, device="cuda")


@pytest.mark.parametrize("gpu_count", range(9))
def test_no_gpu_is_promised_twice_over(demo: ModuleType, gpu_count: int) -> None:
    plan = plan_of(demo, gpu_count)
    assert {program.role for program in plan.instances} >= {Role.DECODE}
    gpus = [gpu for gpu in gpus_of(plan).values() if gpu is not None]
    fractions = [float(value or 0.0) for value in options(plan, "--mem-fraction-static")]
    for gpu in set(gpus):
        shares = [fraction for used, fraction in zip(gpus, fractions, strict=True) if used == gpu]
        assert len(shares) == 1 or (all(shares) and sum(shares) < 1)


def test_what_is_started_is_described(demo: ModuleType) -> None:
    texts = {}
    for gpu_count in (0, 1, 4):
        machine = Host(CORES, gpu_count)
        config = demo.cluster_config(argparse.Namespace(device="auto", decode_tp=1, port=0, keep=False), machine)
        assert resolve_device(config, machine) == ("cuda" if gpu_count else "cpu")
        texts[gpu_count] = demo.describe(config, machine)
    assert texts[0] == "2 both prefill, 1 decode, 1 stock, 1 coordinator, 1 router; SGLang on the CPU"
    assert texts[1] == "1 both prefill, 1 decode, 1 router; SGLang on CUDA, 1 GPU"
    assert texts[4] == "1 short prefill, 1 long prefill, 1 decode, 1 router; SGLang on CUDA, 4 GPUs"


class PlannedCluster(Cluster):
    """A cluster that starts nothing."""

    def __enter__(self) -> Cluster:
        self.plan = plan_cluster(self.config, PreparedModel("/models/m", "m"))
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_page_that_it_names_opens_without_asking_for_a_key(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ADMIN_KEY_VARIABLE, raising=False)
    kept: list[Cluster] = []
    monkeypatch.setattr(demo, "Cluster", PlannedCluster)
    monkeypatch.setattr(demo, "ensure_smollm2", lambda: None)
    monkeypatch.setattr(demo, "_demonstrate", lambda cluster, began_s: True)
    monkeypatch.setattr(demo, "_keep", kept.append)
    assert demo.main(["--device", "cpu"]) == 0
    assert kept == []
    assert demo.main(["--device", "cpu", "--keep"]) == 0
    (cluster,) = kept
    line = f"live page: {cluster.url}/ui#key={cluster.plan.admin_key}"
    assert capsys.readouterr().out.splitlines().count(line) == 1


def test_while_it_is_kept_the_page_is_named_again(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ADMIN_KEY_VARIABLE, raising=False)
    arguments = argparse.Namespace(device="cpu", decode_tp=1, port=0, keep=True)
    served: list[object] = []
    monkeypatch.setattr(demo.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(PlannedCluster, "serve", lambda self, is_done: served.append(is_done))
    with PlannedCluster(demo.cluster_config(arguments, Host(CORES, 0)), make_display(io.StringIO())) as cluster:
        demo._keep(cluster)
        assert f"live page: {cluster.url}/ui#key={cluster.plan.admin_key}" in capsys.readouterr().out.splitlines()
    assert len(served) == 1


@pytest.mark.parametrize("place", ["recent", "requests"])
@pytest.mark.parametrize("tokens", [2554, 2553])  # with its last token, and without
def test_the_table_says_of_a_long_prompt_what_its_picture_says(demo: ModuleType, place: str, tokens: int) -> None:
    def step(new_tokens: int, members: list[int]) -> dict[str, object]:
        times = {"ordered_s": 1.0, "ended_s": 2.0, "has_failed": False, "member_times": [], "moved_tokens": 0}
        return {"kind": "chunk", "new_tokens": new_tokens, "members": members, **times}

    record = {"room": 0x5EA18C0000000003, "tokens": tokens, "owner": 0, "offered_s": 0.5, "ended_s": 3.0}
    record |= {"steps": [step(503, [0]), step(2051, [0, 1])], "outcome": "streamed", "ticket": None}
    another = {**record, "room": None, "steps": [step(2554, [1])]}
    members = [{"instance": 0, "name": "a:1"}, {"instance": 1, "name": "b:1"}]
    status = {"members": members, "former_members": [], "recent": [], "requests": [], "now_s": 4.0}
    status[place] = [record, another]
    question = demo.Question("documents", "…", 1)
    reply = demo.Reply(question, "long", prompt_tokens=2554, request_id="5ea18c0000000003")
    shown = demo._plan(reply, status)
    assert shown == "503 @ 1 -> 2,051 @ 2"
    assert shown in [request.plan for request in demo.timeline_of(status).requests]
    assert demo._plan(demo.Reply(question, "long", prompt_tokens=900, request_id="0"), status) == "900 @ 1"
    assert demo._plan(demo.Reply(question, "short", prompt_tokens=9, request_id="0"), status) == ""


@pytest.mark.slow
def test_eight_instances_are_simulated_and_the_page_plays_them(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo._simulate_eight(tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("8 prefill instances, policy ") == 2
    assert "simulated" in printed
    assert "<html" in (tmp_path / "eight.html").read_text(encoding="utf-8")

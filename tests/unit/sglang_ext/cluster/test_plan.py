"""The programs of a cluster: command lines, addresses, environments, cores and GPUs."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_ext.cluster.cluster import Cluster
from sglang_ext.cluster.cluster_file import dump_cluster, load_cluster
from sglang_ext.cluster.config import (
    ClusterConfig,
    ConfigError,
    CoordinatorConfig,
    PoolConfig,
    PoolsConfig,
    RouterSettings,
)
from sglang_ext.cluster.display import make_display
from sglang_ext.cluster.model import PreparedModel, prepare_model
from sglang_ext.cluster.plan import (
    ADMIN_KEY_VARIABLE,
    ClusterPlan,
    Host,
    Program,
    admin_key_of,
    count_ports,
    make_plan,
)
from sglang_ext_router.length_classes_file import read_length_classes

CPU = Host(core_ids=frozenset(range(8)), gpu_count=0)
MODEL = PreparedModel("/models/m", "m")


def plan_of(config: ClusterConfig, machine: Host = CPU) -> ClusterPlan:
    free = list(range(20000, 20000 + count_ports(config)))
    return make_plan(config, model=MODEL, machine=machine, free_ports=free, admin_key="secret")


def cluster(router: RouterSettings | None = None, **pools: PoolConfig) -> ClusterConfig:
    return ClusterConfig(model="m", pools=PoolsConfig(**pools), router=router or RouterSettings(port=0))


def option(program: Program, name: str) -> str:
    return program.command[program.command.index(name) + 1]


def test_decode_instances_that_may_become_prefill_have_bootstrap_ports() -> None:
    switching = PoolConfig(count=2, args=("--enable-pd-role-switch",))
    plan = plan_of(cluster(both=PoolConfig(), decode=switching))
    _, first, second = plan.instances
    assert first.bootstrap_port
    assert first.bootstrap_port != second.bootstrap_port
    assert option(first, "--bootstrap-port") == str(first.bootstrap_port)
    assert str(first.bootstrap_port) not in plan.router.command  # the router asks the instance


def test_a_small_cluster_word_by_word() -> None:
    config = cluster(
        RouterSettings(port=0, length_boundary_tokens=512),
        short=PoolConfig(args=("--chunked-prefill-size", "64")),
        long=PoolConfig(ports=(31000,), bootstrap_ports=(31001,)),
        decode=PoolConfig(tp=3),
    )
    plan = plan_of(config)
    start = (sys.executable, "-m", "sglang_ext.cli")
    short, long, decode = plan.instances
    assert short.command == (
        *start,
        *[
            "worker",
            "--role",
            "short",
            "--model-path",
            "/models/m",
            "--host",
            "127.0.0.1",
            "--port",
            "20000",
            "--device",
            "cpu",
        ],
        *[
            "--bootstrap-port",
            "20001",
            "--threads",
            "1",
            "--laps-boundary-tokens",
            "512",
            "--",
            "--served-model-name",
            "m",
            "--chunked-prefill-size",
            "64",
        ],
    )
    assert (long.url, long.bootstrap_port) == ("http://127.0.0.1:31000", 31001)
    assert decode.command[-4:] == ("--served-model-name", "m", "--tp-size", "3")
    assert "--bootstrap-port" not in decode.command
    assert plan.router.command == (
        *start,
        *["router", "--host", "127.0.0.1", "--port", "20003", "--pd-disaggregation"],
        *["--prefill-short", "http://127.0.0.1:20000", "20001", "--prefill-long", "http://127.0.0.1:31000", "31001"],
        *["--decode", "http://127.0.0.1:20002", "--length-boundary-tokens", "512"],
        *["--shutdown-grace-period-secs", "30"],
    )
    assert [program.name for program in plan.instances] == ["short-0", "long-0", "decode-0"]
    assert (plan.router.ready_path, short.ready_path) == ("/readyz", "/health")


def test_every_open_port_is_picked_once() -> None:
    config = cluster(both=PoolConfig(count=3, ports=(31000,)), decode=PoolConfig(count=2))
    assert count_ports(config) == 1 + 2 + 3 + 2
    plan = plan_of(config)
    ports = [int(program.url.rpartition(":")[2]) for program in (*plan.instances, plan.router)]
    ports += [program.bootstrap_port for program in plan.instances if program.bootstrap_port is not None]
    assert len(ports) == len(set(ports)) == 9
    assert list(config.given_ports()) == [("pools.both.ports[0]", 31000)]
    assert option(plan.router, "--prefill") == "http://127.0.0.1:31000"


def test_threads_share_the_cores() -> None:
    plan = plan_of(cluster(both=PoolConfig(), decode=PoolConfig(tp=2)), Host(frozenset(range(7)), 0))
    assert [option(program, "--threads") for program in plan.instances] == ["2", "2"]
    plan = plan_of(cluster(both=PoolConfig(tp=2, pp=2), decode=PoolConfig()), Host(frozenset(range(10)), 0))
    assert [option(program, "--threads") for program in plan.instances] == ["2", "2"]
    plan = plan_of(cluster(both=PoolConfig(threads=5), decode=PoolConfig()), Host(frozenset({0}), 0))
    assert [option(program, "--threads") for program in plan.instances] == ["5", "1"]


def test_cores_are_those_of_the_machine() -> None:
    pool = PoolConfig(count=2, cores=("0-1", "2,3"))
    assert [p.cores for p in plan_of(cluster(both=pool, decode=PoolConfig())).instances] == [{0, 1}, {2, 3}, None]
    with pytest.raises(ConfigError, match=r"pools.both.cores\[1\]: this machine has no core 2"):
        plan_of(cluster(both=pool, decode=PoolConfig()), Host(frozenset({0, 1}), 0))


def gpus_of(plan: ClusterPlan) -> list[str]:
    return [program.env["CUDA_VISIBLE_DEVICES"] for program in plan.instances]


def test_gpus_are_consecutive_and_whole_instances_stay_together() -> None:
    pools = {"short": PoolConfig(), "long": PoolConfig(tp=2), "decode": PoolConfig(tp=2)}
    plan = plan_of(cluster(**pools), Host(CPU.core_ids, 5))
    assert gpus_of(plan) == ["0", "1,2", "3,4"]
    assert "--threads" not in plan.instances[0].command
    assert option(plan.instances[0], "--device") == "cuda"
    assert plan.start_parallel == 16
    shared = plan_of(cluster(**pools), Host(CPU.core_ids, 4))
    assert gpus_of(shared) == ["0", "1,2", "0,1"]
    assert shared.start_parallel == 1  # instances that share a GPU measure its free memory in turn
    # GPU 0 and 1 have two users each, but 2 one.
    fractions = ["--mem-fraction-static" in program.command for program in shared.instances]
    assert fractions == [True, True, True]
    assert option(shared.instances[0], "--mem-fraction-static") == "0.40"


def test_the_memory_of_a_shared_gpu_is_divided_unless_the_user_says_how() -> None:
    own = ("--mem-fraction-static", "0.3")
    pools = {"short": PoolConfig(), "long": PoolConfig(gpus=("1",)), "decode": PoolConfig(gpus=("0",), args=own)}
    plan = plan_of(cluster(**pools), Host(CPU.core_ids, 2))
    given = [[word for word in program.command if word.startswith("0.")] for program in plan.instances]
    assert given == [["0.40"], [], ["0.40", "0.3"]]  # SGLang takes the last one


def test_stages_have_gpus_and_are_told_of() -> None:
    pools = {"short": PoolConfig(), "long": PoolConfig(tp=2, pp=2), "decode": PoolConfig()}
    plan = plan_of(cluster(**pools), Host(CPU.core_ids, 6))
    assert gpus_of(plan) == ["0", "1,2,3,4", "5"]
    assert plan.instances[1].command[-4:] == ("--tp-size", "2", "--pp-size", "2")
    assert not any("--pp-size" in program.command for program in (plan.instances[0], plan.instances[2]))
    with pytest.raises(ConfigError, match=r"pools.long.pp: is 2, for 2 ranks of each stage, but this machine has 3"):
        plan_of(cluster(**pools), Host(CPU.core_ids, 3))


def test_kv_parallel_decode_is_passed_on_to_gpus_alone() -> None:
    config = cluster(both=PoolConfig(), decode=PoolConfig(tp=4, dcp=2))
    plan = plan_of(config, Host(CPU.core_ids, 5))
    assert gpus_of(plan) == ["0", "1,2,3,4"]
    assert plan.instances[1].command[-4:] == ("--tp-size", "4", "--dcp-size", "2")
    assert "--dcp-size" not in plan.instances[0].command
    with pytest.raises(ConfigError, match=r"^pools.decode.dcp: is 2, which SGLang has only for GPUs$"):
        plan_of(config)


def test_gpus_by_hand() -> None:
    config = cluster(both=PoolConfig(count=2, gpus=("3", "1")), decode=PoolConfig())
    assert gpus_of(plan_of(config, Host(CPU.core_ids, 4))) == ["3", "1", "0"]
    with pytest.raises(ConfigError, match=r"pools.both.gpus\[0\]: this machine has 2 GPUs"):
        plan_of(config, Host(CPU.core_ids, 2))


def test_a_gpu_is_not_imagined() -> None:
    pools = PoolsConfig(both=PoolConfig(), decode=PoolConfig())
    with pytest.raises(ConfigError, match="device: is cuda, but no GPU"):
        plan_of(ClusterConfig(model="m", pools=pools, device="cuda"))
    with pytest.raises(ConfigError, match=r"pools.decode.tp: is 3, but this machine has 2 GPUs"):
        plan_of(cluster(both=PoolConfig(), decode=PoolConfig(tp=3)), Host(CPU.core_ids, 2))


def test_addresses_can_be_ipv6_and_wildcards_are_reached_by_loopback() -> None:
    pools = PoolsConfig(both=PoolConfig(), decode=PoolConfig())
    config = ClusterConfig(model="m", pools=pools, host="::1", router=RouterSettings(host="0.0.0.0", port=0))
    plan = plan_of(config)
    assert plan.instances[0].url == "http://[::1]:20000"
    assert plan.router.url == "http://127.0.0.1:20003"
    assert option(plan.router, "--host") == "0.0.0.0"


@pytest.mark.parametrize(
    ("router", "boundary"),
    [
        ({"length_boundary_tokens": 64}, "64"),
        ({"length_boundary_tokens": 64, "args": ("--length-boundary-tokens", "99")}, "99"),
        ({"args": ("--length-boundary-tokens=7", "--length-boundary-tokens=8")}, "8"),
    ],
)
def test_prefill_instances_are_given_the_boundary_of_the_router(router: dict[str, Any], boundary: str) -> None:
    pools = {name: PoolConfig() for name in ("short", "long", "both", "decode")}
    *prefills, decode = plan_of(cluster(RouterSettings(port=0, **router), **pools)).instances
    assert {option(program, "--laps-boundary-tokens") for program in prefills} == {boundary}
    assert "--laps-boundary-tokens" not in decode.command


@pytest.mark.parametrize("router", [{}, {"args": ("--length-boundary-tokens", "0")}])
def test_without_a_boundary_the_instances_find_it_and_the_router_asks_them(router: dict[str, Any]) -> None:
    plan = plan_of(cluster(RouterSettings(port=0, **router), short=PoolConfig(), decode=PoolConfig()))
    assert all("--laps-boundary-tokens" not in program.command for program in plan.instances)
    assert "--length-boundary-tokens" not in plan.router.command[: -len(router.get("args", ())) or None]


@pytest.mark.parametrize(
    "given",
    [
        {"worker_args": ("--laps-mode", "off")},
        {"worker_args": ("--laps-mode=off",)},
        {"args": ("--laps-boundary-tokens=99",)},
    ],
)
def test_instances_that_are_told_otherwise_are_not_given_it(given: dict[str, tuple[str, ...]]) -> None:
    router = RouterSettings(port=0, length_boundary_tokens=333)
    short = plan_of(cluster(router, short=PoolConfig(**given), decode=PoolConfig())).instances[0]  # type: ignore[arg-type]
    assert "333" not in short.command
    config = ClusterConfig(
        model="m",
        pools=PoolsConfig(short=PoolConfig(), decode=PoolConfig()),
        router=router,
        **given,  # type: ignore[arg-type]
    )
    assert "333" not in plan_of(config).instances[0].command


def test_keys_are_in_the_environment_alone() -> None:
    settings = RouterSettings(
        port=0,
        api_key="sesame",
        admin_api_key="simsim",
        args=("--worker-api-key=abra", "--queue-size", "5", "--api-key", "later", "--admin-api-key", "kadabra"),
    )
    config = cluster(settings, short=PoolConfig(), decode=PoolConfig())
    assert admin_key_of(config) == "kadabra"
    assert admin_key_of(cluster(RouterSettings(admin_api_key="a"), short=PoolConfig(), decode=PoolConfig())) == "a"
    assert admin_key_of(cluster(short=PoolConfig(), decode=PoolConfig())) is None
    plan = make_plan(
        config, model=MODEL, machine=CPU, free_ports=list(range(20000, 20010)), admin_key=admin_key_of(config) or ""
    )
    assert plan.router.command[-2:] == ("--queue-size", "5")
    assert plan.router.env == {
        "SGLANG_EXT_API_KEY": "later",  # arguments win over settings
        "SGLANG_EXT_WORKER_API_KEY": "abra",
        "SGLANG_EXT_ADMIN_API_KEY": "kadabra",
    }
    words = " ".join(word for program in (*plan.instances, plan.router) for word in program.command)
    for key in ("sesame", "simsim", "abra", "later"):
        assert key not in words
        assert key not in "\n".join(plan.shell_lines())


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ((), "http://127.0.0.1:30000/ui"),
        (("--ui-port", "30009"), "http://127.0.0.1:30009/ui"),
        (("--ui-port=30009", "--ui-host=::"), "http://[::1]:30009/ui"),
        (("--disable-ui",), None),
    ],
)
def test_the_live_page_is_where_the_routers_arguments_put_it(arguments: tuple[str, ...], address: str | None) -> None:
    settings = RouterSettings(port=30000, args=arguments)
    assert plan_of(cluster(settings, both=PoolConfig(), decode=PoolConfig())).page_url == address


def test_the_page_is_opened_with_a_key_that_was_made_here_and_asks_for_one_that_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ADMIN_KEY_VARIABLE, raising=False)
    for settings, fragment in (
        (RouterSettings(port=30000), "#key=s%2Bec%26ret"),
        (RouterSettings(port=30000, admin_api_key="s+ec&ret"), ""),
    ):
        config = cluster(settings, both=PoolConfig(), decode=PoolConfig())
        running = Cluster(config, display=make_display(io.StringIO()))
        running.plan = dataclasses.replace(plan_of(config), admin_key="s+ec&ret")
        assert running.page_url == f"http://127.0.0.1:30000/ui{fragment}"


def test_shell_lines_hide_the_key() -> None:
    lines = list(plan_of(cluster(both=PoolConfig(cores=("0",)), decode=PoolConfig())).shell_lines())
    assert len(lines) == 3
    assert lines[0].startswith("taskset -c 0 ")
    assert "secret" not in "\n".join(lines)


def prepared(model: str, **settings: Any) -> PreparedModel:
    return prepare_model(dataclasses.replace(cluster(both=PoolConfig(), decode=PoolConfig()), model=model, **settings))


def test_models(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    with pytest.raises(ConfigError, match=r"is not a folder with a config\.json"):
        prepared(str(tmp_path / "tiny"))
    with pytest.raises(ConfigError, match=r"model: \./nowhere"):
        prepared("./nowhere")
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert prepared(f"{tmp_path}/tiny/") == PreparedModel(str(tmp_path / "tiny"), "tiny")


def test_a_name_that_hugging_face_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(_: object, name: str, timeout: float) -> None:
        asked.append(name)
        if name != "org/name":
            raise httpx.ConnectError("no such repository\nmore of it")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", ask)
    assert prepared("org/name") == PreparedModel("org/name", "name")
    with pytest.raises(ConfigError) as refused:
        prepared("nmae")
    assert str(refused.value) == (
        "model: nmae is neither a folder here nor a model that huggingface.co gives: no such repository"
    )
    assert asked == ["org/name", "nmae"]
    # Engines with a cache or a hub of their own find out by themselves.
    assert prepared("nmae", env={"HF_HOME": "/shared"}) == PreparedModel("nmae", "nmae")
    assert prepared("s3://bucket/model").name == "model"
    assert len(asked) == 2


@pytest.mark.parametrize("checks_engines", [True, False])
def test_engines_are_asked_first_unless_that_is_not_wanted(
    checks_engines: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    module = "sglang_ext.cluster.cluster."
    monkeypatch.setattr(module + "check_arguments", lambda config, plan: None)
    monkeypatch.setattr(module + "_check_engines", lambda *arguments: asked.append(arguments) is None)
    monkeypatch.setattr(module + "Supervisor.start", lambda supervisor, on_tick: True)
    (tmp_path / "config.json").write_text("{}")
    config = cluster(both=PoolConfig(), decode=PoolConfig())
    config = dataclasses.replace(config, model=str(tmp_path), run_dir=str(tmp_path / "run"))
    with Cluster(config, checks_engines=checks_engines) as running:
        assert running.is_ready
    assert len(asked) == checks_engines


def test_long_instances_and_the_router_are_told_of_the_coordinator() -> None:
    config = dataclasses.replace(
        cluster(short=PoolConfig(), long=PoolConfig(count=3), decode=PoolConfig()),
        coordinator=CoordinatorConfig(enabled=True, port=31000, args=("--min-chunk-tokens", "64")),
    )
    assert (count_ports(config), list(config.given_ports())) == (1 + 2 + 6 + 1 + 1, [("coordinator.port", 31000)])
    plan = plan_of(config)
    coordinator = plan.coordinator
    assert coordinator is not None
    assert coordinator.command[3:] == (
        *("coordinator", "--host", "127.0.0.1", "--port", "31000", "--http-port", "20000", "--sp-sizes", "1,2,3"),
        *("--key-file", str(plan.pool_key_file), "--min-chunk-tokens", "64"),
    )
    assert (coordinator.url, coordinator.ready_path) == ("http://127.0.0.1:20000", "/health")
    assert option(plan.router, "--coordinator-url") == coordinator.url
    told = {p.name: "--cdsp-coordinator" in p.command for p in plan.instances}
    assert told == {"short-0": False, "long-0": True, "long-1": True, "long-2": True, "decode-0": False}
    assert option(plan.instances[1], "--cdsp-coordinator") == "127.0.0.1:31000"
    assert plan.pool_key_file == config.folder.resolve() / "pool-key"
    keyed = [p.name for p in plan.instances if "--cdsp-key-file" in p.command]
    assert keyed == ["long-0", "long-1", "long-2"]
    assert option(plan.instances[1], "--cdsp-key-file") == str(plan.pool_key_file)
    assert {option(program, "--transfer-backend") for program in plan.instances} == {"handshake"}
    assert plan.backends == (coordinator, *plan.instances)
    ports = [program.url.rpartition(":")[2] for program in (*plan.backends, plan.router)]
    assert len(ports) == len(set(ports))


def test_a_pool_with_a_key_of_its_own_gets_no_other() -> None:
    plan = plan_of(
        dataclasses.replace(
            cluster(long=PoolConfig(worker_args=("--cdsp-key-file", "/etc/key")), decode=PoolConfig()),
            coordinator=CoordinatorConfig(enabled=True, args=("--key-file=/etc/key",)),
        )
    )
    assert plan.pool_key_file is None
    assert plan.coordinator is not None
    assert "--key-file" not in plan.coordinator.command
    assert plan.instances[0].command.count("--cdsp-key-file") == 1


def test_a_coordinator_that_listens_everywhere_is_reached_by_loopback() -> None:
    config = dataclasses.replace(
        cluster(long=PoolConfig(), decode=PoolConfig()),
        host="0.0.0.0",
        coordinator=CoordinatorConfig(enabled=True),
    )
    plan = plan_of(config)
    assert plan.coordinator is not None
    assert option(plan.coordinator, "--host") == "0.0.0.0"
    assert plan.coordinator.url == "http://127.0.0.1:20001"
    assert option(plan.instances[0], "--cdsp-coordinator") == "127.0.0.1:20000"


def test_on_gpus_the_members_send_to_decode_over_nixl() -> None:
    pools = PoolsConfig(long=PoolConfig(count=2), decode=PoolConfig())
    config = ClusterConfig(model="m", pools=pools, coordinator=CoordinatorConfig(enabled=True))
    plan = plan_of(config, Host(core_ids=frozenset(range(8)), gpu_count=4))
    assert {option(program, "--transfer-transport") for program in plan.instances} == {"nixl"}
    assert {option(program, "--device") for program in plan.instances} == {"cuda"}
    assert not any("--transfer-transport" in program.command for program in plan_of(config).instances)


def test_instances_that_serve_all_prompts_are_members_too() -> None:
    config = ClusterConfig(
        model="m",
        pools=PoolsConfig(both=PoolConfig(count=2), short=PoolConfig(count=1), decode=PoolConfig(count=1)),
        coordinator=CoordinatorConfig(enabled=True),
    )
    plan = plan_of(config)
    are_members = {program.name: "--cdsp-coordinator" in program.command for program in plan.instances}
    assert are_members == {"short-0": False, "both-0": True, "both-1": True, "decode-0": False}


def test_length_classes_stand_in_the_cluster_file(tmp_path: Path) -> None:
    """They may be given inline, and reach the router as those of a file do; the configuration stays as it was."""
    text = (
        "model: m\npools: {both: {count: 2}, decode: {}}\nrouter:\n  port: 0\n  length_classes:\n"
        "    prefill: [{name: a, max_tokens: 9, ttft_s: 0.5, instances: [both-1]}, {name: b}]\n"
    )
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    config = load_cluster(file)
    plan = plan_of(config)
    command = plan.router.command
    classes = read_length_classes(command[command.index("--length-classes") + 1])
    assert [(spec.name, spec.max_tokens, spec.ttft_s, spec.instances) for spec in classes.prefill] == [
        ("a", 9, 0.5, (plan.instances[1].url,)),
        ("b", None, 0.0, ()),
    ]
    assert load_cluster(file) == config
    file.write_text(dump_cluster(config))
    assert load_cluster(file) == config
    file.write_text(text.replace("max_tokens: 9", "max_tokens: 0"))
    with pytest.raises(ConfigError, match=r"^router\.length_classes: prefill class a: max_tokens must be a whole"):
        load_cluster(file)


def test_length_classes_name_instances_of_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "classes.yaml"
    file.write_text("prefill: [{name: a, max_tokens: 9, instances: [both-1]}, {name: b}]")
    plan = plan_of(
        cluster(RouterSettings(port=0, length_classes=str(file)), both=PoolConfig(count=2), decode=PoolConfig())
    )
    command = plan.router.command
    classes = json.loads(command[command.index("--length-classes") + 1])
    assert classes["prefill"][0]["instances"] == [plan.instances[1].url]
    file.write_text("[")
    plan = plan_of(
        cluster(RouterSettings(port=0, length_classes=str(file)), both=PoolConfig(count=2), decode=PoolConfig())
    )
    assert str(file) in plan.router.command


def test_length_classes_with_an_unknown_instance_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "model: m\npools: {both: {count: 2}, decode: {}}\nrouter:\n  port: 0\n  length_classes:\n"
        "    prefill: [{name: a, max_tokens: 9, instances: [both-2]}, {name: b}]\n"
    )
    with pytest.raises(
        ConfigError, match=r"^router\.length_classes: no instance is called both-2: there are both-0, both-1, decode-0$"
    ):
        plan_of(load_cluster(file))

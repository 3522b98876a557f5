"""Settings that a program of the cluster would refuse are refused before anything starts, with where they stand."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sglang_ext.cli import main
from sglang_ext.cluster import plan as planning
from sglang_ext.cluster.argument_checks import check_arguments, engine_checks, located
from sglang_ext.cluster.cluster import plan_cluster
from sglang_ext.cluster.cluster_file import read_record
from sglang_ext.cluster.config import ClusterConfig, ConfigError
from sglang_ext.cluster.model import PreparedModel
from sglang_ext.cluster.plan import ClusterPlan
from sglang_ext.types import Role
from support.tenants import tenants_file

POOLS = {"short": {}, "long": {"count": 2}, "decode": {}}


def settings_of(**changes: object) -> dict[str, object]:
    return {"model": "org/made-up", "device": "cpu", "pools": POOLS, "router": {"port": 0}, **changes}


def config_of(**changes: object) -> ClusterConfig:
    return read_record(ClusterConfig, settings_of(**changes))


def plan_of(config: ClusterConfig) -> ClusterPlan:
    return plan_cluster(config, PreparedModel(config.model, "made-up"))


def router(*words: str, **settings: object) -> dict[str, object]:
    return {"router": {"port": 0, "args": list(words), **settings}}


def pools(role: str, **settings: object) -> dict[str, object]:
    return {"pools": {**POOLS, role: settings}}


def shared(*words: str) -> dict[str, object]:
    return {"coordinator": {"enabled": True, "args": list(words)}}


REFUSED = [
    (router("--metrics-prt", "1"), "router.args[0]: unrecognized arguments: --metrics-prt 1"),
    (router("--log-json", "--log-level", "loud"), "router.args[1]: argument --log-level: invalid choice: 'loud'"),
    (router("--queue-size", "many"), "router.args[0]: argument --queue-size: invalid int value: 'many'"),
    (router("--queue-size=-1"), "router.args[0]: --queue-size must not be negative, not -1"),
    (router("--queue-size"), "router.args[0]: argument --queue-size: expected one argument"),
    (router("--ssl-keyfile", "/key"), "router.args[0]: --ssl-keyfile needs --ssl-certfile"),
    (router("--ssl-certfile", "/nowhere"), "router.args[0]: --ssl-certfile /nowhere: No such file or directory"),
    (router("--set", "placement.no=1"), "router.args[0]: --set placement.no: placement has no 'no'"),
    (router("--config", "/nowhere"), "router.args[0]: --config: [Errno 2] No such file or directory: '/nowhere'"),
    (router("--access-log", "/nowhere/log"), "router.args[0]: --access-log /nowhere/log: No such file or directory"),
    (router("--controller", "on", "--processes", "2"), "router.args[0]: --controller on needs --processes 1, not 2"),
    (router("--decode-selector", "a"), None),
    (router("--service-discovery", "--decode-selector", "a"), "router.args[1]: --decode-selector: "),
    (router("--port", "1234"), "router.args[0]: --port does not belong here; use router.port"),
    (router(host="no host"), "router.host: --host no host --port "),
    (router("--api-key", "a\nb"), "router.args[0]: --api-key holds a character that cannot be in a header"),
    (shared("--sp-sizes", "1;2"), "coordinator.args[0]: --sp-sizes must be numbers with commas between them"),
    (shared("--set", "pool.max_chunk_ms=0"), "coordinator.args[1]: pool.max_chunk_ms must be at least 1, got 0"),
    (shared("--min-chunk-tokens", "0"), "coordinator.args[0]: --min-chunk-tokens must be at least 1, got 0"),
    (shared("--profile", "/nowhere.json"), "coordinator.args[0]: --profile "),
    (shared("--http-port", "0"), "coordinator.args[0]: --http-port does not belong here; use coordinator.http_port"),
    (
        pools("long", worker_args=["--laps-mode", "x"]),
        "pools.long.worker_args[0]: argument --laps-mode: invalid choice",
    ),
    (pools("short", worker_args=["--set", "laps.no=1"]), "pools.short.worker_args[0]: --set laps.no: "),
    (pools("decode", worker_args=["--laps-mode", "short"]), "pools.decode.worker_args[0]: --laps-mode"),
    (pools("long", args=["--dp-size", "no"]), "pools.long.args[0]: --dp-size needs a positive number, got 'no'"),
    (pools("long", args=["--tp-size", "no"]), "pools.long.args[0]: --tp-size needs a positive number, got 'no'"),
    ({"args": ["--pp-size=2"]}, "args[0]: --pp-size 2: only prefill runs in stages"),
    ({"args": ["--port", "1"]}, "args[0]: --port does not belong here; use pools.short.ports"),
    ({"worker_args": ["--dry-run"]}, "worker_args[0]: --dry-run does not belong here; use sglang-ext up --dry-run"),
    ({"worker_args": ["--transfer-backend", "smoke"]}, "worker_args[0]: argument --transfer-backend: invalid choice"),
    (
        pools("decode", args=["--dcp-size", "2"]),
        "pools.decode.args[0]: --dcp-size 2: --model-path must be",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_a_program_refuses_is_refused_with_its_place(changes: dict[str, object], message: str | None) -> None:
    config = config_of(**changes)
    if message is None:
        check_arguments(config, key_free(plan_of(config)))
        return
    with pytest.raises(ConfigError) as caught:
        check_arguments(config, key_free(plan_of(config)))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def key_free(plan: ClusterPlan) -> ClusterPlan:
    """The plan without the key that a start writes."""

    def left(words: Sequence[str]) -> tuple[str, ...]:
        at = next((i for i, word in enumerate(words) if word in {"--key-file", "--cdsp-key-file"}), len(words))
        return (*words[:at], *words[at + 2 :])

    coordinator = plan.coordinator
    return replace(
        plan,
        coordinator=coordinator and replace(coordinator, command=left(coordinator.command)),
        instances=tuple(replace(instance, command=left(instance.command)) for instance in plan.instances),
    )


@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (router("--log-level", "loud"), "router.args[0]: argument --log-level: invalid choice"),
        (shared("--slo-stretch", "0"), "coordinator.args[0]: --slo-stretch must be a number of at least 1, got 0"),
        (pools("long", worker_args=["--no-such"]), "pools.long.worker_args[0]: unrecognized arguments: --no-such"),
        ({"model": "/nowhere/model"}, "model: /nowhere/model is not a folder with a config.json"),
        ({"pools": {"short": {"ports": [31007]}, "decode": {"ports": [31007]}}}, "pools.decode.ports[0]: port 31007"),
        (router("--metrics-port", "PORT"), "router.args[0]: --metrics-host 127.0.0.1 --metrics-port "),
    ],
    ids=["router", "coordinator", "worker", "model", "ports", "a port in use"],
)
def test_a_refusal_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_dry: bool, changes: dict[str, object], message: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    file = tmp_path / "cluster.yaml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = {"model": str(tmp_path / "model"), "run_dir": str(tmp_path / "run"), **changes}
        text = yaml.safe_dump(settings_of(**settings)).replace("PORT", str(taken.getsockname()[1]))
        file.write_text(text)
        assert main(["up", "--config", str(file), *(["--dry-run"] if is_dry else [])]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"sglang-ext up: error: {message}")
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "run" / "default" / "logs").exists()


def test_ports_of_the_routers_arguments_belong_to_no_other_program() -> None:
    with pytest.raises(ConfigError, match=r"router\.args\[1\]: port 31007 is already taken by pools\.short\.ports"):
        config_of(**{**router("--log-json", "--ui-port=31007"), **pools("short", ports=[31007])})


def test_engines_check_each_kind_of_arguments_once() -> None:
    def names(**changes: object) -> list[str]:
        return [check.name for check in engine_checks(plan_of(config_of(**changes)))]

    assert names() == ["check-short-0", "check-decode-0"]
    assert names(**pools("long", args=["--dtype", "float32"])) == ["check-short-0", "check-long-0", "check-decode-0"]
    assert names(**shared()) == ["check-short-0", "check-long-0", "check-decode-0"]
    check = engine_checks(plan_of(config_of()))[0]
    assert check.command[3:5] == ("worker", "--check")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (
            "sglang-ext worker: error: argument --tp-size/--tensor-parallel-size: invalid int value: 'x'",
            "pools.long.tp: argument --tp-size/--tensor-parallel-size: invalid int value: 'x'",
        ),
        ("sglang-ext worker: error: unrecognized arguments: --no", "pools.long.args[2]: unrecognized arguments: --no"),
        ("sglang-ext: SGLang: --dtype is bad", "args[0]: --dtype is bad"),
        ("sglang-ext: SGLang: the page size must be 1", "pools.long.args: SGLang: the page size must be 1"),
        ("sglang-ext: --page-size 3 does not go with it", "pools.long.args[0]: --page-size 3 does not go with it"),
    ],
)
def test_what_an_engine_says_is_found_in_the_file(line: str, error: str) -> None:
    config = config_of(args=["--dtype", "half"], **pools("long", args=["--page-size", "3", "--no"]))
    program = next(program for program in plan_of(config).instances if program.role is Role.LONG)
    assert str(located(config, program, line)) == error.replace("args[0]: --dtype", "args[0]: SGLang: --dtype")


def test_a_dry_run_uses_files_of_its_own(tmp_path: Path) -> None:
    plan = plan_of(config_of(**shared(), router={"port": 0, "tenants_file": tenants_file(tmp_path, a={})}))
    moved = plan.with_files_in(Path("/elsewhere"))
    key, usage = "/elsewhere/pool-key", "/elsewhere/usage.db"
    assert moved.coordinator is not None
    assert key in moved.coordinator.command
    assert [(key in program.command) for program in moved.instances] == [False, True, True, False]
    assert moved.router.command[moved.router.command.index("--usage-db") + 1] == usage
    assert (moved.pool_key_file, moved.usage_file) == (Path(key), Path(usage))
    without = plan_of(config_of())
    assert without.with_files_in(Path("/elsewhere")) is without
    assert planning.COORDINATOR_NAME not in {program.name for program in without.instances}

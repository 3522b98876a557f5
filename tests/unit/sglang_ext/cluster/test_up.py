"""`sglang-ext up`: options and file become one configuration; mistakes are one line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest

from sglang_ext.cluster.cluster import Cluster
from sglang_ext.cluster.config import ClusterConfig, ConfigError
from sglang_ext.cluster.up import add_arguments, arrange_arguments, config_from_arguments, run
from sglang_ext.types import Role
from support.stand_in_cluster import stand_in_plan, wait_until_gone
from support.tenants import tenants_file

FILE = """
model: m
pools: {short: {count: 2, args: [--a]}, decode: {tp: 2}}
router: {port: 0, args: [--x]}
args: [--b]
"""


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arrange_arguments(parser, words))


def config_of(*words: str) -> ClusterConfig:
    return config_from_arguments(parse(*words))


def counts(config: ClusterConfig) -> dict[str, int]:
    """The instances of each role; undivided ones only where there are any."""
    return {str(role): pool.count for role, pool in config.pools.by_role() if pool.count or role is not Role.PLAIN}


def test_without_options_the_demonstration_cluster() -> None:
    config = config_of()
    assert config.model == "smollm2"
    assert counts(config) == {"short": 0, "long": 0, "both": 2, "decode": 1}
    assert config.coordinator.enabled


def test_undivided_instances_beside_the_others_or_alone() -> None:
    beside = config_of("m", "--prefill", "2", "--plain", "1")
    assert counts(beside) == {"short": 0, "long": 0, "both": 2, "decode": 1, "plain": 1}
    alone = config_of("m", "--plain", "2")
    assert counts(alone) == {"short": 0, "long": 0, "both": 0, "decode": 0, "plain": 2}
    for words, problem in (
        (("--plain", "1", "--decode", "1"), "at least one prefill instance"),
        (("--plain", "1", "--prefill", "1", "--decode", "0"), "at least one decode instance"),
        (("--plain", "1", "--set", "pools.plain.pp=2"), "only prefill runs in pipeline stages"),
        (("--plain", "1", "--set", "pools.plain={tp: 2, dcp: 2}"), "only decode divides KV"),
    ):
        with pytest.raises(ConfigError, match=problem):
            config_of("m", *words)


def test_options_alone() -> None:
    config = config_of("m", "--prefill", "2", "--decode", "1", "--set", "pools.decode.tp=3", "--", "--dtype", "float32")
    assert counts(config) == {"short": 0, "long": 0, "both": 2, "decode": 1}
    assert config.pools.decode.tp == 3
    assert config.args == ("--dtype", "float32")
    staged = config_of("m", "--long", "1", "--set", "pools.long={tp: 2, pp: 3}", "--set", "device=cpu")
    assert (staged.pools.long.tp, staged.pools.long.pp, staged.device) == (2, 3, "cpu")
    assert staged.pools.long.count == 1
    divided = config_of("m", "--prefill", "1", "--set", "pools.decode.tp=4", "--set", "pools.decode.dcp=2")
    assert (divided.pools.decode.tp, divided.pools.decode.dcp, divided.pools.decode.count) == (4, 2, 1)


def test_several_prefill_instances_share_long_prompts_where_they_can(tmp_path: Path) -> None:
    shared = config_of("m", "--prefill", "2")
    assert (shared.coordinator.enabled, shared.pools.member_count, shared.pools.decode.count) == (True, 2, 1)
    assert not config_of("m", "--prefill", "1").coordinator.enabled
    assert not config_of("m", "--prefill", "2", "--set", "coordinator.enabled=false").coordinator.enabled
    config_file = tmp_path / "config.json"
    for architecture, device, is_shared in (
        ("LlamaForCausalLM", "cpu", True),
        ("LlamaForCausalLM", "cuda", True),
        ("DeepseekV3ForCausalLM", "cpu", True),
        ("DeepseekV3ForCausalLM", "cuda", False),
        ("GptOssForCausalLM", "cpu", True),
        ("GptOssForCausalLM", "cuda", False),
    ):
        config_file.write_text(json.dumps({"architectures": [architecture]}))
        given = ("--prefill", "2", "--set", f"device={device}")
        assert config_of(str(tmp_path), *given).coordinator.enabled is is_shared
    config_file.write_text("no JSON")
    assert config_of(str(tmp_path), "--prefill", "2").coordinator.enabled


@pytest.mark.parametrize("words", [("m", "--short", "2"), ("--short", "2", "m"), ("--short=2", "m")])
def test_prefill_instances_alone_get_one_for_decode(words: tuple[str, ...]) -> None:
    config = config_of(*words)
    assert config.model == "m"
    assert counts(config) == {"short": 2, "long": 0, "both": 0, "decode": 1}
    assert config_of(*words, "--set", "pools.decode.tp=2").pools.decode.count == 1
    assert config_of("m", "--short", "2", "--decode", "3").pools.decode.count == 3
    assert config_of(*words, "--", "--dtype", "float32").args == ("--dtype", "float32")


def test_a_file_says_itself_what_it_decodes_with(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: m\npools: {short: {}}")
    with pytest.raises(ConfigError, match=r"pools\.decode\.count"):
        config_of("--config", str(path))


@pytest.mark.parametrize("words", [["a", "b"], ["m", "--set"], ["m", "--shrt", "1"]])
def test_words_that_mean_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of(*words)
    assert "error" in capsys.readouterr().err


@pytest.fixture
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what only SGLang can check: the model is a folder without one."""
    monkeypatch.setattr("sglang_ext.cluster.cluster.engine_checks", lambda plan: ())


@pytest.mark.usefixtures("no_engines")
@pytest.mark.parametrize("usage_db", [None, "billing.db"])
def test_tenants_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], usage_db: str | None) -> None:
    """A dry run reads their file, and makes no database in the cluster's folder."""
    path, tenants = tmp_path / "c.yaml", tenants_file(tmp_path, a={"weight": 2})
    own = "" if usage_db is None else f", usage_db: {tmp_path / usage_db}"
    path.write_text(
        f"model: {model_folder(tmp_path)}\npools: {{short: {{}}, decode: {{}}}}\n"
        f"router: {{port: 0, tenants_file: {tenants}{own}}}"
    )
    words = ("--config", str(path), "--dry-run", "--set", f"run_dir={tmp_path / 'run'}")
    assert run(parse(*words)) == 0
    usage = tmp_path / "run/default/usage.db" if usage_db is None else tmp_path / usage_db
    assert f"--tenants-file {tenants} --usage-db {usage}" in capsys.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "run/default/usage.db").exists()
    Path(tenants).write_text("tenants: {a: {wait: 2}}")
    assert run(parse(*words)) == 2
    error = capsys.readouterr().err
    assert error.startswith("sglang-ext up: error: router.tenants_file: --tenants-file: ")
    assert "tenant a: there is no option 'wait'" in error


@pytest.mark.usefixtures("no_engines")
def test_keys_of_the_file_are_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, keys = tmp_path / "c.yaml", tmp_path / "keys"
    keys.write_text("alice:" + "0" * 64)
    path.write_text(
        f"model: {model_folder(tmp_path)}\npools: {{short: {{}}, decode: {{}}}}\nrouter: {{port: 0, api_key: sesame, "
        f"admin_api_key: simsim, api_keys_file: {keys}, args: [--worker-api-key, abra]}}"
    )
    assert run(parse("--config", str(path), "--dry-run", "--set", f"run_dir={tmp_path / 'run'}")) == 0
    router = capsys.readouterr().out.splitlines()[-1]
    assert f"--api-keys-file {keys}" in router
    assert not [key for key in ("sesame", "simsim", "abra") if key in router]
    assert router.count("[hidden]") == 3


def test_long_instances_share_their_prompts_where_that_is_asked_for() -> None:
    assert not config_of("--long", "2", "--decode", "1").coordinator.enabled
    assert config_of("--long", "2", "--decode", "1", "--coordinator").coordinator.enabled


def test_options_replace_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE)
    config = config_of(
        *("--config", str(path), "--short", "1", "--port", "31000"),
        *("--set", "router.length_boundary_tokens=64", "--set", "router.args=[--log-level, warning]"),
        *("--set", "start.timeout_s=9", "--", "--c"),
    )
    assert counts(config) == {"short": 1, "long": 0, "both": 0, "decode": 1}
    assert config.pools.short.args == ("--a",)
    assert config.pools.decode.tp == 2
    assert (config.router.port, config.router.length_boundary_tokens) == (31000, 64)
    assert config.router.args == ("--log-level", "warning")
    assert config.args == ("--b", "--c")
    assert config.start.timeout_s == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--decode", "0"], "pools.decode.count: a cluster needs at least one decode instance"),
        (["--config", "KEYS"], "router.api_keys_file: /nowhere is not a file"),
        (["--set", "router.tenants_file=/nowhere"], "router.tenants_file: /nowhere is not a file"),
        (["--set", "router.usage_db=u.db"], "router.usage_db: needs router.tenants_file"),
        (["--port", "99999"], "router.port: 99999 is not a port (0 to 65535)"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: cannot be read: No such file or directory"),
        (["--set", "router.port"], "--set: 'router.port' is not of the form KEY=VALUE"),
        (["--set", "=1"], "--set: '=1' is not of the form KEY=VALUE"),
        (["--set", "args=[a"], "--set: '[a' is not YAML"),
        (["/nowhere", "--port", "0"], "model: /nowhere is not a folder with a config.json"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("router: {api_keys_file: /nowhere}")
    words = [str(path) if word == "KEYS" else word for word in words]
    assert run(parse("--set", f"run_dir={tmp_path}", *words)) == 2
    captured = capsys.readouterr()
    assert captured.err == f"sglang-ext up: error: {message}\n"
    assert captured.out == ""


def model_folder(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.mark.usefixtures("no_engines")
def test_dry_run_prints_commands_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_folder(tmp_path)
    assert run(parse("--dry-run", "--set", f"run_dir={tmp_path / 'run'}", model, "--port", "0")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4  # its model's configuration names no architecture that instances can share
    wanted = ("worker --role both", "worker --role both", "worker --role decode", " router --host ")
    assert all(word in line for word, line in zip(wanted, lines, strict=True))
    assert "[hidden]" in lines[3]
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_folder(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(parse("--set", f"run_dir={tmp_path}", model, "--port", str(port))) == 2
    expected = f"router.port: port {port} of 127.0.0.1 cannot be listened on: in use, or not permitted"
    assert expected in capsys.readouterr().err


# The whole command, with a module in place of `sglang_ext.cli` that runs stand-ins for workers and router.
STAND_IN_CLI = """
import sys
words = sys.argv[1:]
port = words[words.index("--port") + 1]
extra = sys.argv[sys.argv.index("--") + 3:] if "--" in sys.argv else []
sys.argv = ["stand-in", port, *extra]
from support.stand_in_server import main
main()
"""


def start_up(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    from support.stand_in_cluster import TESTS

    (tmp_path / "stand_in_cli.py").write_text(STAND_IN_CLI)
    code = (
        "import sys, argparse; import sglang_ext.cluster.plan as plan; from sglang_ext.cluster import up;"
        "parser = argparse.ArgumentParser(); up.add_arguments(parser);"
        "make = plan.make_plan;"
        "plan.make_plan = lambda *a, **k: plan_with_stand_ins(make(*a, **k));"
        "import dataclasses;"
        "swap = lambda p: dataclasses.replace(p, command=tuple("
        "'stand_in_cli' if w == 'sglang_ext.cli' else w for w in p.command));"
        "plan_with_stand_ins = lambda p: dataclasses.replace("
        "p, instances=tuple(map(swap, p.instances)), router=swap(p.router));"
        "sys.exit(up.run(parser.parse_args(up.arrange_arguments(parser, sys.argv[1:]))))"
    )
    paths = [str(TESTS), str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code, "--port", "0", "--set", "name=t", "--set", "start.method=spawn"]
    command += ["--set", f"run_dir={tmp_path / 'run'}"]
    return subprocess.Popen(
        [*command, model_folder(tmp_path), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ignored where the tests run in the background of a script, and inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_until_it_is_told_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    with start_up(tmp_path) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        state = json.loads((tmp_path / "run" / "t" / "state.json").read_text())
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert lines[0] == f"serving tiny at {state['url']}\n"
    assert lines[1] == f"live page: {state['url']}/ui#key={quote(state['admin_api_key'], safe='')}\n"
    assert {program["phase"] for program in state["programs"]} == {"ready"}
    assert state["pid"] == process.pid
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert not (tmp_path / "run" / "t" / "state.json").exists()


@pytest.mark.slow
def test_up_fails_with_the_log_of_the_one_that_died(tmp_path: Path) -> None:
    words = ["--", "--say", "the reason", "--die-after-s", "0.2", "--unhealthy"]
    with start_up(tmp_path, *words) as process:
        out, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert out == ""
    assert "exited with status 3 during start; everything is stopped. End of " in errors
    assert errors.endswith("  | the reason\n")
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_cluster_from_a_file_serves_within_the_block_and_is_gone_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = stand_in_plan()
    monkeypatch.setattr("sglang_ext.cluster.cluster.plan_cluster", lambda *_: plan)
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"model: {model_folder(tmp_path)}\nrun_dir: {tmp_path / 'run'}\n"
        "pools: {both: {count: 1}, decode: {count: 1}}"
    )
    with Cluster.from_yaml(file) as cluster:
        assert cluster.url == plan.router.url
        with urllib.request.urlopen(f"{cluster.url}/readyz", timeout=10) as reply:
            assert reply.status == 200
        pids = [member.pid for member in cluster.members if member.pid is not None]
        assert len(pids) == 4
    assert wait_until_gone(pids, 10.0) == []


def test_a_cluster_from_a_file_names_what_is_wrong_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        Cluster.from_yaml(tmp_path / "nowhere.yaml")

"""Each mistake of the troubleshooting page gives its message, in one line, and a status above 0."""

from __future__ import annotations

import inspect
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from sglang_ext import cli
from sglang_ext.cluster.state import lock_folder
from sglang_ext.engine import worker
from sglang_ext.engine.versions import SglangVersion
from support.engines import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/troubleshooting.md").read_text(encoding="utf-8")
# The words of the command line, and the message of the page's row. PORT is a port that is taken.
MISTAKES = [
    ("ruter", "unknown command 'ruter'; choose one of"),
    ("router --prefil-long x", "unrecognized arguments: --prefil-long"),
    ("router --set limits.nope=3 --decode http://127.0.0.1:2", "limits has no 'nope'; known are"),
    ("up smollm2 --dry-run --prefill 1 --set pools.bth.tp=2", "pools.bth: unknown setting; did you mean 'both'?"),
    ("up /no/such/model --dry-run --prefill 1", "/no/such/model is not a folder with a config.json"),
    ("up no-such-model --dry-run --prefill 1", "is neither a folder here nor a model that huggingface.co gives"),
    ("up smollm2 --host 0.0.0.0", "unrecognized arguments: --host; give --set router.host=ADDRESS"),
    ("worker --role short --model-path /no/such/model", "--model-path /no/such/model: there is no such folder"),
    ("router --port PORT --decode http://127.0.0.1:2", "Address already in use; choose another --port"),
    ("worker --role short --model-path m --device cpu --port PORT", "Address already in use; choose another --port"),
    ("mock-engine --role short --port PORT", "address already in use; choose another --port"),
    ("up smollm2 --dry-run --prefill 1 --port PORT", "cannot be listened on: in use, or not permitted"),
    ("worker --role shrt --model-path m", "'shrt' is not one of short, long, both, decode, plain"),
    ("up smollm2 --prefill 0", "a cluster needs at least one prefill instance: --prefill 1"),
    (
        "router --length-boundary-tokens -5 --decode http://127.0.0.1:2",
        "--length-boundary-tokens must not be negative, not -5",
    ),
    ("router --plain ftp://x", "'ftp://x' must be an http:// or https:// URL"),
    ("router --plain http://127.0.0.1:1 --tokenizer-path /nowhere", "--tokenizer-path: no tokenizer.json in /nowhere"),
    (
        "router --plain http://127.0.0.1:1 --api-keys-file /nowhere",
        "--api-keys-file: /nowhere: No such file or directory",
    ),
    (
        "router --plain http://127.0.0.1:1 --tenants-file tenants.yaml",
        "tenants.yaml: tenant a: weight must be a number greater than 0",
    ),
    ("worker --role decode --model-path m --laps-mode long", "LAPS schedules prefills, not decodes"),
    ("simulate --set workload.file=lengths.csv", "column num_prefill_tokens is missing"),
    (
        "batch run --input /nowhere.jsonl --output o.jsonl --endpoint http://127.0.0.1:9 --model m",
        "/nowhere.jsonl: no such file",
    ),
    (
        "batch run --input bad.jsonl --output o.jsonl --endpoint http://127.0.0.1:9 --model m",
        "is not valid JSON",
    ),
    ("live top http://127.0.0.1:9 --lines 1", "does not answer"),
]


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield str(listener.getsockname()[1])


def row_of(message: str) -> str:
    rows = [line for line in PAGE.splitlines() if re.match(r"\| (\d+ \| )?`", line) and message in line]
    assert rows, f"no row of the page has {message!r}"
    return rows[0]


@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_gives_one_line(
    command: str,
    message: str,
    taken_port: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.csv").write_text("a,b\n1,2\n")
    (tmp_path / "tenants.yaml").write_text("tenants: {a: {weight: 0}}")
    (tmp_path / "bad.jsonl").write_text("{bad\n")
    try:
        status = cli.main(command.replace("PORT", taken_port).split())
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert status in (1, 2)
    assert message in lines[-1]
    assert len(lines) <= 2, lines  # a summary, and the line of the file that is wrong
    assert "Traceback" not in "".join(lines)
    row_of(message)


def test_a_package_that_is_missing_is_named_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr("importlib.import_module", missing)
    for command, extra in (("up", "cpu] or [cuda"), ("worker", "cpu] or [cuda")):
        with pytest.raises(SystemExit) as end:
            cli.main([command])
        assert end.value.code == 1
        assert f"numpy is not installed: install the wheel with [{extra}]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["batch", "run"])
    assert "numpy is not installed: install the wheel with [batch]" in capsys.readouterr().err
    row_of("numpy is not installed: install the wheel with [cpu] or [cuda]")


@pytest.mark.parametrize(
    ("installed", "message"),
    [(None, "SGLang is not installed"), (SglangVersion(0, 5, 10), "is too old; install SGLang")],
)
def test_another_sglang_is_named(
    installed: SglangVersion | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(worker, "installed_sglang", lambda: installed)
    assert cli.main(["worker", "--role", "short", "--model-path", "m", "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
    row_of(message)


@pytest.mark.slow
def test_a_model_that_is_nowhere_is_named_last() -> None:
    ports = ("--port", str(free_port()), "--bootstrap-port", str(free_port()))
    command = ("worker", "--role", "short", "--model-path", "nobody/nothing", "--device", "cpu", *ports)
    done = subprocess.run(
        [sys.executable, "-m", "sglang_ext.cli", *command],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3
    message = "We couldn't connect to 'https://huggingface.co' to load the files"
    assert message in done.stderr.splitlines()[-1]
    row_of(message)


def test_a_second_cluster_of_a_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with lock_folder(tmp_path / "run" / "default"):
        assert cli.main(["up", "model", "--prefill", "1", "--port", "0"]) == 1
    message = "a cluster runs in"
    assert message in capsys.readouterr().err
    row_of(message)


def test_no_gpu_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sglang_ext.cluster.plan.cuda_device_count", lambda: 0)
    assert (
        cli.main(["up", "smollm2", "--dry-run", "--prefill", "1", "--set", "device=cuda", "--set", "router.port=0"])
        == 2
    )
    message = "device: is cuda, but no GPU can be used here (driver, or torch without CUDA)"
    assert message in capsys.readouterr().err
    row_of(message)


def test_every_row_is_provoked() -> None:
    table = PAGE.partition("## Commands")[2].partition("## Doctor")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    own = Path(__file__).read_text(encoding="utf-8")
    assert len(messages) >= 20
    assert [
        message for message in messages if message not in own and message.replace("cpu] or [cuda", "{extra}") not in own
    ] == []


def test_messages_of_the_router_are_in_its_source() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "router").rglob("*.py"))
    messages = re.findall(r"^\| \d+ \| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(messages) >= 5
    of_engines = ("The input (N", "Cannot use chat template functions")
    assert [message for message in messages if message not in source and not message.startswith(of_engines)] == []


def test_a_model_without_a_chat_template_is_refused_by_this_message() -> None:
    source = inspect.getsource(PreTrainedTokenizerBase)
    message = "Cannot use chat template functions because tokenizer.chat_template is not set"
    assert message in source
    row_of(message)

"""`sglang-ext up` with real SGLang: serves, restarts what was killed, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_ext.cluster.process_tree import send_signal, session_processes
from support.stand_in_cluster import wait_until_gone
from support.tiny_model import tiny_model
from support.up_process import START_TIMEOUT_S, Up, up

pytestmark = pytest.mark.integration


METHODS = ["fork", pytest.param("spawn", marks=pytest.mark.full)]


@pytest.mark.parametrize("method", METHODS)
def test_serves_restarts_and_stops(tmp_path: Path, method: str) -> None:
    with up(tmp_path, start={"method": method, "timeout_s": START_TIMEOUT_S}) as cluster:
        cluster.wait_until_ready()
        logs = cluster.folder / "logs"
        assert (logs / "fork-server.log").exists() == (method == "fork")
        assert "sglang-ext: not forked" not in (logs / "decode-0.log").read_text()
        assert stat.S_IMODE((cluster.folder / "state.json").stat().st_mode) == 0o600
        short_prompt, long_prompt = "def f(self):", "return self.value + other.value\n" * 40
        first = [cluster.chat(short_prompt), cluster.chat(long_prompt)]
        assert len(cluster.processes()) >= 3 * 3 + 1  # server, scheduler and detokenizer of each, the router

        decode = cluster.program("decode-0")
        assert decode.pid is not None
        with ThreadPoolExecutor(12) as pool:  # none of these loses its answer, though there is no other decode instance
            asked = [pool.submit(cluster.chat, text) for text in (short_prompt, long_prompt) * 3]
            time.sleep(0.2)
            os.kill(decode.pid, signal.SIGKILL)
            asked += [pool.submit(cluster.chat, text) for text in (short_prompt, long_prompt) * 3]
            assert [answer.result() for answer in asked] == first * 6
        cluster.wait_until_restarted("decode-0")
        again = cluster.program("decode-0")
        assert (again.url, again.restarts) == (decode.url, 1)
        assert again.pid != decode.pid
        assert [cluster.chat_until_answered(text, 60) for text in (short_prompt, long_prompt)] == first

        processes = cluster.processes()
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.wait(60) == 0
        assert wait_until_gone(processes, 0) == []
        assert not (cluster.folder / "state.json").exists()
        log = cluster.output.read_text()
        assert "decode-0: was ended by SIGKILL; starting again in 1 s" in log
        assert "Traceback" not in log


@pytest.mark.full
def test_a_prefill_instance_that_is_back_at_once_serves_again(tmp_path: Path) -> None:
    """Decode knew the ranks of the one before: it notices, well before it gives requests up."""
    with up(tmp_path, pools={"short": {"count": 1}, "decode": {"count": 1}}) as cluster:
        cluster.wait_until_ready()
        first = cluster.chat("def f(self):")
        prefill = cluster.program("short-0")
        assert prefill.pid is not None
        os.kill(prefill.pid, signal.SIGKILL)
        cluster.wait_until_restarted("short-0")
        began_s = time.monotonic()
        assert [cluster.chat_until_answered("def f(self):", 40) for _ in range(3)] == [first] * 3
        assert time.monotonic() - began_s < 40


@pytest.mark.full
def test_a_frozen_instance_is_started_again(tmp_path: Path) -> None:
    liveness = {"interval_s": 0.5, "timeout_s": 2, "misses": 2}
    with up(tmp_path, liveness=liveness) as cluster:
        cluster.wait_until_ready()
        first = cluster.chat("def f(self):")
        decode = cluster.program("decode-0")
        assert decode.pid is not None
        send_signal(session_processes(decode.pid), signal.SIGSTOP)
        cluster.wait_until_restarted("decode-0")
        assert cluster.chat_until_answered("def f(self):", 60) == first
        assert [cluster.program(name).restarts for name in ("short-0", "long-0", "router")] == [0, 0, 0]
        assert "decode-0: answered nothing in 2 checks of 2 s, and was killed" in cluster.output.read_text()


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_kill_9_of_up_leaves_nothing_running(tmp_path: Path, method: str) -> None:
    router = {"port": 0, "length_boundary_tokens": 64, "api_key": "sesame", "admin_api_key": "simsim"}
    with up(tmp_path, start={"method": method, "timeout_s": START_TIMEOUT_S}, router=router) as cluster:
        cluster.wait_until_ready()
        processes = cluster.processes()
        check_keys(cluster, processes)
        check_boundary(cluster, 64)
        cluster.process.kill()
        cluster.process.wait()
        assert wait_until_gone(processes, 20) == []


def check_keys(cluster: Up, processes: list[int]) -> None:
    """Clients need their key, changes the administrator's, and neither is on a command line."""
    url = f"{cluster.state.url}/v1/models"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=30)
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": "Bearer sesame"})) as reply:
        assert [model["id"] for model in json.load(reply)["data"]] == ["tiny"]
    assert cluster.state.admin_api_key == "simsim"
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes]
    assert any(b"router" in line for line in lines)
    assert not [line for line in lines if b"sesame" in line or b"simsim" in line]


def check_boundary(cluster: Up, tokens: int) -> None:
    """Router and instances agree where short ends."""
    with urllib.request.urlopen(f"{cluster.program('short-0').url}/server_info", timeout=30) as reply:
        assert json.load(reply)["sglang_ext"]["length_boundary_tokens"] == tokens
    assert "new tokens as short" not in (cluster.folder / "logs" / "router.log").read_text()


@pytest.mark.full
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--no-such-option"], "pools.long.args[0]: unrecognized arguments: --no-such-option"),
        (["--dtype", "loud"], "pools.long.args[0]: argument --dtype: invalid choice: 'loud'"),
        (["--schedule-policy", "lpm"], "pools.long.args[0]: --schedule-policy lpm does not go with --laps-mode"),
    ],
    ids=["unknown", "choice", "conflict"],
)
def test_what_sglang_refuses_is_refused_before_anything_starts(
    tmp_path: Path, method: str, args: list[str], message: str
) -> None:
    words = [str(tiny_model()), "--short", "1", "--port", "0", "--dry-run", "--set", "device=cpu"]
    words += ["--set", f"pools.long={{args: {json.dumps(args)}}}", "--set", f"start.method={method}"]
    done = subprocess.run(
        [sys.executable, "-m", "sglang_ext.cli", "up", *words, "--set", f"run_dir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"sglang-ext up: error: {message}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_an_instance_that_cannot_start_ends_it_with_its_log(tmp_path: Path) -> None:
    model = tmp_path / "broken"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["NoSuchModel"]}))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_ext.cli", "up", str(model), "--set", "device=cpu"),
            *("--prefill", "1", "--decode", "1", "--port", "0"),
            *("--set", f"run_dir={tmp_path / 'run'}", "--set", "name=x"),
        ],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "during start; everything is stopped. End of " in done.stderr
    assert "up: error:" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("  | ")]) > 3

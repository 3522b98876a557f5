"""Long instances that share prompts behind `sglang-ext up`: right tokens, shown by the router, kept running, drawn."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.live import timeline
from support.reference import greedy_reference, random_prompt
from support.stand_in_cluster import wait_until_gone
from support.up_process import Up, up

pytestmark = pytest.mark.integration

MIN_TOKENS = 200
NEW_TOKENS = 6
# Whatever is long enough is shared: it is not tested whether that pays.
COSTS = {
    "format": "sglang-ext engine profile",
    "version": 1,
    "model": "tiny",
    "sp": [
        {"size": size, "a_s": 0.001, "b_s_per_token": 1e-3 / size, "c_s_per_token2": 0.0, "d_s_per_token2": 0.0}
        for size in (1, 2)
    ],
}


def settings(tmp_path: Path) -> dict[str, Any]:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS))
    return {
        "pools": {
            "long": {
                "count": 2,
                "worker_args": ["--cdsp-min-tokens", str(MIN_TOKENS), "--set", "cdsp.step_timeout_s=10"],
            },
            "decode": {"count": 1},
        },
        "coordinator": {"enabled": True, "args": ["--profile", str(costs), "--min-chunk-tokens", "64"]},
    }


def generate(cluster: Up, prompt: list[int]) -> list[int]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{cluster.state.url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        tokens: list[int] = json.load(reply)["output_ids"]
    return tokens


def check(cluster: Up, tokens: int, seed: int) -> None:
    prompt = random_prompt(tokens, seed)
    assert generate(cluster, prompt) == greedy_reference(prompt, NEW_TOKENS)


def long_pool(cluster: Up) -> dict[str, Any]:
    with urllib.request.urlopen(f"{cluster.state.url}/pools", timeout=30) as reply:
        shown: dict[str, Any] = json.load(reply)["long_pool"]
    return shown


def wait_for(cluster: Up, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline_s = time.monotonic() + 90
    while not is_so(shown := long_pool(cluster)):
        assert time.monotonic() < deadline_s, shown
        time.sleep(0.1)
    return shown


def is_complete(shown: dict[str, Any]) -> bool:
    return shown["problem"] is None and len(shown["members"]) == 2


def collected(shown: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in shown["recent"] or () if one["outcome"] in ("collected", "streamed")]


@pytest.mark.full
def test_two_long_instances_share_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with up(tmp_path, **settings(tmp_path)) as cluster:
        cluster.wait_until_ready()
        wait_for(cluster, is_complete)
        for seed in range(3):
            check(cluster, 900 + seed, seed=seed)
        check(cluster, 30, seed=10)
        shown = wait_for(cluster, lambda pool: len(collected(pool)) == 3)
        members = {member["name"] for member in shown["members"]}
        assert members == {cluster.program(name).url.removeprefix("http://") for name in ("long-0", "long-1")}
        for one in collected(shown):
            assert sum(chunk["tokens"] for chunk in one["chunks"]) == one["tokens"]
            assert {name for chunk in one["chunks"] for name in chunk["instances"]} == members
            assert one["compute_s"] > 0

        picture = tmp_path / "pool.png"
        url = cluster.program("coordinator").url
        arguments = ["--coordinator", url, "--out", str(picture)]
        parser = argparse.ArgumentParser()
        timeline.add_arguments(parser)
        assert timeline.run(parser.parse_args(arguments)) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert "3 prompts on 2 instances" in capsys.readouterr().out

        coordinator = cluster.program("coordinator")
        assert coordinator.pid is not None
        os.kill(coordinator.pid, signal.SIGKILL)
        check(cluster, 950, seed=20)
        wait_for(cluster, lambda pool: is_complete(pool) and not pool["recent"])
        assert cluster.program("coordinator").restarts == 1
        check(cluster, 950, seed=21)
        wait_for(cluster, lambda pool: len(collected(pool)) == 1)

        processes = cluster.processes()
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.wait(60) == 0
        assert wait_until_gone(processes, 0) == []
        assert "Traceback" not in cluster.output.read_text()

"""A real Prometheus, and promtool: Debian's, installed or unpacked by `tools/fetch_prometheus`."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.engines import free_port
from support.monitoring_files import documented_scrape

UNPACKED = Path.home() / ".cache/sglang-ext/prometheus"
READY_WITHIN_S = 30.0


def binary(name: str) -> str:
    """Path of `prometheus` or `promtool`; without it the test is skipped."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.skip(f"{name} is not there: `tools/fetch_prometheus`, or Debian's package prometheus")
    return found


class PrometheusServer:
    """One that is running."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of its API; AssertionError with its message for an error."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._url}{path}?{query}", timeout=30) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of an instant vector, now."""
        found = self.get("/api/v1/query", query=expression)
        assert found["resultType"] == "vector", expression
        return [(one["metric"], float(one["value"][1])) for one in found["result"]]

    def until_scraped(self, count: int, timeout_s: float = 30.0) -> None:
        """Wait until so many targets answer, and none does not."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            targets = self.get("/api/v1/targets", state="active")["activeTargets"]
            if len(targets) == count and all(one["health"] == "up" for one in targets):
                return
            assert time.monotonic() < deadline_s, [(one["scrapeUrl"], one["lastError"]) for one in targets]
            time.sleep(0.2)


@contextmanager
def running_prometheus(
    folder: Path, targets: Mapping[str, Mapping[str, str]], rules: Path
) -> Iterator[PrometheusServer]:
    """Scrapes each HOST:PORT twice a second, with labels of its own, and evaluates the rules."""
    port = free_port()
    configuration = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "400ms", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "sglang-ext",
                "static_configs": [{"targets": [one], "labels": dict(labels)} for one, labels in targets.items()],
                "metric_relabel_configs": documented_scrape()["metric_relabel_configs"],
            }
        ],
    }
    config_file = folder / "prometheus.yaml"
    config_file.write_text(yaml.safe_dump(configuration))
    command = [
        *("setpriv", "--pdeathsig", "KILL", binary("prometheus"), f"--config.file={config_file}"),
        *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    server = PrometheusServer(f"http://127.0.0.1:{port}")
    try:
        deadline_s = time.monotonic() + READY_WITHIN_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5):
                    break
            except OSError:
                text = (folder / "prometheus.log").read_text()
                assert process.poll() is None, text
                assert time.monotonic() < deadline_s, text
                time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()

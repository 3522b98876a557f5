"""What the product and SGLang expose to Prometheus: names of samples and their labels.

    declared = read_declared()      # {"sglang_ext_router_ttft_seconds_bucket": {"length_class", "le"}, ...}

The router's are those of docs/reference/metrics.md, which `test_metrics_page.py` holds against the router itself. The
instances' and the coordinator's are those that are registered, in a process of its own: a name registers once per
process. SGLang's are read from its source; which labels each of its metrics has cannot be read there.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
_ROW = re.compile(r"^\| `((?:sglang_ext_router|process)_\w+)` \| (counter|gauge|histogram) \|([^|]*)\|", re.MULTILINE)
_PARTS = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count"), "counter": ("_total",)}

Declared = dict[str, set[str]]


def samples_of(name: str, kind: str, labels: Iterable[str]) -> Declared:
    """Names of samples, with labels, of one metric."""
    base = name.removesuffix("_total") if kind == "counter" else name
    return {base + part: {*labels, *(("le",) if part == "_bucket" else ())} for part in _PARTS.get(kind, ("",))}


@functools.cache
def read_declared() -> Declared:
    """Of router, instances and coordinator."""
    found: Declared = {}
    for name, kind, labels in _ROW.findall((ROOT / "docs/reference/metrics.md").read_text()):
        found |= samples_of(name, kind, re.findall(r"`(\w+)`", labels))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "support.declared_metrics"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    for name, kind, labels in json.loads(done.stdout):
        found |= samples_of(name, kind, labels)
    return found


@functools.cache
def read_sglang() -> Declared:
    """Of SGLang. Every metric has the labels of all: any text in that source."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "srt/observability/metrics_collector.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    kinds = {"Gauge": "gauge", "Counter": "counter", "Histogram": "histogram", "Summary": "summary"}
    found: Declared = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).rpartition(".")[2].removeprefix("_")
        kind = next((kind for name, kind in kinds.items() if name.lower() in called.lower()), "")
        for keyword in node.keywords:
            if keyword.arg == "name" and isinstance(keyword.value, ast.Constant) and kind:
                found |= samples_of(str(keyword.value.value), kind, {*texts, "le"})
    return found


def _registered() -> list[tuple[str, str, tuple[str, ...]]]:
    """Of an instance's plugin and of the coordinator: name, kind and labels."""
    from prometheus_client import REGISTRY

    from sglang_ext.laps.sglang.metrics import PrometheusMetrics
    from sglang_ext.laps.sglang.stage_times import StageMetrics
    from sglang_ext.long_pool.coordinator.coordinator_server import _PoolCollector
    from sglang_ext.long_pool.coordinator.pool_history import PoolHistory
    from sglang_ext.long_pool.coordinator.tickets import OpenTickets
    from sglang_ext.transfer.sglang.metrics import TransferMetrics

    PrometheusMetrics()
    StageMetrics(0)
    TransferMetrics(receive_backends=1)
    registered = [one for one in REGISTRY._collector_to_names if hasattr(one, "_labelnames")]
    found = [(one._name, one._type, one._labelnames) for one in registered]
    status = SimpleNamespace(
        members=(), requests=(), cost_scale=1.0, arrivals_per_s=0.0, tickets_waiting=0, prompts_kept=0
    )
    protocol = SimpleNamespace(history=PoolHistory(), tickets=OpenTickets())
    pool = _PoolCollector(protocol, lambda: status)  # type: ignore[arg-type,return-value]
    return found + [(one.name, one.type, tuple(getattr(one, "_labelnames", ()))) for one in pool.collect()]


if __name__ == "__main__":
    print(json.dumps(_registered()))

"""The Helm chart for tests: its values and their schema, values laid over them, and rendering."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.manifests import Document

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/sglang-ext"
PACKAGES = ROOT / ".venv/charts"
needs_helm = pytest.mark.skipif(not (PACKAGES / "helm_python").is_dir(), reason="Helm is not there: `make charts-env`")


def values_schema() -> Document:
    found = json.loads((CHART / "values.schema.json").read_text())
    assert isinstance(found, dict)
    return found


def default_values() -> Document:
    found = yaml.safe_load((CHART / "values.yaml").read_text())
    assert isinstance(found, dict)
    return found


def merged(values: Document) -> Document:
    """As Helm lays values over the chart's own."""

    def lay(below: Document, above: Document) -> Document:
        result = copy.deepcopy(below)
        for key, value in above.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            if value is None and key in result:
                del result[key]
            else:
                result[key] = lay(result[key], value) if both else value
        return result

    return lay(default_values(), values)


def render(cases: list[Document]) -> list[Document]:
    """Helm in a process of its own, as it brings a runtime with threads."""
    done = subprocess.run(
        [sys.executable, "tools/render_chart.py", "--cases"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert isinstance(results, list)
    return results

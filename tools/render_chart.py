"""Renders the Helm chart: `python tools/render_chart.py` rewrites deploy/k8s, `--cases` renders what it is given.

Needs the folder of `make charts-env`. deploy/k8s is the chart's default, a file for each of its templates, for those
without Helm.

With `--cases` a JSON list of values comes by standard input, and a list of as many results goes to standard output:
`{"documents": [...], "problems": [...]}`, where problems are what Kubernetes' own schemas do not allow, or
`{"error": "..."}` for values that are refused. `--lint` prints what Helm finds wrong with the chart, a line for each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy/helm/sglang-ext"
RENDERED = ROOT / "deploy/k8s"
PACKAGES = ROOT / ".venv/charts"
KUBERNETES = "1.37"
LINT_WARNING = 2
# Kinds that a cluster has only with their controllers: `tests/support/custom_kinds.py` knows their fields.
NOT_OF_KUBERNETES = ("gateway.networking.k8s.io", ".x-k8s.io", "monitoring.coreos.com", "keda.sh")
HEADER = "# Rendered from deploy/helm/sglang-ext by tools/render_chart.py: change it there.\n"

Document = dict[str, Any]


def render(chart: Any, values: Document) -> dict[str, list[Document]]:
    """The documents of each template that renders to some, by its file's name. HelmError: the values are refused."""
    rendered = chart.render(values, name="sglang-ext", namespace="sglang-ext")
    files = {}
    for path, text in sorted(rendered.items()):
        documents = [one for one in yaml.safe_load_all(text) if one] if path.endswith(".yaml") else []
        if documents:
            files[Path(path).name] = documents
    return files


def problems(documents: list[Document]) -> list[str]:
    """Return what the schemas of Kubernetes do not allow. Of kinds that it does not have the pods' templates are looked
    at."""
    import kubernetes_validate

    found = []
    for document in documents:
        name = f"{document['kind']}/{document['metadata']['name']}"
        is_own_kind = document["apiVersion"].partition("/")[0].endswith(NOT_OF_KUBERNETES)
        looked_at = list(pod_templates(document)) if is_own_kind else [document]
        for one in looked_at:
            try:
                kubernetes_validate.validate(one, KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append(f"{name}: {'.'.join(map(str, error.path))}: {error.message}")
    return found


def pod_templates(document: Any) -> Iterator[Document]:
    """Yield what stands anywhere in it under `template`, `leaderTemplate` and the like, as the kind PodTemplate."""
    entries = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in entries:
        if not isinstance(value, (dict, list)):
            continue
        if isinstance(value, dict) and "containers" in value.get("spec", {}):
            yield {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": str(key)}, "template": value}
        else:
            yield from pod_templates(value)


def as_text(documents: list[Document]) -> str:
    """As it lies in deploy/k8s."""
    return HEADER + yaml.safe_dump_all(documents, sort_keys=False, width=120)


def main(arguments: list[str]) -> int:
    """Render, as the module says. Returns the exit status."""
    sys.path.insert(0, str(PACKAGES))
    try:
        import helm_python
    except ImportError:
        print("render_chart: Helm is not installed: `make charts-env`", file=sys.stderr)
        return 2
    chart = helm_python.Chart.load(str(CHART))
    if arguments == ["--cases"]:
        results: list[Document] = []
        for values in json.load(sys.stdin):
            try:
                documents = [one for of_file in render(chart, values).values() for one in of_file]
            except helm_python.HelmError as error:
                results.append({"error": str(error)})
            else:
                results.append({"documents": documents, "problems": problems(documents)})
        json.dump(results, sys.stdout)
        return 0
    if arguments == ["--lint"]:
        report = helm_python.lint(str(CHART), strict=True, kube_version=f"v{KUBERNETES}.0")
        found = [one["error"] for one in report["messages"] if one["severity"] >= LINT_WARNING] + report["errors"]
        print(*found, sep="\n", end="")
        return 1 if found else 0
    if arguments:
        print("usage: python tools/render_chart.py [--cases | --lint]", file=sys.stderr)
        return 2
    RENDERED.mkdir(exist_ok=True)
    for path in RENDERED.glob("*.yaml"):
        path.unlink()
    for name, documents in render(chart, {}).items():
        (RENDERED / name).write_text(as_text(documents), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Dashboard and alerts: the files are what the code writes, and name metrics and labels that there are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.declared_metrics import read_declared, read_sglang
from support.manifests import pods_of
from support.monitoring_files import ALERTS, DASHBOARD, alert_rules, documented_scrape, expressions, panels

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / ".venv/charts"
# What Prometheus adds to every series of a target.
TARGET_LABELS = {"namespace", "instance", "job", "pod"}
UNITS = {"s", "ms", "short", "reqps", "ops", "percentunit", "bytes"}
SELECTOR = re.compile(r"((?:sglang_ext|sglang:|process_)[\w:]*)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def wrong_names(expression: str) -> list[str]:
    """Metrics and labels of it that there are not."""
    declared = read_declared() | read_sglang()
    found, labels = [], set(TARGET_LABELS)
    for metric, matchers in SELECTOR.findall(re.sub(r'"[^"]*"', '""', expression)):
        if metric not in declared:
            found.append(metric)
            continue
        labels |= declared[metric]
        found += [
            f"{metric}: {label}" for label in MATCHER.findall(matchers) if label not in declared[metric] | TARGET_LABELS
        ]
    grouped = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")}
    return found + sorted(grouped - labels)


def test_the_files_are_what_the_code_writes() -> None:
    command = [sys.executable, "tools/render_monitoring.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_metric_and_label_is_there() -> None:
    wrong = {place: names for place, expression in expressions() if (names := wrong_names(expression))}
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("sum (rate(sglang_ext_router_request_total[5m]))", ["sglang_ext_router_request_total"]),
        ("sglang_ext_router_ttft_seconds", ["sglang_ext_router_ttft_seconds"]),
        ('sglang_ext_router_ttft_seconds_bucket{class="x"}', ["sglang_ext_router_ttft_seconds_bucket: class"]),
        ("sum by (phase) (sglang_ext:laps_window_seconds)", ["phase"]),
        ("sglang:token_used", ["sglang:token_used"]),
        ('sglang_ext:cdsp_chunks_total{sp_size="2", instance="i"}', []),
    ],
)
def test_a_name_that_is_not_there_is_noticed(expression: str, names: list[str]) -> None:
    assert wrong_names(expression) == names


def test_labels_of_legends_are_in_the_results() -> None:
    for panel in panels():
        for target in panel["targets"]:
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = {one.strip() for group in GROUPED.findall(target["expr"]) for one in group.split(",")}
            assert labels <= grouped, panel["title"]


def test_panels_are_complete_and_do_not_overlap() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    places: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places, panel["title"]
        assert place["x"] + place["w"] <= 24
        places |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["targets"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        assert all('namespace=~"$namespace"' in target["expr"] for target in panel["targets"])


def test_every_alert_tells_what_to_do() -> None:
    rules = alert_rules()
    names = [rule["alert"] for rule in rules]
    assert len(set(names)) == len(names)
    page = (ROOT / "docs/how-to/alerts.md").read_text()
    for rule in rules:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert len(rule["annotations"]["runbook"]) > 60
        assert f"## {rule['alert']}\n" in page
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert labels <= TARGET_LABELS | {one.strip() for g in GROUPED.findall(rule["expr"]) for one in g.split(",")}


def test_the_scrape_configuration_of_the_documentation_keeps_the_chart_s_ports() -> None:
    rules = documented_scrape()["relabel_configs"]
    assert {rule["target_label"] for rule in rules if "target_label" in rule} == {
        "namespace",
        "pod",
        "sglang_ext_io_pool",
    }
    by_port = next(rule for rule in rules if rule["source_labels"][-1].endswith("_port_name"))
    documents = [one for path in (ROOT / "deploy/k8s").glob("*.yaml") for one in yaml.safe_load_all(path.read_text())]
    kept = {(pods.component, port) for pods in pods_of(documents) for port in pods.ports}
    kept = {one for one in kept if re.fullmatch(by_port["regex"], ";".join(one))}
    assert kept == {("router", "metrics"), ("worker", "http"), ("coordinator", "http")}


def stored_name(name: str) -> str:
    """As Prometheus stores a sample after the documented rules."""
    for rule in documented_scrape()["metric_relabel_configs"]:
        if re.fullmatch(rule["regex"], name):
            name = re.sub(rule["regex"], re.sub(r"\$\{(\d)\}", r"\\\1", rule["replacement"]), name)
    return name


@pytest.mark.slow
def test_names_are_stored_as_they_are_declared() -> None:
    """Whether a colon came as one or as an underscore."""
    for name in read_declared() | read_sglang():
        assert stored_name(name) == name
        if not name.startswith("sglang_ext:cdsp_"):  # the coordinator sends text alone, where colons stay
            assert stored_name(name.replace(":", "_")) == name


@pytest.mark.skipif(not (PACKAGES / "promql_parser").is_dir(), reason="promql-parser is not there: `make charts-env`")
def test_every_expression_is_promql() -> None:
    sys.path.insert(0, str(PACKAGES))
    try:
        import promql_parser
    finally:
        sys.path.remove(str(PACKAGES))
    for place, expression in expressions():
        try:
            promql_parser.parse(expression.replace("$__rate_interval", "5m"))
        except ValueError as error:
            pytest.fail(f"{place}: {error}")
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (a) (rate(b[5m])")


@pytest.mark.slow
@pytest.mark.skipif(
    not (PACKAGES / "grafana_foundation_sdk").is_dir(), reason="Grafana's SDK is not there: `make charts-env`"
)
def test_grafana_knows_every_field() -> None:
    """Read by Grafana's own SDK and written again, the dashboard has all that it had, and the same."""
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from grafana_foundation_sdk.cog import encoder, plugins\n"
        "from grafana_foundation_sdk.models.dashboard import Dashboard\n"
        "plugins.register_default_plugins()\n"
        "print(encoder.JSONEncoder().encode(Dashboard.from_json(json.load(sys.stdin))))"
    )
    text = DASHBOARD.read_text()
    command = [sys.executable, "-c", program, str(PACKAGES)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert lost(json.loads(text), json.loads(done.stdout)) == []
    surplus = {**json.loads(text), "panel": []}
    done = subprocess.run(command, input=json.dumps(surplus), capture_output=True, text=True, timeout=60)
    assert lost(surplus, json.loads(done.stdout)) == [".panel"]


def lost(before: object, after: object, place: str = "") -> list[str]:
    """Places of `before` that `after` lacks or has otherwise."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            found
            for key, value in before.items()
            for found in (lost(value, after[key], f"{place}.{key}") if key in after else [f"{place}.{key}"])
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = zip(before, after, strict=True)
        return [found for index, pair in enumerate(pairs) for found in lost(*pair, f"{place}[{index}]")]
    return [] if before == after else [place]


def test_alerts_are_one_group() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    assert group["name"] == "sglang-ext"

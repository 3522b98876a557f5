"""The dashboard and the alert rules as they are shipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy/helm/sglang-ext/files"
DASHBOARD, ALERTS = FILES / "dashboard.json", FILES / "alerts.yaml"


def panels() -> list[dict[str, Any]]:
    """All of them, without the rows' headings."""
    return [one for one in json.loads(DASHBOARD.read_text())["panels"] if one["type"] != "row"]


def alert_rules() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    return rules


def documented_scrape() -> dict[str, Any]:
    """The only job of the scrape configuration in docs/how-to/monitoring.md."""
    text = (ROOT / "docs/how-to/monitoring.md").read_text()
    job: dict[str, Any]
    (job,) = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])["scrape_configs"]
    return job


def expressions() -> Iterator[tuple[str, str]]:
    """Where each stands, and the expression."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for rule in alert_rules():
        yield rule["alert"], rule["expr"]

"""Writes what Prometheus and Grafana need to watch a deployment: `python tools/render_monitoring.py [--check]`.

- `deploy/helm/sglang-ext/files/dashboard.json`: a Grafana dashboard, made of the rows of `dashboard_panels.py`;
- `deploy/helm/sglang-ext/files/alerts.yaml`: the alert rules of `alert_rules.py`, as Prometheus reads them;
- `docs/how-to/alerts.md`: what each alert means, and what to do.

`--check` writes nothing and names the files that are not what it would write (exit status 1).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import alert_rules
from dashboard_panels import ROUTER, ROWS, Panel

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "deploy/helm/sglang-ext/files"
ALERTS_PAGE = ROOT / "docs/how-to/alerts.md"

PANEL_COLUMNS, PANEL_LINES, DASHBOARD_COLUMNS = 8, 8, 24

Json = dict[str, Any]


def dashboard() -> Json:
    """As Grafana imports it."""
    return {
        "title": "sglang-ext",
        "uid": "sglang-ext",
        "description": "Routers, pools, phases of a request and the long pool. Made by tools/render_monitoring.py.",
        "tags": ["sglang-ext", "sglang"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "graphTooltip": 1,
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": list(_panels()),
    }


def _variables() -> list[Json]:
    everything = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "namespace",
            "label": "Namespace",
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": f"label_values({ROUTER}build_info, namespace)", "refId": "namespaces"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": everything,
        },
    ]


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panels() -> Iterator[Json]:
    """Rows one below the other, each with its panels from left to right."""
    number, line = 0, 0
    for row in ROWS:
        number += 1
        place = {"x": 0, "y": line, "w": DASHBOARD_COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}
        line += 1
        for position, panel in enumerate(row.panels):
            number += 1
            column, below = position * PANEL_COLUMNS % DASHBOARD_COLUMNS, position * PANEL_COLUMNS // DASHBOARD_COLUMNS
            place = {"x": column, "y": line + below * PANEL_LINES, "w": PANEL_COLUMNS, "h": PANEL_LINES}
            yield _panel(number, panel, place)
        line += -(-len(row.panels) * PANEL_COLUMNS // DASHBOARD_COLUMNS) * PANEL_LINES


def _panel(number: int, panel: Panel, place: Json) -> Json:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "gridPos": place,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": {"fillOpacity": 5, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "editorMode": "code",
                "range": True,
                "expr": target.expression,
                "legendFormat": target.legend,
            }
            for index, target in enumerate(panel.targets)
        ],
    }


def rendered() -> dict[Path, str]:
    """Every file, and what is to be in it."""
    return {
        FILES / "dashboard.json": json.dumps(dashboard(), indent=1) + "\n",
        FILES / "alerts.yaml": alert_rules.as_yaml(),
        ALERTS_PAGE: alert_rules.as_page(),
    }


def main(arguments: list[str]) -> int:
    """Write, or compare, as the module says. Returns the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: python tools/render_monitoring.py [--check]", file=sys.stderr)
        return 2
    status = 0
    for path, text in rendered().items():
        if not arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path.relative_to(ROOT)} is not what tools/render_monitoring.py writes: run it", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

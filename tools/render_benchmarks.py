"""Write `docs/benchmarks.md` and the figures of README.md from raw results: `python tools/render_benchmarks.py`.

`tools/benchmarks.template` is the page with a placeholder for each figure:

- `<!-- raw FILE [COMMAND] -->` names the file below `bench/results` that the placeholders behind it read. It becomes
  the machine, the date, the command (COMMAND where the file has none) and a link to the file. `<!-- use FILE -->` only
  names it;
- `{{PATH|FORMAT}}` is a figure of that file. PATH is keys and list positions, separated by `/`; `KEY=VALUE&KEY=VALUE`
  picks the first row of a list that has these values. `{{PATH : PATH|FORMAT}}` divides. `_FORMATS` lists the formats;
- the part between `<!-- short -->` and `<!-- /short -->` stands in README.md, too, between the same marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "tools/benchmarks.template"
DOCUMENT = ROOT / "docs/benchmarks.md"
README = ROOT / "README.md"
RESULTS = ROOT / "bench/results"
_SHORT = re.compile(r"<!-- short -->\n(.*?)<!-- /short -->\n", re.DOTALL)
_TOKEN = re.compile(r"<!-- (raw|use) (\S+?)(?: (.+?))? -->|\{\{(.+?)\|(\w+)\}\}")
_FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": lambda value: f"{value:,.0f}",
    "x": lambda value: f"{value:.2f}",
    "s": lambda value: f"{value:.2f} s",
    "s1": lambda value: f"{value:.1f} s",
    "ms": lambda value: f"{value:.3f} ms",
    "ms1": lambda value: f"{value:.1f} ms",
    "ms_of_s": lambda value: f"{value * 1e3:.0f} ms",
    "s_of_ms": lambda value: f"{value / 1e3:.2f} s",
    "us": lambda value: f"{value:,.0f} µs",
    "us1": lambda value: f"{value:.1f} µs",
    "ms_of_us": lambda value: f"{value / 1e3:.1f} ms",
    "us_of_s": lambda value: f"{value * 1e6:.1f} µs",
    "percent": lambda value: f"{value * 100:.1f}%",
    "off": lambda value: f"{(value - 1) * 100:+.0f}%",
    "gb": lambda value: f"{value / 1e9:.1f} GB/s",
    "tb": lambda value: f"{value / 1e12:.2f} TB/s",
    "tflops": lambda value: f"{value / 1e12:.0f} TFLOP/s",
}


def render() -> str:
    """Return the page."""
    raw: dict[str, Any] = {}

    def figure(match: re.Match[str]) -> str:
        nonlocal raw
        directive, name, command, path, kind = match.groups()
        if directive is None:
            values = [_read(raw, part.strip()) for part in path.split(" : ")]
            return _FORMATS[kind](values[0] / values[1] if len(values) == 2 else values[0])
        raw = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        return _source(raw, name, command) if directive == "raw" else ""

    made = f"<!-- made by `python tools/{Path(__file__).name}` from `tools/{TEMPLATE.name}` and `bench/results` -->\n"
    return made + _TOKEN.sub(figure, TEMPLATE.read_text(encoding="utf-8"))


def render_readme() -> str:
    """Return README.md with the page's short part, whose links lead from another folder."""
    (short,) = _SHORT.findall(render())
    block = f"<!-- short -->\n{short.replace('](../', '](')}<!-- /short -->\n"
    return _SHORT.sub(lambda _: block, README.read_text(encoding="utf-8"))


def _read(raw: Any, path: str) -> Any:
    value = raw
    for key in path.split("/"):
        if isinstance(value, dict):
            value = value[key]
        elif "=" in key:
            wanted = [part.split("=", 1) for part in key.split("&")]
            value = next(row for row in value if all(str(row[name]) == text for name, text in wanted))
        else:
            value = value[int(key)]
    return value


def _source(raw: dict[str, Any], name: str, command: str | None) -> str:
    machine = raw.get("machine")
    where = raw.get("device") or f"{machine['cores']} cores of an {machine['processor']}"
    where = where.replace("(R)", "").replace(" Processor", "").replace("1 cores", "1 core")
    (date,) = re.findall(r"\d{4}-\d\d-\d\d", name)
    run = raw.get("command", command).removeprefix(".venv/bin/").split(" --out ")[0]
    load = raw.get("other_load_cores", 0)
    beside = f", other programs took {load:.2f} cores" if load >= 0.1 else ""
    return f"{where}{beside}, {date}, `{run}`, [raw results](../bench/results/{name})."


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
    README.write_text(render_readme(), encoding="utf-8")

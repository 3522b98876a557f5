"""Write `docs/router-settings.md`, the settings of the router's file: `python tools/render_router_settings.py`."""

from __future__ import annotations

from pathlib import Path

from sglang_ext_router.command_line import sections

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "router-settings.md"
_HEAD = """# Settings of the router's file

<!-- made by `python tools/render_router_settings.py` -->

`sglang-ext router --config FILE` reads these settings from a YAML file, by section; `--set SECTION.KEY=VALUE` sets
one of them and wins over the file. Flags are in `sglang-ext router --help`.

```yaml
controller:
  interval_secs: 10
limits:
  max_connections: 20000
```
"""


def render() -> str:
    """Return the document's text."""
    parts = [_HEAD]
    for section, settings in sections().items():
        parts.append(f"\n## {section}\n\n| setting | default | |\n|---|---|---|\n")
        for key, entry in settings.items():
            default = entry.default
            shown = str(default).lower() if isinstance(default, bool) else str(default)
            parts.append(f"| `{key}` | {shown or 'none'} | {entry.metadata['help']} |\n")
    return "".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")

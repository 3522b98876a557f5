"""Write `docs/reference/command-line.md`, all commands' options and settings: `python tools/render_options.py`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_ext.cli import COMMANDS, Command
from sglang_ext.settings import REQUIRED, UNSET, Setting, sections

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reference" / "command-line.md"
_HEAD = """# Options and settings of all commands

<!-- made by `python tools/render_options.py` -->

What changes from start to start is an option of the command line. The rest are settings: by section in a YAML file, or
one by one with `--set SECTION.KEY=VALUE`, which wins over the file. Entries of a list have commas between them in
`--set`.

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
    for name, command in _commands():
        module = importlib.import_module(command.module)
        parser = argparse.ArgumentParser(add_help=False)
        module.add_arguments(parser)
        parts.append(f"\n## sglang-ext {name}\n\n{command.summary[0].upper()}{command.summary[1:]}.\n\n")
        parts.append("| option | default | |\n|---|---|---|\n")
        parts += [_option(action) for action in parser._actions if action.help != argparse.SUPPRESS]
        settings: Sequence[Setting] = getattr(module, "SETTINGS", ())
        for section, entries in sections(settings).items():
            parts.append(f"\n**Settings: `{section}`**\n\n| setting | default | |\n|---|---|---|\n")
            parts += [_row(f"`{setting.key}`", setting.default, _explained(setting)) for setting in entries.values()]
    return "".join(parts)


def _commands() -> Iterator[tuple[str, Command]]:
    for name, command in COMMANDS.items():
        if command.kinds:
            yield from ((f"{name} {kind}", its) for kind, its in command.kinds.items())
        else:
            yield name, command


def _option(action: argparse.Action) -> str:
    name = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
    what = action.help or ""
    if action.choices is not None:
        what += f" ({', '.join(map(str, action.choices))})"
    return _row(name, "" if action.required else action.default, what)


def _explained(setting: Setting) -> str:
    return setting.help + (f" ({', '.join(setting.choices)})" if setting.choices else "")


def _row(name: str, default: object, what: str) -> str:
    if default is REQUIRED:
        shown = "needed"
    elif (
        default is UNSET
        or default is None
        or default == ""
        or default == []
        or default == ()
        or default == argparse.SUPPRESS
    ):
        shown = ""
    else:
        shown = str(default).lower() if isinstance(default, bool) else str(default)
    return f"| {name} | {shown} | {what.replace('|', chr(92) + '|').replace('%%', '%')} |\n"


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")

"""Write `docs/reference/hooks.md`, every change to SGLang: `python tools/render_hooks.py`."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.engine.hook_table import HOOK_TABLE, Hook

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reference" / "hooks.md"
_HEAD = """# Hooks: what is changed in SGLang

<!-- made by `python tools/render_hooks.py` -->

`sglang-ext doctor` checks every row against the installed SGLang, and a worker refuses to start (exit status 3) where
one of its hooks is not in force ([how hooks hold](../explanation/engine.md#how-hooks-hold)). Targets are below
`sglang.srt`. The third column says in which engines a hook is: in all of them where it is empty.

| hook | target | engines | what SGLang does; what the hook does |
|---|---|---|---|
"""


def render() -> str:
    """Return the document's text."""
    return _HEAD + "".join(_row(hook) for hook in HOOK_TABLE)


def _row(hook: Hook) -> str:
    target = hook.target.removeprefix("sglang.srt.").replace("|", "\\|")
    return f"| `{hook.name}` | `{target}` ({hook.kind}) | {_engines(hook)} | {hook.why} |\n"


def _engines(hook: Hook) -> str:
    """Return the conditions under which an engine has the hook, as options and devices."""
    conditions = [
        "" if hook.device is None else f"on {'a CPU' if hook.device == 'cpu' else 'GPUs'}",
        "`--laps-mode` other than `off`" if hook.needs_laps else "",
        "`--laps-graphs`" if hook.needs_graphs else "",
        "KV leaves by layer" if hook.needs_streams else "",
        "`--pp-size` above 1" if hook.needs_stages else "",
        "`--transfer-backend handshake`" if hook.needs_handshake else "",
        {None: "", True: "`--cdsp-coordinator`", False: "no `--cdsp-coordinator`"}[hook.is_for_pools],
    ]
    return ", ".join(condition for condition in conditions if condition)


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")

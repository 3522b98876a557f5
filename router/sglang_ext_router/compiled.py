"""Whether the request path runs compiled, and from these sources."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_WITNESSES = ("sglang_ext_router.exchange", "sglang_ext_router.http1", "sglang_ext.policy.pd_exchange")


def describe() -> tuple[bool, str]:
    """(whether something is wrong, what to log)."""
    states = set()
    for name in _WITNESSES:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        origin = Path(spec.origin)
        if origin.suffix == ".py":
            states.add("plain")
            continue
        source = origin.parent / (name.rpartition(".")[2] + ".py")
        is_stale = source.exists() and source.stat().st_mtime > origin.stat().st_mtime
        states.add("stale" if is_stale else "compiled")
    if states == {"compiled"}:
        return False, "the request path is compiled"
    if states == {"plain"}:
        return False, "the request path is plain Python: `make env` compiles it"
    return True, "the compiled request path is older than its sources: run `make env`"

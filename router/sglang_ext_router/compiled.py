"""Reports whether the modules that run for every request are compiled, and from which sources.

Imports nothing that may be compiled, since a stale module would be loaded with it.
"""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

WITNESS = "sglang_ext_router.request.flow"
# Written by `tools/compile_hot_path.py`: source (package/module.py) → SHA-256. A wheel has none.
MANIFEST = Path(__file__).with_name("compiled_sources.json")


def describe_compiled() -> tuple[bool, str]:
    """Return whether compiled modules are stale, and one line about them."""
    # First: modules that were compiled from sources which have moved since shadow the present ones.
    if MANIFEST.exists():
        for source, digest in json.loads(MANIFEST.read_text()).items():
            if _digest(source) != digest:
                return True, f"the compiled request path is older than {source}: run `make compiled` or `make plain`"
    spec = find_spec(WITNESS)
    if spec is None or spec.origin is None or spec.origin.endswith(".py"):
        return False, "the request path is plain Python; `make compiled` makes it faster"
    return False, "the request path is compiled"


def _digest(source: str) -> str | None:
    package, _, rest = source.partition("/")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / rest
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None

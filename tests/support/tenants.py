"""A file of tenants whose key is the name of the tenant, and the headers of its clients."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def tenants_text(**tenants: dict[str, Any]) -> str:
    """The content of a file in which each tenant has one key, which is its name."""
    given = {name: {"keys": {name: key_hash(name)}, **options} for name, options in tenants.items()}
    return yaml.safe_dump({"tenants": given})


def tenants_file(folder: Path, **tenants: dict[str, Any]) -> str:
    path = folder / "tenants.yaml"
    path.write_text(tenants_text(**tenants))
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}

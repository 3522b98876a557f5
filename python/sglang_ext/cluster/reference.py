"""The settings of a cluster as a Markdown table, from the records' own metadata."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from sglang_ext.cluster.config import ClusterConfig

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def reference_table() -> str:
    """Return one row per setting: its path in the YAML file, its kind, its default and what it means."""
    rows = ["| setting | kind | default | meaning |", "|---|---|---|---|"]
    for path, kind, default, text in _settings(ClusterConfig, ""):
        rows.append(f"| `{path}` | {kind} | {default} | {text} |")
    return "\n".join(rows) + "\n"


def _settings(record: Any, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    hints = get_type_hints(record)
    is_pools = prefix == "pools."
    for position, entry in enumerate(fields(record)):
        hint = hints[entry.name]
        path = prefix + entry.name
        if not is_dataclass(hint):
            yield path, _kind(hint), _default(entry), entry.metadata["help"]
        elif not is_pools:
            yield from _settings(hint, f"{path}.")
        elif position == 0:
            # The pools have the same settings.
            yield from _settings(hint, "pools.ROLE.")


def _kind(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is types.UnionType:
        return _kind(next(option for option in get_args(hint) if option is not type(None)))
    if origin is tuple:
        return f"list of {_WORDS[get_args(hint)[0]]}{'' if get_args(hint)[0] is str else 's'}"
    if origin is Mapping:
        return "mapping of texts"
    return _WORDS[hint]


def _default(entry: Any) -> str:
    if entry.default_factory is not MISSING:
        return ""
    if entry.default is MISSING:
        return "required"
    if entry.default is None or entry.default == ():
        return ""
    return f"`{entry.default:g}`" if isinstance(entry.default, float) else f"`{entry.default}`"


if __name__ == "__main__":
    print(reference_table(), end="")

"""Frozen records from plain YAML values, by their type hints; each problem is named by its path.

Knows the shapes that configuration needs: numbers, text, flags, sequences of one scalar type, maps from
text to text, nested records, and any of them or nothing.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from sglang_ext.cluster.checks import ConfigError

Record = TypeVar("Record")


def read_record(record_type: type[Record], value: object, path: str = "") -> Record:
    """Build a `record_type` from a mapping. Raises ConfigError: unknown or missing key, or a wrong type."""
    if not isinstance(value, Mapping):
        raise ConfigError(path or "the file", f"must be a mapping of settings, not {_kind(value)}")
    known = {entry.name: entry for entry in fields(record_type)}  # type: ignore[arg-type]
    hints = get_type_hints(record_type)
    arguments: dict[str, Any] = {}
    for key, item in value.items():
        if key not in known:
            raise ConfigError(_join(path, str(key)), _unknown(str(key), list(known)))
        arguments[key] = _read(hints[key], item, _join(path, key))
    for name, entry in known.items():
        if name not in arguments and _is_required(entry):
            raise ConfigError(_join(path, name), "is missing")
    try:
        return record_type(**arguments)
    except ConfigError as error:
        raise ConfigError(_join(path, error.path), error.problem) from None


def write_record(record: object) -> dict[str, object]:
    """Return the plain values of `record` that differ from its defaults: `read_record` inverts it."""
    plain: dict[str, object] = {}
    for entry in fields(record):  # type: ignore[arg-type]
        value = getattr(record, entry.name)
        if _is_required(entry) or value != _default(entry):
            plain[entry.name] = _plain(value)
    return plain


def _plain(value: object) -> object:
    if is_dataclass(value):
        return write_record(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return value


def _read(hint: Any, value: object, path: str) -> object:
    if isinstance(hint, type) and is_dataclass(hint):
        return read_record(hint, value, path)
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        (inner,) = (option for option in get_args(hint) if option is not type(None))
        return None if value is None else _read(inner, value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(path, f"must be a list, not {_kind(value)}")
        inner = get_args(hint)[0]
        return tuple(_read_scalar(inner, item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(path, f"must be a mapping, not {_kind(value)}")
        return types.MappingProxyType(
            {str(key): str(_read_scalar(str, item, _join(path, str(key)))) for key, item in value.items()}
        )
    return _read_scalar(hint, value, path)


def _read_scalar(hint: type, value: object, path: str) -> object:
    # YAML reads `1` and `yes` as numbers and flags; where text is wanted, a number may stand for itself.
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        wanted = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[hint]
        raise ConfigError(path, f"must be {wanted}, not {_kind(value)}")
    return value


def _unknown(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    return f"unknown setting; {hint}"


def _is_required(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def _default(entry: Field[Any]) -> object:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _kind(value: object) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return f"{str(value).lower()} (quote it if text is meant)"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return repr(value)

"""A cluster's YAML file: read into a ClusterConfig, written from one, and its settings as a table.

Each mistake is one line that starts with the setting's path. `python -m sglang_ext.cluster.cluster_file` prints the
table of settings that the documentation holds.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from sglang_ext.cluster.config import ClusterConfig, ConfigError

Record = TypeVar("Record")


def load_cluster(path: Path) -> ClusterConfig:
    """Read a cluster from a YAML file. Raises ConfigError, one line that names the file or the setting."""
    return read_record(ClusterConfig, load_settings(path))


def load_settings(path: Path) -> dict[str, object]:
    """Read the file's mapping without resolving it, so that command-line options can replace parts."""
    try:
        contents = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError(str(path), f"is not valid YAML{where}: {problem}") from None
    if not isinstance(contents, dict):
        raise ConfigError(str(path), "must hold a mapping of settings")
    return contents


def dump_cluster(config: ClusterConfig) -> str:
    """Return YAML text with every setting that differs from its default; `load_cluster` inverts it."""
    return yaml.safe_dump(write_record(config), sort_keys=False, allow_unicode=True)


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
        if value is None:
            return None
        # Of a setting that may be text or a mapping, what is given decides.
        inner, *others = (option for option in get_args(hint) if option is not type(None))
        return _read(others[0] if others and isinstance(value, Mapping) else inner, value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(path, f"must be a list, not {_kind(value)}")
        inner = get_args(hint)[0]
        return tuple(_read_scalar(inner, item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(path, f"must be a mapping, not {_kind(value)}")
        if get_args(hint)[1] is Any:
            return types.MappingProxyType(dict(value))
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


_KIND_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def reference_table() -> str:
    """Return one row per setting: its path in the YAML file, its kind, its default and what it means."""
    rows = ["| setting | kind | default | meaning |", "|---|---|---|---|"]
    for path, kind, default, text in _rows(ClusterConfig, ""):
        rows.append(f"| `{path}` | {kind} | {default} | {text} |")
    return "\n".join(rows) + "\n"


def _rows(record: Any, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    hints = get_type_hints(record)
    is_pools = prefix == "pools."
    for position, entry in enumerate(fields(record)):
        hint = hints[entry.name]
        path = prefix + entry.name
        if not is_dataclass(hint):
            yield path, _kind_text(hint), _default_text(entry), entry.metadata["help"]
        elif not is_pools:
            yield from _rows(hint, f"{path}.")
        elif position == 0:
            # The pools have the same settings.
            yield from _rows(hint, "pools.ROLE.")


def _kind_text(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is types.UnionType:
        return " or ".join(_kind_text(option) for option in get_args(hint) if option is not type(None))
    if origin is tuple:
        return f"list of {_KIND_WORDS[get_args(hint)[0]]}{'' if get_args(hint)[0] is str else 's'}"
    if origin is Mapping:
        return "mapping" if get_args(hint)[1] is Any else "mapping of texts"
    return _KIND_WORDS[hint]


def _default_text(entry: Any) -> str:
    if entry.default_factory is not MISSING:
        return ""
    if entry.default is MISSING:
        return "required"
    if entry.default is None or entry.default == ():
        return ""
    return f"`{entry.default:g}`" if isinstance(entry.default, float) else f"`{entry.default}`"


if __name__ == "__main__":
    print(reference_table(), end="")

"""A cluster's YAML file: read into a ClusterConfig and written from one."""

from __future__ import annotations

from pathlib import Path

import yaml

from sglang_ext.cluster.checks import ConfigError
from sglang_ext.cluster.config import ClusterConfig
from sglang_ext.cluster.records import read_record, write_record


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

"""The file of tenants (`--tenants-file`) of the router and the batch service: limits and keys of each, as YAML."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from sglang_ext.key_hashes import ApiKeyFileError, KeyHashes, WatchedFile, read_key_file
from sglang_ext.types import DEFAULT_TENANT, PRIORITIES, TenantLimits

logger = logging.getLogger(__name__)

TENANT_HEADER = "x-sglang-ext-tenant"  # by which a tenant that may send for others names one of them
RATE_LIMIT_CODE = "rate_limit_exceeded"  # of a 429: a budget of the tenant is used up
TOO_LARGE_CODE = "request_too_large"  # of a 429: the request needs more than the budget ever holds
MAX_TENANTS = 1000  # each has series of its own in the metrics
MAX_LIMIT = 10**12
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_COUNTS = ("concurrency", "requests_per_minute", "tokens_per_minute")
_OPTIONS = ("weight", *_COUNTS, "max_priority", "sends_for_others", "keys")


class TenantsFile(NamedTuple):
    """The limits of each tenant, and the tenant of each key, by the SHA-256 of the key."""

    limits: dict[str, TenantLimits]
    tenants_by_hash: dict[bytes, str]


def read_tenants_file(path: str) -> TenantsFile:
    """Read a file of tenants. Raise ApiKeyFileError, which names the entry and shows no key, if it cannot be used."""
    text = read_key_file(path)
    try:
        return _read(_parsed(text))
    except ValueError as error:
        raise ApiKeyFileError(f"{path}: {error}") from None


class TenantKeys:
    """The tenants of a file that is read again when it changes. Keys are never logged."""

    def __init__(self, path: str) -> None:
        """Read the file. Raise ApiKeyFileError if it cannot be used."""
        self._path = path
        self._watched = WatchedFile(path)
        self._take(read_tenants_file(path))

    def _take(self, content: TenantsFile) -> None:
        self.limits = content.limits
        self._hashes = KeyHashes(content.tenants_by_hash)

    def find(self, key: bytes) -> str | None:
        """Return the name of the tenant that has this key; None if none has it."""
        return self._hashes.find(key)

    def reload(self, now_s: float) -> bool:
        """Read the file again if it has changed, and return whether it was taken.

        Where it cannot be used the reason is logged, and the tenants stay.
        """
        if not self._watched.has_changed(now_s):
            return False
        try:
            self._take(read_tenants_file(self._path))
        except ApiKeyFileError as error:
            logger.warning("the tenants stay what they were: %s", error)
            return False
        logger.info("%d tenants with %d keys read from %s", len(self.limits), len(self._hashes), self._path)
        return True


class _UniqueKeysLoader(yaml.SafeLoader):
    """Refuses a mapping in which a name stands twice: the first would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"line {node.start_mark.line + 1}: {_shown(name)} stands twice in one mapping")
        return super().construct_mapping(node, deep)


def _parsed(text: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeysLoader)
    except yaml.MarkedYAMLError as error:  # whose text may show a part of the file
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"it is not YAML{line}") from None
    except yaml.YAMLError:
        raise ValueError("it is not YAML") from None


def _read(content: Any) -> TenantsFile:
    given = content.get("tenants") if isinstance(content, dict) else None
    if not isinstance(given, dict) or not given:
        raise ValueError("it must hold a mapping `tenants` from the name of each tenant to its options")
    for name in content:
        if name != "tenants":
            raise ValueError(f"there is no section {_shown(name)}; the only one is tenants")
    if len(given) > MAX_TENANTS:
        raise ValueError(f"{len(given)} tenants are more than {MAX_TENANTS}")
    limits: dict[str, TenantLimits] = {}
    tenants_by_hash: dict[bytes, str] = {}
    owners: dict[bytes, str] = {}
    for name, options in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"tenant {_shown(name)}: a name has 1 to 64 letters, digits and . _ @ -")
        options = {} if options is None else options
        if not isinstance(options, dict):
            raise ValueError(f"tenant {name}: its options must be a mapping")
        limits[name] = _read_limits(name, options)
        for key_name, digest in _read_keys(name, options.get("keys")).items():
            if digest in owners:
                raise ValueError(f"tenant {name}: key {key_name} is the same as {owners[digest]}")
            owners[digest] = f"key {key_name} of tenant {name}"
            tenants_by_hash[digest] = name
    if not tenants_by_hash:
        raise ValueError("no tenant has a key")
    return TenantsFile({DEFAULT_TENANT: TenantLimits(DEFAULT_TENANT), **limits}, tenants_by_hash)


def _read_limits(name: str, options: Mapping[Any, Any]) -> TenantLimits:
    for option in options:
        if option not in _OPTIONS:
            raise ValueError(f"tenant {name}: there is no option {_shown(option)}; known are {', '.join(_OPTIONS)}")
    weight = options.get("weight", 1.0)
    if not _is_number(weight) or not 0 < weight <= MAX_LIMIT:
        raise ValueError(f"tenant {name}: weight must be a number greater than 0")
    counts: dict[str, int] = {}
    for option in _COUNTS:
        count = options.get(option, 0)
        if type(count) is not int or not 0 <= count <= MAX_LIMIT:
            raise ValueError(f"tenant {name}: {option} must be a whole number of at least 0 (0: no limit)")
        counts[option] = count
    priority = options.get("max_priority", PRIORITIES[0])
    if priority not in PRIORITIES:
        raise ValueError(f"tenant {name}: max_priority must be one of {', '.join(PRIORITIES)}")
    sends_for_others = options.get("sends_for_others", False)
    if type(sends_for_others) is not bool:
        raise ValueError(f"tenant {name}: sends_for_others must be true or false")
    return TenantLimits(name, float(weight), max_priority=priority, sends_for_others=sends_for_others, **counts)


def _read_keys(name: str, given: Any) -> dict[str, bytes]:
    keys = {} if given is None else given
    if not isinstance(keys, dict):
        raise ValueError(f"tenant {name}: keys must be a mapping from a name to the SHA-256 of a key in hexadecimal")
    read: dict[str, bytes] = {}
    for key_name, digits in keys.items():
        if not isinstance(key_name, str) or not _NAME.fullmatch(key_name):
            raise ValueError(f"tenant {name}: the name of a key has 1 to 64 letters, digits and . _ @ -")
        if not isinstance(digits, str) or not _HASH.fullmatch(digits):
            raise ValueError(f"tenant {name}: key {key_name} is not a SHA-256 in 64 hexadecimal digits")
        read[key_name] = bytes.fromhex(digits)
    return read


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(name: Any) -> str:
    return repr(str(name)[:64])

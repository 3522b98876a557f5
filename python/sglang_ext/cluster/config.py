"""The configuration of a cluster, resolved once into frozen records; field metadata is the reference text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_ext.types import LengthClass, Role
from sglang_ext_router.decide.length_classes import parse_length_classes


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line that starts with the setting's path."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


def parse_id_set(text: str, path: str) -> frozenset[int]:
    """Parse a set such as "0-3,8" into its numbers; ConfigError names `path` otherwise."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(path, f"{text!r} is not a set of numbers such as 0-3,8")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def check_at_least(path: str, value: int, minimum: int) -> None:
    """Refuse a number below `minimum`."""
    if value < minimum:
        raise ConfigError(path, f"must be at least {minimum}, not {value}")


def check_positive(path: str, value: float) -> None:
    """Refuse zero, negative, infinite and undefined durations."""
    if not 0 < value < float("inf"):
        raise ConfigError(path, f"must be greater than 0, not {value}")


def check_port(path: str, value: int) -> None:
    """Refuse what is no TCP port; 0 stands for any free one."""
    if not 0 <= value <= 65535:
        raise ConfigError(path, f"{value} is not a port (0 to 65535)")


def check_choice(path: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is not among `choices`."""
    if value not in choices:
        raise ConfigError(path, f"{value!r} is not one of {', '.join(choices)}")


_ROUTER_PORT_OPTIONS = ("--metrics-port", "--ui-port", "--peer-port")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def _no_variables() -> Mapping[str, str]:
    return MappingProxyType({})


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The instances of one role; they differ only in their ports."""

    count: int = field(metadata=_help("instances"), default=1)
    tp: int = field(metadata=_help("tensor-parallel ranks of each instance"), default=1)
    pp: int = field(
        metadata=_help("pipeline stages of each prefill instance, each with this many tensor-parallel ranks"), default=1
    )
    dcp: int = field(
        metadata=_help(
            "KV-parallel decode: this many of the `tp` ranks of each decode instance divide a sequence's KV among them "
            "(only GPUs and latent attention; SGLang's --dcp-size)"
        ),
        default=1,
    )
    ports: tuple[int, ...] = field(
        metadata=_help("HTTP port of each instance; 0 or left out: a free one is picked"), default=()
    )
    bootstrap_ports: tuple[int, ...] = field(
        metadata=_help("port of each prefill instance's bootstrap server; 0 or left out: a free one is picked"),
        default=(),
    )
    threads: int | None = field(
        metadata=_help("OMP threads of each rank; left out: the machine's cores shared out evenly, at least 1"),
        default=None,
    )
    cores: tuple[str, ...] = field(
        metadata=_help('CPU cores of each instance, such as ["0-3", "4-7"]; left out: not pinned'), default=()
    )
    gpus: tuple[str, ...] = field(
        metadata=_help('GPUs of each instance, such as ["0", "1,2"]; left out: consecutive ones'), default=()
    )
    args: tuple[str, ...] = field(metadata=_help("further SGLang server arguments of these instances"), default=())
    worker_args: tuple[str, ...] = field(
        metadata=_help("further options of `sglang-ext worker` for these instances"), default=()
    )
    env: Mapping[str, str] = field(
        metadata=_help("further environment variables of these instances"), default_factory=_no_variables
    )

    def __post_init__(self) -> None:
        check_at_least("count", self.count, 0)
        check_at_least("tp", self.tp, 1)
        check_at_least("pp", self.pp, 1)
        check_at_least("dcp", self.dcp, 1)
        if self.tp % self.dcp:
            raise ConfigError("dcp", f"is {self.dcp}, of which tp {self.tp} is not a multiple")
        if self.threads is not None:
            check_at_least("threads", self.threads, 1)
        for name in ("ports", "bootstrap_ports"):
            values: tuple[int, ...] = getattr(self, name)
            for position, port in enumerate(values):
                check_port(f"{name}[{position}]", port)
            if len(values) > self.count:
                raise ConfigError(name, f"{len(values)} ports for a pool of {self.count}")
        for name in ("cores", "gpus"):
            sets: tuple[str, ...] = getattr(self, name)
            if sets and len(sets) != self.count:
                raise ConfigError(name, f"{len(sets)} entries for a pool of {self.count}")
            for position, text in enumerate(sets):
                parse_id_set(text, f"{name}[{position}]")
        for position, text in enumerate(self.gpus):
            gpu_count = len(parse_id_set(text, f"gpus[{position}]"))
            if gpu_count != self.ranks:
                stages = f" and pp {self.pp}" if self.pp > 1 else ""
                raise ConfigError(f"gpus[{position}]", f"{gpu_count} GPUs for tp {self.tp}{stages}")

    @property
    def ranks(self) -> int:
        """Return the ranks of each instance, each with a device or threads of its own."""
        return self.tp * self.pp

    def port_of(self, index: int) -> int:
        """Return the HTTP port asked for by instance `index`, 0 for any."""
        return self.ports[index] if index < len(self.ports) else 0

    def bootstrap_port_of(self, index: int) -> int:
        """Return the bootstrap port asked for by instance `index`, 0 for any."""
        return self.bootstrap_ports[index] if index < len(self.bootstrap_ports) else 0


_EMPTY_POOL = PoolConfig(count=0)


@dataclass(frozen=True, slots=True)
class PoolsConfig:
    """One pool per role; an absent pool has no instances."""

    short: PoolConfig = field(metadata=_help("prefill of short prompts"), default=_EMPTY_POOL)
    long: PoolConfig = field(metadata=_help("prefill of long prompts"), default=_EMPTY_POOL)
    both: PoolConfig = field(
        metadata=_help("prefill of all prompts; with a coordinator long ones are shared among these instances"),
        default=_EMPTY_POOL,
    )
    decode: PoolConfig = field(metadata=_help("decode"), default=_EMPTY_POOL)
    plain: PoolConfig = field(
        metadata=_help("undivided: each instance prefills and decodes whole requests, with other pools or without"),
        default=_EMPTY_POOL,
    )

    @property
    def member_count(self) -> int:
        """Return how many instances can share long prompts: all that serve some."""
        return sum(pool.count for role, pool in self.by_role() if role.serves(LengthClass.LONG))

    def by_role(self) -> Iterator[tuple[Role, PoolConfig]]:
        """Yield (role, pool), prefill first, in a fixed order."""
        yield Role.SHORT, self.short
        yield Role.LONG, self.long
        yield Role.BOTH, self.both
        yield Role.DECODE, self.decode
        yield Role.PLAIN, self.plain

    def __post_init__(self) -> None:
        prefills = sum(pool.count for role, pool in self.by_role() if role.is_prefill)
        is_divided = bool(prefills or self.decode.count or not self.plain.count)
        if is_divided and self.decode.count < 1:
            raise ConfigError("decode.count", "a cluster needs at least one decode instance")
        if is_divided and not prefills:
            raise ConfigError("short.count", "a cluster needs at least one prefill instance: --prefill 1")
        for role, pool in self.by_role():
            if pool.bootstrap_ports and not role.is_prefill:
                raise ConfigError(f"{role}.bootstrap_ports", "only prefill instances have a bootstrap server")
            if pool.pp > 1 and not role.is_prefill:
                raise ConfigError(f"{role}.pp", "only prefill runs in pipeline stages")
            if pool.dcp > 1 and role is not Role.DECODE:
                raise ConfigError(f"{role}.dcp", "only decode divides KV among ranks")


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The coordinator of the long pool; `args` takes every further option of `sglang-ext coordinator`."""

    enabled: bool = field(
        metadata=_help(
            "instances that serve long prompts share them: a coordinator is started, and they connect to it"
        ),
        default=False,
    )
    port: int = field(
        metadata=_help("port that the coordinator's members connect to; 0: a free one is picked"), default=0
    )
    http_port: int = field(metadata=_help("port of its /status and /metrics; 0: a free one is picked"), default=0)
    args: tuple[str, ...] = field(metadata=_help("further arguments of the coordinator"), default=())
    env: Mapping[str, str] = field(
        metadata=_help("further environment variables of the coordinator"), default_factory=_no_variables
    )

    def __post_init__(self) -> None:
        check_port("port", self.port)
        check_port("http_port", self.http_port)


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The router's own part; `args` takes every further option of `sglang-ext router`."""

    host: str = field(metadata=_help("address that the router listens on"), default="127.0.0.1")
    port: int = field(metadata=_help("port that the router listens on; 0: a free one is picked"), default=30000)
    length_boundary_tokens: int = field(
        metadata=_help(
            "a prefill of at most this many new tokens is short, a larger one long; 0: what the prefill instances find"
        ),
        default=0,
    )
    length_classes: str | Mapping[str, Any] | None = field(
        metadata=_help(
            "more than two length classes, as a mapping or as the YAML file that holds it; instances are named as "
            "their logs are: both-0, decode-1"
        ),
        default=None,
    )
    api_key: str | None = field(metadata=_help("key that clients must send; left out: none is asked for"), default=None)
    api_keys_file: str | None = field(
        metadata=_help("file of several clients' keys, lines NAME:SHA256-HEX of the key"), default=None
    )
    tenants_file: str | None = field(
        metadata=_help("YAML file of tenants, with the keys, weight and limits of each"), default=None
    )
    usage_db: str | None = field(
        metadata=_help(
            "SQLite file for the tenants' usage and budgets; left out: usage.db in the cluster's folder, if there are "
            "tenants"
        ),
        default=None,
    )
    admin_api_key: str | None = field(
        metadata=_help("key for changing instances; left out: one is made at every start"), default=None
    )
    args: tuple[str, ...] = field(metadata=_help("further arguments of the router"), default=())
    env: Mapping[str, str] = field(
        metadata=_help("further environment variables of the router"), default_factory=_no_variables
    )

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host", "must not be empty")
        for name in ("length_classes", "api_key", "api_keys_file", "tenants_file", "usage_db", "admin_api_key"):
            if getattr(self, name) == "":
                raise ConfigError(name, "must not be empty")
        for name in ("length_classes", "api_keys_file", "tenants_file"):
            file = getattr(self, name)
            if isinstance(file, str) and not Path(file).is_file():
                raise ConfigError(name, f"{file} is not a file")
        if isinstance(self.length_classes, Mapping):
            try:
                parse_length_classes(dict(self.length_classes))
            except ValueError as error:
                raise ConfigError("length_classes", str(error)) from None
        if self.usage_db is not None and self.tenants_file is None:
            raise ConfigError("usage_db", "needs router.tenants_file")
        check_port("port", self.port)
        check_at_least("length_boundary_tokens", self.length_boundary_tokens, 0)


@dataclass(frozen=True, slots=True)
class StartSettings:
    """Describes how the cluster is brought up."""

    timeout_s: float = field(metadata=_help("longest wait for one instance to become healthy"), default=300.0)
    parallel: int | None = field(
        metadata=_help("instances that start at a time; left out: twice the cores, or 1 where instances share a GPU"),
        default=None,
    )
    method: str = field(
        metadata=_help(
            "fork: CPU instances are forked from one process that has imported SGLang, in seconds; "
            "spawn: each imports it again"
        ),
        default="fork",
    )

    def __post_init__(self) -> None:
        check_choice("method", self.method, ("fork", "spawn"))
        check_positive("timeout_s", self.timeout_s)
        if self.parallel is not None:
            check_at_least("parallel", self.parallel, 1)


@dataclass(frozen=True, slots=True)
class LivenessSettings:
    """Describes when a program that is ready counts as frozen: killed, and started again like a program that died.

    A program is alive if its server process answers anything at all, for which SGLang's scheduler is not asked.
    """

    interval_s: float = field(metadata=_help("time between liveness checks of a program that is ready"), default=2.0)
    timeout_s: float = field(metadata=_help("longest wait for the answer to one"), default=5.0)
    misses: int = field(
        metadata=_help("unanswered ones in a row after which a program is frozen and killed; 0: it is left"), default=3
    )

    def __post_init__(self) -> None:
        check_positive("interval_s", self.interval_s)
        check_positive("timeout_s", self.timeout_s)
        check_at_least("misses", self.misses, 0)


@dataclass(frozen=True, slots=True)
class StopSettings:
    """Describes how the cluster is taken down: the router drains, then the instances end."""

    drain_s: float = field(metadata=_help("longest wait for running requests to end"), default=30.0)
    grace_s: float = field(metadata=_help("wait between asking an instance to end and killing it"), default=15.0)

    def __post_init__(self) -> None:
        check_positive("drain_s", self.drain_s)
        check_positive("grace_s", self.grace_s)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A whole cluster. Durations in seconds."""

    model: str = field(
        metadata=_help("folder or Hugging Face name of the model, or smollm2 for the demonstration model")
    )
    pools: PoolsConfig = field(metadata=_help("the instances"))
    name: str = field(metadata=_help("name of the cluster: its folder is RUN_DIR/NAME"), default="default")
    run_dir: str = field(metadata=_help("where clusters keep their logs and state"), default="run")
    host: str = field(metadata=_help("address that the instances listen on"), default="127.0.0.1")
    device: str = field(metadata=_help("auto, cpu or cuda; auto: cuda where the machine has a GPU"), default="auto")
    served_model_name: str | None = field(
        metadata=_help("name of the model in the API; left out: the last part of `model`"), default=None
    )
    args: tuple[str, ...] = field(metadata=_help("further SGLang server arguments of every instance"), default=())
    worker_args: tuple[str, ...] = field(
        metadata=_help("further options of `sglang-ext worker` for every instance"), default=()
    )
    env: Mapping[str, str] = field(
        metadata=_help("further environment variables of every instance"), default_factory=_no_variables
    )
    router: RouterSettings = field(metadata=_help("the router"), default=RouterSettings())
    coordinator: CoordinatorConfig = field(metadata=_help("the long pool's"), default=CoordinatorConfig())
    start: StartSettings = field(metadata=_help("bringing it up"), default=StartSettings())
    liveness: LivenessSettings = field(metadata=_help("keeping it up"), default=LivenessSettings())
    stop: StopSettings = field(metadata=_help("taking it down"), default=StopSettings())
    restart: str = field(
        metadata=_help("on-failure: an instance that dies or is frozen is started again; never: it is left"),
        default="on-failure",
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model", "must not be empty")
        if not _NAME.fullmatch(self.name):
            raise ConfigError("name", f"{self.name!r} must be letters, digits, '.', '_' and '-'")
        if not self.host:
            raise ConfigError("host", "must not be empty")
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_choice("restart", self.restart, ("never", "on-failure"))
        if self.coordinator.enabled and not self.pools.member_count:
            raise ConfigError("coordinator.enabled", "there are no instances that could share long prompts")
        if self.coordinator.enabled and self.pools.decode.dcp > 1:
            reason = "is {}, and instances that share prompts send KV by handshake, which sends every rank all of it"
            raise ConfigError("pools.decode.dcp", reason.format(self.pools.decode.dcp))
        for role, pool in self.pools.by_role():
            if self.coordinator.enabled and role.serves(LengthClass.LONG) and pool.pp > 1:
                raise ConfigError(
                    f"pools.{role}.pp", f"is {pool.pp}, and an instance that shares prompts has all layers"
                )
        self._check_ports_differ()

    @property
    def folder(self) -> Path:
        """Return the folder of this cluster's logs and state."""
        return Path(self.run_dir) / self.name

    def given_ports(self) -> Iterator[tuple[str, int]]:
        """Yield the path of each setting that names a port, and the port; those of the router's arguments last."""
        given = [("router.port", self.router.port)]
        if self.coordinator.enabled:
            given.append(("coordinator.port", self.coordinator.port))
            given.append(("coordinator.http_port", self.coordinator.http_port))
        for role, pool in self.pools.by_role():
            given += [(f"pools.{role}.ports[{i}]", port) for i, port in enumerate(pool.ports)]
            given += [(f"pools.{role}.bootstrap_ports[{i}]", port) for i, port in enumerate(pool.bootstrap_ports)]
        words = self.router.args
        for position, word in enumerate(words):
            option, equals, value = word.partition("=")
            if option in _ROUTER_PORT_OPTIONS:
                text = value if equals else "".join(words[position + 1 : position + 2])
                given.append((f"router.args[{position}]", int(text) if text.isdecimal() else 0))
        return ((path, port) for path, port in given if port)

    def _check_ports_differ(self) -> None:
        seen: dict[int, str] = {}
        for path, port in self.given_ports():
            if port in seen:
                raise ConfigError(path, f"port {port} is already taken by {seen[port]}")
            seen[port] = path

"""The programs of a cluster: command lines, environments and addresses, from a configuration and ports."""

from __future__ import annotations

import copy
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from sglang_ext.cluster.config import ClusterConfig, ConfigError, PoolConfig, parse_id_set
from sglang_ext.cluster.fork_client import WORKER_COMMAND
from sglang_ext.cluster.model import PreparedModel
from sglang_ext.cluster.state import POOL_KEY_FILE, USAGE_FILE
from sglang_ext.engine.device import cuda_device_count, torch_has_cuda
from sglang_ext.engine.launch_plan import ROLE_SWITCH_FLAG, last_value, shared_cpu_environment
from sglang_ext.types import LengthClass, Role
from sglang_ext_router.length_classes_file import json_or_yaml

ROUTER_NAME = "router"
COORDINATOR_NAME = "coordinator"
HIDDEN = "[hidden]"
SHARED_MEMORY_FRACTION = 0.8  # of a GPU that several instances share; the rest is for activations and graphs
ADMIN_KEY_VARIABLE = "SGLANG_EXT_ADMIN_API_KEY"
# The router's options that hold a key: other users of the machine can read a command line, but no environment.
_KEY_OPTIONS = {
    "--api-key": "SGLANG_EXT_API_KEY",
    "--worker-api-key": "SGLANG_EXT_WORKER_API_KEY",
    "--admin-api-key": ADMIN_KEY_VARIABLE,
}


@dataclass(frozen=True, slots=True)
class Host:
    """Facts of the machine that the plan depends on."""

    core_ids: frozenset[int]
    gpu_count: int  # GPUs that the installed torch can use


@dataclass(frozen=True, slots=True)
class Program:
    """One program to run: an instance, the coordinator or the router."""

    name: str  # unique in the cluster: short-0, decode-1, coordinator, router
    command: tuple[str, ...]
    env: Mapping[str, str]  # added to the supervisor's own
    cores: frozenset[int] | None  # None: not pinned
    url: str
    ready_path: str
    role: Role | None  # None: no instance
    bootstrap_port: int | None  # of prefill instances, and of instances that may become one


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Everything that the supervisor starts, in order."""

    instances: tuple[Program, ...]
    router: Program
    start_parallel: int
    admin_key: str
    model_name: str
    page_url: str | None = None  # the router's live page; None: it is off
    coordinator: Program | None = None  # None: long instances do not share prompts
    # Where the key is to be that they and the coordinator prove to each other; None: there is none, or it is given.
    pool_key_file: Path | None = None
    usage_file: Path | None = None  # of the tenants; None: there are no tenants, or it is given
    # What the instances have in common, where they are forked from one process; None: each imports SGLang itself.
    fork_environment: Mapping[str, str] | None = None

    @property
    def backends(self) -> tuple[Program, ...]:
        """Return all that has to be there before the router is ready."""
        return self.instances if self.coordinator is None else (self.coordinator, *self.instances)

    def with_files_in(self, folder: Path) -> ClusterPlan:
        """Return the plan with the cluster's own files in another folder; files that the configuration names stay."""
        moves = {file: folder / file.name for file in (self.pool_key_file, self.usage_file) if file is not None}
        if not moves:
            return self
        words = {str(before): str(after) for before, after in moves.items()}

        def moved(program: Program) -> Program:
            return replace(program, command=tuple(words.get(word, word) for word in program.command))

        return replace(
            self,
            pool_key_file=None if self.pool_key_file is None else moves[self.pool_key_file],
            usage_file=None if self.usage_file is None else moves[self.usage_file],
            coordinator=None if self.coordinator is None else moved(self.coordinator),
            instances=tuple(moved(program) for program in self.instances),
            router=moved(self.router),
        )

    def shell_lines(self) -> Iterator[str]:
        """Yield each program as a line for a shell, keys hidden."""
        for program in (*self.backends, self.router):
            words = [f"{name}={HIDDEN if is_secret(name) else value}" for name, value in program.env.items()]
            if program.cores is not None:
                words += ["taskset", "-c", ",".join(map(str, sorted(program.cores)))]
            words += program.command
            yield shlex.join(words)


def is_secret(variable: str) -> bool:
    """Return whether an environment variable holds a key."""
    return variable.endswith("API_KEY")


def admin_key_of(config: ClusterConfig) -> str | None:
    """The administrator's key that the configuration names; None where it names none."""
    _, keys = _take_keys(config.router.args)
    return keys.get(ADMIN_KEY_VARIABLE) or config.router.admin_api_key or config.router.env.get(ADMIN_KEY_VARIABLE)


def find_machine() -> Host:
    """Look at the cores that this process may use and the GPUs that are there."""
    return Host(
        core_ids=frozenset(os.sched_getaffinity(0)),
        gpu_count=cuda_device_count() if torch_has_cuda() else 0,
    )


def resolve_device(config: ClusterConfig, machine: Host) -> str:
    """Return cpu or cuda. Raises ConfigError for cuda without a GPU."""
    if config.device == "cuda" and machine.gpu_count == 0:
        raise ConfigError("device", "is cuda, but no GPU can be used here (driver, or torch without CUDA)")
    if config.device == "auto":
        return "cuda" if machine.gpu_count else "cpu"
    return config.device


def count_ports(config: ClusterConfig) -> int:
    """Return how many ports have to be picked: the ports that the configuration leaves open."""
    open_ports = int(config.router.port == 0)
    if config.coordinator.enabled:
        open_ports += [config.coordinator.port, config.coordinator.http_port].count(0)
    for role, pool in config.pools.by_role():
        open_ports += sum(pool.port_of(i) == 0 for i in range(pool.count))
        if _has_bootstrap_server(config, role, pool):
            open_ports += sum(pool.bootstrap_port_of(i) == 0 for i in range(pool.count))
    return open_ports


def _has_bootstrap_server(config: ClusterConfig, role: Role, pool: PoolConfig) -> bool:
    """Return whether decode finds an instance of this role by a port of its own, now or once it has become prefill."""
    return role.is_prefill or (role is Role.DECODE and ROLE_SWITCH_FLAG in (*config.args, *pool.args))


def make_plan(
    config: ClusterConfig, *, model: PreparedModel, machine: Host, free_ports: list[int], admin_key: str
) -> ClusterPlan:
    """Lay out the whole cluster.

    `free_ports` holds at least `count_ports(config)` ports. Raises ConfigError for cores or GPUs that the
    machine lacks.
    """
    ports = iter(free_ports)
    device = resolve_device(config, machine)
    if config.pools.decode.dcp > 1 and device != "cuda":
        raise ConfigError("pools.decode.dcp", f"is {config.pools.decode.dcp}, which SGLang has only for GPUs")
    model_name = config.served_model_name or model.name
    rank_count = sum(pool.count * pool.ranks for _, pool in config.pools.by_role())
    threads = max(1, len(machine.core_ids) // rank_count)
    coordinator: Program | None = None
    pool_key_file: Path | None = None
    transfer_options: tuple[str, ...] = ()
    member_options: tuple[str, ...] = ()
    if config.coordinator.enabled:
        # Its members send what they compute straight to decode, each its own part.
        transfer_options = ("--transfer-backend", "handshake")
        if device == "cuda":
            transfer_options += ("--transfer-transport", "nixl")  # which moves a GPU's memory
        settings = config.coordinator
        port, http_port = settings.port or next(ports), settings.http_port or next(ports)
        if last_value(settings.args, "--key-file") is None:
            pool_key_file = config.folder.resolve() / POOL_KEY_FILE
            member_options = ("--cdsp-key-file", str(pool_key_file))
        coordinator = _coordinator(config, port, http_port, pool_key_file)
        member_options = ("--cdsp-coordinator", f"{_url_host(_reachable(config.host))}:{port}", *member_options)
    gpus_of = _assign_gpus(config, machine) if device == "cuda" else {}
    gpu_users = Counter(gpu for gpus in gpus_of.values() for gpu in gpus)
    instances: list[Program] = []
    for role, pool in config.pools.by_role():
        for index in range(pool.count):
            path = f"pools.{role}"
            env = {**config.env, **pool.env}
            if device == "cuda":
                env.setdefault("CUDA_VISIBLE_DEVICES", ",".join(gpus_of[role, index]))
            port = pool.port_of(index) or next(ports)
            has_bootstrap_server = _has_bootstrap_server(config, role, pool)
            bootstrap_port = (pool.bootstrap_port_of(index) or next(ports)) if has_bootstrap_server else None
            instances.append(
                Program(
                    name=f"{role}-{index}",
                    command=_worker_command(
                        config,
                        role,
                        pool,
                        model.path,
                        model_name,
                        device,
                        pool.threads or threads,
                        port,
                        bootstrap_port,
                        _pool_options(role, transfer_options, member_options),
                        _memory_share(max((gpu_users[gpu] for gpu in gpus_of.get((role, index), ())), default=1)),
                    ),
                    env=env,
                    cores=_cores(pool, index, machine, path),
                    url=f"http://{_url_host(config.host)}:{port}",
                    ready_path="/health",
                    role=role,
                    bootstrap_port=bootstrap_port,
                )
            )
    usage_file: Path | None = None
    if config.router.tenants_file is not None and config.router.usage_db is None:
        usage_file = config.folder.resolve() / USAGE_FILE
    router = _router(config, instances, coordinator, config.router.port or next(ports), admin_key, usage_file)
    default_parallel = 1 if any(users > 1 for users in gpu_users.values()) else 2 * len(machine.core_ids)
    return ClusterPlan(
        coordinator=coordinator,
        pool_key_file=pool_key_file,
        usage_file=usage_file,
        instances=tuple(instances),
        router=router,
        page_url=_page_url(config, router.url),
        start_parallel=config.start.parallel or default_parallel,
        admin_key=admin_key,
        model_name=model_name,
        fork_environment=_fork_environment(config, model) if device == "cpu" else None,
    )


def _fork_environment(config: ClusterConfig, model: PreparedModel) -> dict[str, str] | None:
    if config.start.method != "fork":
        return None
    return {**shared_cpu_environment(is_offline=os.path.isdir(model.path)), **config.env}


def _worker_command(
    config: ClusterConfig,
    role: Role,
    pool: PoolConfig,
    model_path: str,
    model_name: str,
    device: str,
    threads: int,
    port: int,
    bootstrap_port: int | None,
    pool_options: tuple[str, ...],
    memory_share: tuple[str, ...],
) -> tuple[str, ...]:
    command = [*WORKER_COMMAND, "--role", str(role)]
    command += ["--model-path", model_path, "--host", config.host, "--port", str(port), "--device", device]
    if bootstrap_port is not None:
        command += ["--bootstrap-port", str(bootstrap_port)]
    if device == "cpu":
        command += ["--threads", str(threads)]
        if config.start.method == "spawn":
            command += ["--start-method", "spawn"]
    given = (*config.worker_args, *pool.worker_args)
    if role.is_prefill and not _decides_boundary((*given, *config.args, *pool.args)):
        # The router's own arguments win over the setting.
        asked = last_value(config.router.args, "--length-boundary-tokens")
        boundary_tokens = asked or str(config.router.length_boundary_tokens)
        if boundary_tokens != "0":
            command += ["--laps-boundary-tokens", boundary_tokens]
    command += [*pool_options, *given]
    command += ["--", "--served-model-name", model_name]
    if pool.tp > 1:
        command += ["--tp-size", str(pool.tp)]
    if pool.pp > 1:
        command += ["--pp-size", str(pool.pp)]
    if pool.dcp > 1:
        command += ["--dcp-size", str(pool.dcp)]
    return (*command, *memory_share, *config.args, *pool.args)


def _pool_options(role: Role, transfer: tuple[str, ...], member: tuple[str, ...]) -> tuple[str, ...]:
    """Return what instances of a role need besides: to transfer KV, and to share long prompts."""
    if role is Role.PLAIN:
        return ()
    return (*transfer, *member) if role.serves(LengthClass.LONG) else transfer


def _memory_share(users: int) -> tuple[str, ...]:
    """Arguments of SGLang with which `users` instances fit on one GPU; each takes its share of what is free when it
    starts."""
    return () if users == 1 else ("--mem-fraction-static", f"{SHARED_MEMORY_FRACTION / users:.2f}")


def _decides_boundary(arguments: Sequence[str]) -> bool:
    """Return whether these arguments of an instance say where short ends, or that its scheduler does not ask."""
    if last_value(arguments, "--laps-mode") == "off":
        return True
    return any(argument.startswith("--laps-boundary-tokens") for argument in arguments)


_PREFILL_OPTIONS = {Role.SHORT: "--prefill-short", Role.LONG: "--prefill-long", Role.BOTH: "--prefill"}


def _coordinator(config: ClusterConfig, port: int, http_port: int, key_file: Path | None) -> Program:
    count = config.pools.member_count
    sizes = sorted({count, *(2**power for power in range(count.bit_length()))})
    command = [sys.executable, "-m", "sglang_ext.cli", "coordinator", "--host", config.host]
    command += ["--port", str(port), "--http-port", str(http_port), "--sp-sizes", ",".join(map(str, sizes))]
    if key_file is not None:
        command += ["--key-file", str(key_file)]
    return Program(
        name=COORDINATOR_NAME,
        command=(*command, *config.coordinator.args),
        env=config.coordinator.env,
        cores=None,
        url=f"http://{_url_host(_reachable(config.host))}:{http_port}",
        ready_path="/health",
        role=None,
        bootstrap_port=None,
    )


def _router(
    config: ClusterConfig,
    instances: list[Program],
    coordinator: Program | None,
    port: int,
    admin_key: str,
    usage_file: Path | None,
) -> Program:
    command = [sys.executable, "-m", "sglang_ext.cli", "router"]
    command += ["--host", config.router.host, "--port", str(port), "--pd-disaggregation"]
    for instance in instances:
        assert instance.role is not None
        if not instance.role.is_prefill:
            command += [f"--{instance.role}", instance.url]
        else:
            command += [_PREFILL_OPTIONS[instance.role], instance.url, str(instance.bootstrap_port)]
    if coordinator is not None:
        command += ["--coordinator-url", coordinator.url]
    if config.router.length_boundary_tokens:
        command += ["--length-boundary-tokens", str(config.router.length_boundary_tokens)]
    if config.router.length_classes is not None:
        command += ["--length-classes", _with_urls(config.router.length_classes, instances)]
    command += ["--shutdown-grace-period-secs", f"{config.stop.drain_s:g}"]
    if config.router.api_keys_file is not None:
        command += ["--api-keys-file", config.router.api_keys_file]
    if config.router.tenants_file is not None:
        command += ["--tenants-file", config.router.tenants_file]
        command += ["--usage-db", config.router.usage_db or str(usage_file)]
    arguments, given_keys = _take_keys(config.router.args)
    keys = {} if config.router.api_key is None else {_KEY_OPTIONS["--api-key"]: config.router.api_key}
    return Program(
        name=ROUTER_NAME,
        command=(*command, *arguments),
        env={**config.router.env, **keys, **given_keys, ADMIN_KEY_VARIABLE: admin_key},
        cores=None,
        url=f"http://{_url_host(_reachable(config.router.host))}:{port}",
        ready_path="/readyz",
        role=None,
        bootstrap_port=None,
    )


def _with_urls(given: str | Mapping[str, Any], instances: Sequence[Program]) -> str:
    """Return length classes as JSON with URLs for the names of instances; the path of a file that holds no mapping.

    ConfigError for a name that is neither an instance's nor a URL.
    """
    if isinstance(given, Mapping):
        content = copy.deepcopy(dict(given))
    else:
        try:
            content = json_or_yaml(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return given  # which the router refuses
        if not isinstance(content, dict):
            return given
    urls = {instance.name: instance.url for instance in instances}
    for entries in content.values():
        for entry in entries if isinstance(entries, list) else ():
            for key in ("instances", "worker_ids"):
                if isinstance(entry, dict) and isinstance(entry.get(key), list):
                    for name in map(str, entry[key]):
                        if name not in urls and "://" not in name:
                            problem = f"no instance is called {name}: there are {', '.join(urls)}"
                            raise ConfigError("router.length_classes", problem)
                    entry[key] = [urls.get(str(name), name) for name in entry[key]]
    return json.dumps(content, default=str)


def _page_url(config: ClusterConfig, router_url: str) -> str | None:
    """Return the path of the live page by the router's own arguments."""
    arguments = config.router.args
    if "--disable-ui" in arguments:
        return None
    port = last_value(arguments, "--ui-port")
    if port in (None, "0"):
        return f"{router_url}/ui"
    host = last_value(arguments, "--ui-host") or "127.0.0.1"
    return f"http://{_url_host(_reachable(host))}:{port}/ui"


def _take_keys(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The router's arguments without keys, and these as environment variables."""
    left: list[str] = []
    keys: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option in _KEY_OPTIONS:
            keys[_KEY_OPTIONS[option]] = value if equals else next(words, "")
        else:
            left.append(word)
    return tuple(left), keys


def _assign_gpus(config: ClusterConfig, machine: Host) -> dict[tuple[Role, int], list[str]]:
    """The GPUs of each instance: those given, else consecutive ones, over again from the first. Raises ConfigError."""
    next_gpu = 0
    assigned: dict[tuple[Role, int], list[str]] = {}
    for role, pool in config.pools.by_role():
        for index in range(pool.count):
            assigned[role, index], next_gpu = _gpus(pool, index, next_gpu, machine, f"pools.{role}")
    return assigned


def _gpus(pool: PoolConfig, index: int, next_gpu: int, machine: Host, path: str) -> tuple[list[str], int]:
    if pool.gpus:
        chosen = sorted(parse_id_set(pool.gpus[index], path))
        if chosen[-1] >= machine.gpu_count:
            raise ConfigError(f"{path}.gpus[{index}]", f"this machine has {machine.gpu_count} GPUs")
        return [str(gpu) for gpu in chosen], next_gpu
    ranks = pool.ranks
    if ranks > machine.gpu_count:
        setting, of = ("tp", "") if pool.pp == 1 else ("pp", f", for {pool.tp} ranks of each stage")
        asked = pool.tp if pool.pp == 1 else pool.pp
        raise ConfigError(f"{path}.{setting}", f"is {asked}{of}, but this machine has {machine.gpu_count} GPUs")
    if next_gpu % machine.gpu_count + ranks > machine.gpu_count:
        next_gpu = 0  # ranks of one instance need different GPUs
    return [str((next_gpu + rank) % machine.gpu_count) for rank in range(ranks)], next_gpu + ranks


def _cores(pool: PoolConfig, index: int, machine: Host, path: str) -> frozenset[int] | None:
    if not pool.cores:
        return None
    cores = parse_id_set(pool.cores[index], path)
    missing = cores - machine.core_ids
    if missing:
        raise ConfigError(f"{path}.cores[{index}]", f"this machine has no core {min(missing)}")
    return cores


def _reachable(host: str) -> str:
    """A server that listens everywhere is reached by the loopback address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host

"""Refuses a cluster's settings before anything starts: by the parsers and checks of the programs that read them.

The router, the coordinator and the workers check their own command lines (`check_arguments`). What SGLang refuses only
SGLang knows: an engine of each pool checks its arguments (`engine_checks`, `sglang-ext worker --check`). Either way
`located` finds where in the configuration it stands.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from sglang_ext.cluster.config import ClusterConfig, ConfigError
from sglang_ext.cluster.fork_client import WORKER_COMMAND
from sglang_ext.cluster.plan import COORDINATOR_NAME, ROUTER_NAME, ClusterPlan, Program
from sglang_ext.command_parser import RaisingParser
from sglang_ext.engine import worker
from sglang_ext.long_pool.coordinator import coordinator_command
from sglang_ext.types import Role
from sglang_ext_router import main as router_command
from sglang_ext_router.command_line import add_arguments as add_router_arguments

_PROGRAM = ("-m", "sglang_ext.cli")
_OF_ONE_INSTANCE = ("--role", "--port", "--bootstrap-port")
_COMMAND_START = 4  # in the words of a program: behind `python -m sglang_ext.cli COMMAND`
# Options of each list of arguments that the cluster gives itself, each with the setting that is meant for it. Another
# value would start a program that the others do not find.
_ROUTER_OPTIONS = {"--host": "router.host", "--port": "router.port"}
_COORDINATOR_OPTIONS = {"--host": "host", "--port": "coordinator.port", "--http-port": "coordinator.http_port"}
_WORKER_OPTIONS = {
    "--role": "pools.{role}",
    "--host": "host",
    "--port": "pools.{role}.ports",
    "--bootstrap-port": "pools.{role}.bootstrap_ports",
    "--model-path": "model",
    "--dry-run": "sglang-ext up --dry-run",
    "--check": "sglang-ext up --dry-run",
}
_ENGINE_OPTIONS = {
    "--host": "host",
    "--port": "pools.{role}.ports",
    "--disaggregation-bootstrap-port": "pools.{role}.bootstrap_ports",
    "--disaggregation-mode": "pools.{role}",
    "--model-path": "model",
    "--model": "model",
}
# Where the options stand that the plan makes of other settings.
_PLANNED_OPTIONS = {
    "--model-path": "model",
    "--host": "host",
    "--served-model-name": "served_model_name",
    "--tp-size": "pools.{role}.tp",
    "--pp-size": "pools.{role}.pp",
    "--dcp-size": "pools.{role}.dcp",
    "--threads": "pools.{role}.threads",
    "--port": "pools.{role}.ports",
    "--bootstrap-port": "pools.{role}.bootstrap_ports",
    "--api-keys-file": "router.api_keys_file",
    "--tenants-file": "router.tenants_file",
    "--usage-db": "router.usage_db",
    "--api-key": "router.api_key",
    "--admin-api-key": "router.admin_api_key",
    "--length-boundary-tokens": "router.length_boundary_tokens",
    "--length-classes": "router.length_classes",
}


def check_arguments(config: ClusterConfig, plan: ClusterPlan) -> None:
    """Refuse what a program of the plan would refuse of its own command line. Raises ConfigError.

    Files that the command lines name are read, and ports listened on for a moment.
    """
    for role in (None, *Role):
        for path, words, planned in _argument_lists(config, role):
            _check_planned(path, words, {option: where.format(role=role) for option, where in planned.items()})
    checks: tuple[tuple[Program | None, Callable[[Program], object]], ...] = (
        (plan.router, _check_router),
        (plan.coordinator, _check_coordinator),
        *((instance, _check_worker) for instance in _first_of_each_pool(plan)),
    )
    for program, check in checks:
        if program is not None and program.command[1:3] == _PROGRAM:
            try:
                check(program)
            except ValueError as error:
                raise located(config, program, str(error)) from None


def engine_checks(plan: ClusterPlan) -> tuple[Program, ...]:
    """Return the programs that end with status 0 if SGLang takes the arguments of all instances, each of them once."""
    start = len(WORKER_COMMAND)
    checks: dict[object, Program] = {}
    for program in _first_of_each_pool(plan):
        command = program.command
        if program.role is not None and command[:start] == WORKER_COMMAND:
            varying = {position + offset for position in _positions(command, _OF_ONE_INSTANCE) for offset in (0, 1)}
            words = tuple(word for position, word in enumerate(command) if position not in varying)
            check = replace(
                program, name=f"check-{program.name}", command=(*command[:start], "--check", *command[start:])
            )
            checks.setdefault((program.role.is_prefill, words), check)
    return tuple(checks.values())


def located(config: ClusterConfig, program: Program, problem: str) -> ConfigError:
    """Return the error of a program's arguments with the place in the configuration of the option that it names."""
    problem = re.sub(r"^sglang-ext( worker)?: (error: )?", "", problem)
    named = _named_options(problem)
    lists = [(path, words) for path, words, _ in _argument_lists(config, program.role, program.name)]
    for path, words in reversed(lists):
        for position, word in enumerate(words):
            if _option_of(words, position) in named or word in named:
                return ConfigError(f"{path}[{position}]", problem)
    of_program = {ROUTER_NAME: _ROUTER_OPTIONS, COORDINATOR_NAME: _COORDINATOR_OPTIONS}.get(program.name, {})
    planned = {**_PLANNED_OPTIONS, **of_program}
    for option in named:
        if option in planned:
            return ConfigError(planned[option].format(role=program.role), problem)
    given = [path for path, words in lists if words]
    return ConfigError(given[-1] if given else _place_of(program), problem)


def _positions(words: Sequence[str], options: Collection[str]) -> Iterator[int]:
    return (position for position, word in enumerate(words) if word in options)


def _place_of(program: Program) -> str:
    return program.name if program.role is None else f"pools.{program.role}"


def _named_options(problem: str) -> list[str]:
    unrecognised = problem.partition("unrecognized arguments: ")[2].split()
    return [*unrecognised, *re.findall(r"--[A-Za-z][\w-]*|\b[a-z_]+\.[a-z_]+\b", problem)]


def _option_of(words: Sequence[str], position: int) -> str:
    """Return what a word is called in an error: its option, or the setting of `--set NAME=VALUE`."""
    option, _, value = words[position].partition("=")
    if option == "--set":
        return value.partition("=")[0]
    return option


def _argument_lists(
    config: ClusterConfig, role: Role | None, name: str | None = None
) -> Iterator[tuple[str, tuple[str, ...], Mapping[str, str]]]:
    """Yield path and words of each list that a program gets, and what it may not hold; the last list wins.

    Without a role these are the lists of the router and the coordinator, or of the program called `name`.
    """
    if role is None:
        if name in {None, ROUTER_NAME}:
            yield "router.args", config.router.args, _ROUTER_OPTIONS
        if name in {None, COORDINATOR_NAME}:
            yield "coordinator.args", config.coordinator.args, _COORDINATOR_OPTIONS
        return
    pool = dict(config.pools.by_role())[role]
    yield "worker_args", config.worker_args, _WORKER_OPTIONS
    yield f"pools.{role}.worker_args", pool.worker_args, _WORKER_OPTIONS
    yield "args", config.args, _ENGINE_OPTIONS
    yield f"pools.{role}.args", pool.args, _ENGINE_OPTIONS


def _check_planned(path: str, words: Sequence[str], planned: Mapping[str, str]) -> None:
    for position, word in enumerate(words):
        option = word.partition("=")[0]
        if option in planned:
            raise ConfigError(f"{path}[{position}]", f"{option} does not belong here; use {planned[option]}")


def _first_of_each_pool(plan: ClusterPlan) -> list[Program]:
    """Return an instance of each role: the instances of a pool differ in ports, cores and GPUs only."""
    return list({program.role: program for program in reversed(plan.instances)}.values())[::-1]


def _parse(program: Program, add_arguments: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    parser = RaisingParser(prog=program.name)
    add_arguments(parser)
    return parser.parse_args(program.command[_COMMAND_START:])


def _check_router(program: Program) -> None:
    router_command.check(_parse(program, add_router_arguments), {**os.environ, **program.env})


def _check_coordinator(program: Program) -> None:
    coordinator_command.options_from(_parse(program, coordinator_command.add_arguments))


def _check_worker(program: Program) -> None:
    worker.launch_command(_parse(program, worker.add_arguments))

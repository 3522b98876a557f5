"""Start-up self-check: is each hook really in force in this process? And an engine's statement about it.

SGLang logs and swallows what goes wrong in a plugin, so an engine without its hooks looks healthy until the
first request that needs one. These checks look at the objects that SGLang will call.

A scheduler process puts the statement (role, version, hooks) into its initial report. SGLang passes that report to the
main process and from there to `/server_info`, where a router reads it under the key `sglang_ext`.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any

from sglang_ext import __version__
from sglang_ext.engine.entry_point import load_implementation
from sglang_ext.engine.hook_table import HOOK_TABLE, Hook
from sglang_ext.engine.launch_plan import START_METHOD_VARIABLE, StartMethod
from sglang_ext.engine.options import ExtensionOptions, options_from_environment
from sglang_ext.engine.versions import OLDEST_SGLANG, SUPPORTED_SGLANG, installed_sglang
from sglang_ext.transfer.sglang.transfer_backend import states_of_equal_ranks


class HookNotInForceError(RuntimeError):
    """A hook is not in force; the message names it."""


class HookState(StrEnum):
    IN_FORCE = "in force"
    BROKEN = "not in force"


@dataclass(frozen=True)
class HookStatus:
    """One hook in this process; `detail` is its target, or what is wrong."""

    name: str
    state: HookState
    detail: str


def inspect_hooks() -> list[HookStatus]:
    """The state of every hook that this process's options ask for."""
    installed = installed_sglang()
    options = options_from_environment(os.environ)
    wanted = [hook for hook in HOOK_TABLE if options is None or hook.is_wanted(options)]
    if installed is None:
        return [HookStatus(hook.name, HookState.BROKEN, "SGLang is not installed") for hook in wanted]
    if installed < OLDEST_SGLANG:
        detail = f"SGLang {installed} is too old; install {SUPPORTED_SGLANG}"
        return [HookStatus(hook.name, HookState.BROKEN, detail) for hook in wanted]
    return [_inspect(hook) for hook in wanted]


def verify_hooks() -> list[str]:
    """Names of the hooks in force. Raises HookNotInForceError naming each that should be and is not."""
    statuses = inspect_hooks()
    broken = [f"{status.name}: {status.detail}" for status in statuses if status.state is HookState.BROKEN]
    if broken:
        raise HookNotInForceError(
            "refusing to start, because not every hook into SGLang is in force: " + "; ".join(broken)
        )
    return [status.name for status in statuses if status.state is HookState.IN_FORCE]


def _inspect(hook: Hook) -> HookStatus:
    problem = _problem(hook, hook.target)
    if problem is not None:
        return HookStatus(hook.name, HookState.BROKEN, f"{hook.target}: {problem}")
    return HookStatus(hook.name, HookState.IN_FORCE, hook.target)


def _problem(hook: Hook, target: str) -> str | None:
    try:
        current = pkgutil.resolve_name(target)
        implementation = load_implementation(hook.implementation)
    except (ImportError, AttributeError) as error:
        return str(error)
    if isinstance(implementation, type):
        if current is not implementation:
            return "the class was not replaced"
        return _stale_class(target, implementation)
    if not _in_chain(current, implementation):
        return "the function does not go through the hook"
    return _stale_function(target, current)


def _in_chain(function: object, implementation: object) -> bool:
    """Return whether a function wrapped by SGLang's hook registry, once or more, calls `implementation`."""
    while function is not None:
        function = getattr(function, "__func__", function)
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is implementation for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _stale_function(target: str, current: object) -> str | None:
    """A module that imported the function by name before it was hooked still calls the old one."""
    original = current
    while (inner := getattr(original, "__wrapped__", None)) is not None:
        original = inner
    return _holder(target, original)


def _stale_class(target: str, replacement: type) -> str | None:
    """Return the same as `_stale_function` for a class, recognised by its defining module and name."""
    module, _, name = target.rpartition(".")
    for holder in _sglang_modules():
        value = vars(holder).get(name)
        if isinstance(value, type) and value is not replacement and value.__module__ == module:
            return f"{holder.__name__} still uses the old class"
    return None


def _holder(target: str, original: object) -> str | None:
    name = target.rpartition(".")[2]
    for holder in _sglang_modules():
        if vars(holder).get(name) is original:
            return f"{holder.__name__} still uses the old function"
    return None


def _sglang_modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("sglang.") and isinstance(module, ModuleType)
    ]


STATEMENT_KEY = "sglang_ext"


def add_statement(init_info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """AFTER `Scheduler.get_init_info()`: verify this process and state the result.

    Raises HookNotInForceError, which ends the scheduler and with it the engine.
    """
    options = options_from_environment(os.environ)
    if options is None:
        raise HookNotInForceError("the options of sglang-ext did not reach the scheduler process")
    statement = {
        "version": __version__,
        "role": options.role.value,
        "revision": options.revision or None,
        "hooks": verify_hooks(),
        "start_method": os.environ.get(START_METHOD_VARIABLE, StartMethod.SPAWN),
        "context_tokens": scheduler.model_config.context_len,
        "length_boundary_tokens": None if options.laps is None else options.laps.boundary_tokens,
        # Then `GET /laps` has it, and it may change.
        "fits_length_boundary": options.laps is not None and options.laps.boundary_tokens is None,
        "architecture": _architecture(scheduler.model_config.hf_config),
        "states_of_equal_ranks": states_of_equal_ranks(scheduler),
        "load_port": _load_port(options, scheduler),
        **_kv_cache(scheduler.tp_worker.model_runner),
    }
    return {**init_info, STATEMENT_KEY: statement}


def _load_port(options: ExtensionOptions, scheduler: Any) -> int | None:
    """Return where the first data-parallel rank publishes its load, by `engine/hooks/load_reports.py`."""
    is_open = options.kv_events is not None and scheduler.load_publisher.enable
    return options.kv_events.load_port or None if options.kv_events is not None and is_open else None


def _architecture(model: Any) -> str | None:
    """The model's class and sizes: two that differ in these cannot have the same weights."""
    names = getattr(model, "architectures", None)
    if not names:
        return None
    text = getattr(model, "text_config", model)
    sizes = (
        ("layers", getattr(text, "num_hidden_layers", None)),
        ("hidden size", getattr(text, "hidden_size", None)),
        ("vocabulary", getattr(text, "vocab_size", None)),
    )
    return ", ".join((str(names[0]), *(f"{name} {value}" for name, value in sizes if value is not None)))


def _kv_cache(model_runner: Any) -> dict[str, str | None]:
    """Return the KV cache's dtype by SGLang's name, and the type of its elements."""
    element_type = getattr(model_runner, "kv_cache_dtype", None)
    return {
        "kv_cache_dtype": getattr(model_runner, "kv_cache_dtype_str", None),
        "kv_element_type": None if element_type is None else str(element_type).removeprefix("torch."),
    }


def pass_statements(init_info: dict[str, Any], controller: Any) -> dict[str, Any]:
    """AFTER `DataParallelController.get_init_info()`: state what every rank states, if none is without a statement."""
    statements = [info.get(STATEMENT_KEY) for info in controller._scheduler_init_infos]
    return {**init_info, STATEMENT_KEY: statements[0]} if all(statements) else init_info


def check_statements(init_infos: list[dict[str, Any]], *args: Any) -> list[dict[str, Any]]:
    """AFTER `_wait_for_scheduler_ready(...)`: refuse a scheduler that made no statement.

    Raises HookNotInForceError, which ends the engine before it serves.
    """
    silent = [rank for rank, init_info in enumerate(init_infos) if STATEMENT_KEY not in init_info]
    if silent:
        raise HookNotInForceError(f"refusing to start: scheduler {silent[0]} runs without the hooks of sglang-ext")
    return init_infos

"""Start-up self-check: is each hook really in force in this process?

SGLang logs and swallows what goes wrong in a plugin, so an engine without its hooks looks healthy until the
first request that needs one. These checks look at the objects that SGLang will call.
"""

from __future__ import annotations

import pkgutil
import sys
from dataclasses import dataclass
from types import ModuleType

from sglang_ext.sglang_plugin.entry_point import load_implementation
from sglang_ext.sglang_plugin.hook_table import Hook, hooks_for
from sglang_ext.sglang_plugin.options import ExtensionOptions
from sglang_ext.sglang_plugin.versions import SglangVersion, installed_sglang


class HookNotInForceError(RuntimeError):
    """A hook is not in force; the message names it."""


@dataclass(frozen=True)
class HookStatus:
    """Whether one hook is in force, and if not, why."""

    name: str
    target: str
    problem: str | None

    @property
    def in_force(self) -> bool:
        return self.problem is None


def inspect_hooks(options: ExtensionOptions) -> list[HookStatus]:
    """The state, in this process, of every hook that an engine with these options needs."""
    installed = installed_sglang()
    if installed is None:
        return [HookStatus(hook.name, "", "SGLang is not installed") for hook in hooks_for(options)]
    return [_inspect(hook, installed) for hook in hooks_for(options)]


def verify_hooks(options: ExtensionOptions) -> list[str]:
    """Names of the hooks in force. Raises HookNotInForceError naming each that is not."""
    statuses = inspect_hooks(options)
    broken = [status for status in statuses if not status.in_force]
    if broken:
        raise HookNotInForceError(
            "refusing to start, because not every hook into SGLang is in force: "
            + "; ".join(f"{status.name} ({status.target}): {status.problem}" for status in broken)
        )
    return [status.name for status in statuses]


def _inspect(hook: Hook, installed: SglangVersion) -> HookStatus:
    target = hook.target_in(installed)
    if target is None:
        oldest = min(hook.targets)
        return HookStatus(hook.name, "", f"SGLang {installed} does not have its target, {oldest} does")
    return HookStatus(hook.name, target, _problem(hook, target))


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
    """Whether a function wrapped by SGLang's hook registry, once or more, calls `implementation`."""
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
    """As `_stale_function`; a replaced class is recognised by its defining module and name."""
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



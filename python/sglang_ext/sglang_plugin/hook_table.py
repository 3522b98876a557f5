"""Every place where this project changes SGLang: what, how, why, and where it is in each SGLang version.

The table is data. `entry_point.register` puts the hooks that apply into SGLang's hook registry, and
`verification.verify_hooks` checks afterwards, in each process, that they are really in force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from sglang_ext.sglang_plugin.device import Device
from sglang_ext.sglang_plugin.options import ExtensionOptions
from sglang_ext.sglang_plugin.versions import SglangVersion


class HookKind(StrEnum):
    """Values are those of SGLang's HookType, where the meaning of each is described."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


V17, V23 = SglangVersion(0, 5, 17), SglangVersion(0, 5, 23)


@dataclass(frozen=True)
class Hook:
    """One change to SGLang."""

    name: str
    why: str
    kind: HookKind
    implementation: str  # module:attribute, imported when the hook is registered
    targets: Mapping[SglangVersion, str]  # dotted path by the first SGLang version that has it there
    applies: Callable[[ExtensionOptions], bool]

    def target_in(self, installed: SglangVersion) -> str | None:
        """Where the hook goes in an installed SGLang; None when that version is older than every column."""
        known = [version for version in self.targets if version <= installed]
        return self.targets[max(known)] if known else None


def _same_in_all(target: str) -> Mapping[SglangVersion, str]:
    return MappingProxyType({V17: target})


def _always(options: ExtensionOptions) -> bool:
    return True


def _on_cpu(options: ExtensionOptions) -> bool:
    return options.device is Device.CPU


_HOOKS = "sglang_ext.sglang_plugin.hooks"

HOOK_TABLE: tuple[Hook, ...] = (
    Hook(
        name="transfer-backend-names",
        why="the enumeration of KV transfer backends is closed; adds the TCP backend",
        kind=HookKind.REPLACE,
        implementation=f"{_HOOKS}.transfer_backends:ExtendedTransferBackend",
        targets=_same_in_all("sglang.srt.disaggregation.utils.TransferBackend"),
        applies=_always,
    ),
    Hook(
        name="transfer-backend-classes",
        why="maps the TCP backend to its classes, and keeps CUDA events and pinned memory out of a CPU engine",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.transfer_backends:get_kv_class",
        targets=_same_in_all("sglang.srt.disaggregation.utils.get_kv_class"),
        applies=_always,
    ),
    Hook(
        name="parallel-samples",
        why="n > 1 gives every sample the same bootstrap room, which crashes prefill and decode; spreads rooms",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.parallel_samples:normalize_batch_and_arguments",
        targets=_same_in_all("sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"),
        applies=_always,
    ),
    Hook(
        name="room-guard",
        why="a bootstrap room that is already in use crashes the scheduler; refuses that request instead",
        kind=HookKind.AROUND,
        implementation=f"{_HOOKS}.room_guard:add_request_to_queue",
        targets=_same_in_all("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"),
        applies=_always,
    ),
    Hook(
        name="scheduler-report",
        why="each scheduler process verifies its own hooks and says so to the main process",
        kind=HookKind.AFTER,
        implementation=f"{_HOOKS}.self_report:add_scheduler_report",
        targets=_same_in_all("sglang.srt.managers.scheduler.Scheduler.get_init_info"),
        applies=_always,
    ),
    Hook(
        name="scheduler-report-check",
        why="the main process refuses to serve when a scheduler runs without the hooks",
        kind=HookKind.AFTER,
        implementation=f"{_HOOKS}.self_report:check_scheduler_reports",
        targets=_same_in_all("sglang.srt.entrypoints.engine._wait_for_scheduler_ready"),
        applies=_always,
    ),
    Hook(
        name="server-info",
        why="tells the router version, role and hooks of this engine",
        kind=HookKind.AFTER,
        implementation=f"{_HOOKS}.self_report:add_server_info",
        targets=MappingProxyType({V23: "sglang.srt.utils.common.build_server_info"}),
        applies=_always,
    ),
)


def hooks_for(options: ExtensionOptions) -> tuple[Hook, ...]:
    """The hooks that an engine with these options needs."""
    return tuple(hook for hook in HOOK_TABLE if hook.applies(options))

"""An engine's statement about itself: which hooks are in force, what role it has."""

from __future__ import annotations

import os
from typing import Any

from sglang_ext import __version__
from sglang_ext.sglang_plugin.options import options_from_environment
from sglang_ext.sglang_plugin.verification import HookNotInForceError, verify_hooks

SCHEDULER_REPORT_KEY = "sglang_ext_scheduler_hooks"
SERVER_INFO_KEY = "sglang_ext"


def add_scheduler_report(init_info: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """AFTER `Scheduler.get_init_info()`: verify this scheduler process and report to the main process.

    Raises HookNotInForceError, which ends the scheduler and with it the engine.
    """
    options = options_from_environment(os.environ)
    if options is None:
        return init_info
    return {**init_info, SCHEDULER_REPORT_KEY: verify_hooks(options)}


def check_scheduler_reports(
    init_infos: list[dict[str, Any]], *args: Any, **kwargs: Any
) -> list[dict[str, Any]]:
    """AFTER `_wait_for_scheduler_ready(...)`: refuse a scheduler that did not report its hooks."""
    for rank, init_info in enumerate(init_infos):
        if SCHEDULER_REPORT_KEY not in init_info:
            raise HookNotInForceError(f"refusing to start: scheduler {rank} runs without the hooks of sglang-ext")
    return init_infos


def add_server_info(info: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """AFTER `build_server_info(server_args, scheduler_info)`: what a router needs to know of the extension."""
    options = options_from_environment(os.environ)
    hooks = info.pop(SCHEDULER_REPORT_KEY, [])
    if options is None:
        return info
    statement = {"version": __version__, "role": options.role.value, "hooks": hooks}
    return {**info, SERVER_INFO_KEY: statement}

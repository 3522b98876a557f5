"""An engine's statement about itself: role, version, and the hooks that are in force in its schedulers.

A scheduler process puts the statement into its initial report. SGLang passes that report to the main process
and from there to `/server_info`, where a router reads it under the key `sglang_ext`.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_ext import __version__
from sglang_ext.sglang_plugin.options import options_from_environment
from sglang_ext.sglang_plugin.verification import HookNotInForceError, verify_hooks

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
        "hooks": verify_hooks(),
        "context_tokens": scheduler.model_config.context_len,
    }
    return {**init_info, STATEMENT_KEY: statement}


def check_statements(init_infos: list[dict[str, Any]], *args: Any) -> list[dict[str, Any]]:
    """AFTER `_wait_for_scheduler_ready(...)`: refuse a scheduler that said nothing.

    Raises HookNotInForceError, which ends the engine before it serves.
    """
    silent = [rank for rank, init_info in enumerate(init_infos) if STATEMENT_KEY not in init_info]
    if silent:
        raise HookNotInForceError(f"refusing to start: scheduler {silent[0]} runs without the hooks of sglang-ext")
    return init_infos

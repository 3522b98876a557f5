"""The plugin that SGLang calls in each of its processes (entry point group `sglang.srt.plugins`)."""

from __future__ import annotations

import importlib
import os

from sglang_ext.engine.hook_table import HOOK_TABLE
from sglang_ext.engine.options import options_from_environment
from sglang_ext.engine.versions import installed_sglang
from sglang_ext.transfer.sglang.transfer_backend import OWN_BACKENDS


def register() -> None:
    """Register the hooks that this process's options ask for; nothing in a stock SGLang process.

    An error here is logged and swallowed by SGLang; `verification.verify_hooks` turns it into a refusal.
    """
    installed = installed_sglang()
    options = options_from_environment(os.environ)
    if options is None or installed is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_disagg_transfer_backend_choices

    add_disagg_transfer_backend_choices(list(OWN_BACKENDS))
    for hook in HOOK_TABLE:
        target = hook.target if hook.is_wanted(options) else None
        if target is not None:
            HookRegistry.register(target, load_implementation(hook.implementation), HookType(hook.kind.value))


def load_implementation(path: str) -> object:
    """Import `module:attribute`."""
    module, _, attribute = path.partition(":")
    implementation: object = getattr(importlib.import_module(module), attribute)
    return implementation

"""`python -m sglang_ext.sglang_plugin.hook_probe`: load SGLang with the hooks and print their state as JSON.

A process of its own, because it imports all of SGLang and changes it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from sglang_ext.sglang_plugin import cpu_platform

    cpu_platform.install()


def main() -> int:
    from sglang.srt.plugins import load_plugins

    from sglang_ext.sglang_plugin.verification import inspect_hooks

    load_plugins()
    print(json.dumps([asdict(status) for status in inspect_hooks()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

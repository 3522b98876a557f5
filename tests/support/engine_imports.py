"""What processes of `support.preloaded` find imported. Importing this changes the environment and SGLang's imports."""

from __future__ import annotations

import importlib

from sglang_ext.sglang_plugin import cpu_platform
from sglang_ext.sglang_plugin.preload import preload

cpu_platform.install((*cpu_platform.CANDIDATES, *cpu_platform.BENCHMARK_CANDIDATES))
preload()
for module in ("torch.distributed", "sglang.benchmark.one_batch"):
    importlib.import_module(module)

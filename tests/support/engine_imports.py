"""What processes of `support.preloaded` find imported. Importing this changes the environment and SGLang's imports."""

from __future__ import annotations

import importlib

from sglang_ext import cpu
from sglang_ext.engine.preload import preload

cpu.install((*cpu.CANDIDATES, *cpu.BENCHMARK_CANDIDATES))
preload()
for module in ("torch.distributed", "sglang.benchmark.one_batch"):
    importlib.import_module(module)

"""`python bench/support/run_sglang_tool.py MODULE …`: as `python -m MODULE …`, without the packages of a GPU.

SGLang's own tools (`sglang.bench_serving`, `sglang.bench_one_batch` …) import packages that a machine without a GPU
does not have; stand-ins take their place.
"""

from __future__ import annotations

import os
import runpy
import sys

from sglang_ext import cpu
from sglang_ext.engine.device import Device, inspect_machine


def main() -> None:
    """Run the module that the first argument names in this process, with the arguments after it."""
    if len(sys.argv) < 2:
        sys.exit("usage: run_sglang_tool.py MODULE [ARGUMENTS]")
    if inspect_machine().device is Device.CPU:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        cpu.install((*cpu.CANDIDATES, *cpu.BENCHMARK_CANDIDATES))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""`sglang-ext run-module MODULE …`: as `python -m MODULE …`, on machines where SGLang cannot be imported plainly.

SGLang's own tools (`sglang.bench_serving`, `sglang.bench_one_batch` …) import what a machine without a GPU lacks.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from sglang_ext import cpu
from sglang_ext.engine.device import Device, inspect_machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sglang-ext run-module`."""
    parser.add_argument("module", help="Python module to run, such as sglang.bench_serving")
    parser.add_argument("module_arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the module in this process; SystemExit of the module passes through."""
    if inspect_machine().device is Device.CPU:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        cpu.install((*cpu.CANDIDATES, *cpu.BENCHMARK_CANDIDATES))
    sys.argv = [arguments.module, *arguments.module_arguments]
    try:
        runpy.run_module(arguments.module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{arguments.module}.".startswith(f"{error.name}."):
            raise
        print(f"sglang-ext run-module: there is no module {error.name}", file=sys.stderr)
        return 2
    return 0

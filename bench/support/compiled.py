"""The product as it is installed from a wheel: with compiled modules. `make env` compiles nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from sglang_ext_router.compiled import describe_compiled
from support.result import progress

ROOT = Path(__file__).resolve().parents[2]
STARTED_AGAIN = "SGLANG_EXT_BENCH_STARTED_AGAIN"


def use_compiled_modules() -> None:
    """Compile what is not compiled from the present sources (about 3 minutes), then start this program again.

    Ends the program with status 2 and one line where no compiler is installed or compilation fails.
    """
    is_stale, state = describe_compiled()
    native = subprocess.run([sys.executable, ROOT / "tools/build_native.py", "--check"], check=False).returncode == 0
    if not is_stale and "plain" not in state and native:
        return
    if os.environ.get(STARTED_AGAIN):
        sys.exit(f"compiled modules are not in use: {state}")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        sys.exit("this benchmark needs a C++ compiler (Debian: apt-get install g++)")
    progress("compiling the request path, the planner and the row copies (about 3 minutes)")
    for script in ("compile_hot_path.py", "build_native.py"):
        if subprocess.run([sys.executable, ROOT / "tools" / script], check=False).returncode != 0:
            sys.exit(2)
    os.environ[STARTED_AGAIN] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])

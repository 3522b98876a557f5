"""Puts the packages of this checkout on the path, for this process and those it starts: the scripts run uninstalled."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("python", "router", "kernels", "cuda_graphs", "tests", "bench")


def add_to_path() -> None:
    """Put the folders of the packages first."""
    folders = [str(ROOT / name) for name in FOLDERS]
    # In this order: `support` is a package of the tests and of the benchmarks, and both have a module `engines`.
    sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))


add_to_path()

"""NIXL, where it is installed: in the environment, or in the folder of `make nixl-env` beside it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".venv/nixl"

if importlib.util.find_spec("nixl") is None and FOLDER.is_dir():
    sys.path.append(str(FOLDER))

ENVIRONMENT: tuple[tuple[str, str], ...]
if FOLDER.is_dir():
    ENVIRONMENT = (("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(FOLDER))))),)
else:
    ENVIRONMENT = ()
"""Of processes that use it."""

NIXL_IS_THERE = importlib.util.find_spec("nixl") is not None

needs_nixl = pytest.mark.skipif(not NIXL_IS_THERE, reason="NIXL is not installed: `make nixl-env`")
"""Marks what runs only with NIXL."""

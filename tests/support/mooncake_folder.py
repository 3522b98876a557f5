"""Mooncake's transfer engine, where it is installed: in the environment, or in the folder of `make mooncake-env` beside
it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from sglang_ext.transfer.transports.registry import unavailable_reason

FOLDER = Path(__file__).parents[2] / ".venv/mooncake"

if importlib.util.find_spec("mooncake") is None and FOLDER.is_dir():
    sys.path.append(str(FOLDER))

ENVIRONMENT: tuple[tuple[str, str], ...]
if FOLDER.is_dir():
    ENVIRONMENT = (("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(FOLDER))))),)
else:
    ENVIRONMENT = ()
"""Of processes that use it."""

needs_mooncake = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None or unavailable_reason("mooncake") is not None,
    reason="Mooncake is not installed: `make mooncake-env`",
)
"""Marks what runs only with Mooncake."""

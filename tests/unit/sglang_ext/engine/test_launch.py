"""A worker that is asked to end while it starts, at whatever moment, ends at once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

ASKED = """
import os, signal, sys, types
from sglang_ext.engine.launch import _end_when_asked

_end_when_asked()
{state}
try:
    os.kill(os.getpid(), signal.SIGTERM)
except ImportError:
    pass  # as modules do for which something is optional
"""
HALF_IMPORTED = "\n".join(
    f"sys.modules[{name!r}] = types.ModuleType({name!r})" for name in ("sglang", "sglang.srt", "sglang.srt.utils")
)


@pytest.mark.parametrize("state", ["", HALF_IMPORTED], ids=["before SGLang is imported", "while it is"])
def test_the_signal_ends_a_worker_that_starts(state: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ASKED.format(state=state)], capture_output=True, timeout=60)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr

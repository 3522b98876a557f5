"""A worker's start: asked to end at any moment it ends at once, and its ranks meet at a port of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_ext.engine.launch import _reserve_rendezvous
from sglang_ext.ports import PORTS

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


def test_the_ranks_of_each_instance_meet_at_a_reserved_port() -> None:
    ports = [reserved_port() for _ in range(20)]
    assert len(set(ports)) == len(ports)
    assert set(ports) <= set(PORTS)


@pytest.mark.parametrize("given", [{"nccl_port": 23977}, {"dist_init_addr": "10.0.0.1:5000"}], ids=["port", "address"])
def test_a_rendezvous_that_was_given_stays(given: dict[str, Any]) -> None:
    assert reserved_port(**given) == given.get("nccl_port")


def reserved_port(**given: Any) -> int | None:
    arguments = SimpleNamespace(**{"nccl_port": None, "dist_init_addr": None, **given})
    _reserve_rendezvous(cast(Any, arguments))
    return cast("int | None", arguments.nccl_port)

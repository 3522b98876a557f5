"""Several router processes behind one address: starts them, replaces dead ones, stops them all.

The kernel spreads connections over the processes (SO_REUSEPORT). A process notices the end of its
supervisor by the end of its standard input, so none outlives it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_ext_router.config import RouterConfig

logger = logging.getLogger(__name__)

INDEX_VARIABLE = "SGLANG_EXT_ROUTER_PROCESS"
FOLDER_VARIABLE = "SGLANG_EXT_ROUTER_FOLDER"
RESTART_PAUSE_S = 1.0
POLL_S = 0.2
KILL_AFTER_S = 10.0  # beyond the grace period


def is_child() -> bool:
    """Return whether this process was started by a supervisor."""
    return INDEX_VARIABLE in os.environ


def child_place() -> tuple[int, Path]:
    """Index of this child and the folder of the siblings' sockets."""
    return int(os.environ[INDEX_VARIABLE]), Path(os.environ[FOLDER_VARIABLE])


def supervise(config: RouterConfig, arguments: Sequence[str]) -> int:
    """Run `config.processes` routers with the same arguments until SIGTERM or SIGINT; the exit status."""
    is_stopping = False

    def stop(signal_number: int, frame: object) -> None:
        nonlocal is_stopping
        is_stopping = True

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, stop)
    if config.access_log:  # its processes see for themselves that the file was renamed
        signal.signal(signal.SIGHUP, lambda signal_number, frame: None)
    with tempfile.TemporaryDirectory(prefix="sglang-ext-router-") as folder:
        children = [_start(index, folder, arguments) for index in range(config.processes)]
        while not is_stopping:
            time.sleep(POLL_S)
            for index, child in enumerate(children):
                if child.poll() is None:
                    continue
                if child.returncode == 2:  # it refused its options: so would the next one
                    is_stopping = True
                    break
                logger.error("router process %d ended with status %d; starting it again", index, child.returncode)
                time.sleep(RESTART_PAUSE_S)
                if not is_stopping:
                    children[index] = _start(index, folder, arguments)
        return _stop(children, config.drain_delay_secs + config.shutdown_grace_period_secs + KILL_AFTER_S)


def _start(index: int, folder: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "sglang_ext.cli", "router", *arguments],
        stdin=subprocess.PIPE,
        env={**os.environ, INDEX_VARIABLE: str(index), FOLDER_VARIABLE: folder},
        start_new_session=True,  # a terminal's Ctrl-C reaches only the supervisor
    )


def _stop(children: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> int:
    status = 0
    for child in children:
        child.terminate()
    end_s = time.monotonic() + timeout_s
    for child in children:
        try:
            child.wait(max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.returncode != -signal.SIGTERM:  # which ends a process that did not handle it yet
            status = max(status, abs(child.returncode))
    return status

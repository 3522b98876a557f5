"""Several router processes behind one address: starts them, replaces dead ones, stops them all.

The kernel spreads connections over the processes (SO_REUSEPORT). A process notices the end of its
supervisor by the end of its standard input, so none outlives it. The supervisor holds the loopback sockets at which the
processes find each other, so that a process that is started again has the address of the one before.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext_router.config import RouterConfig

logger = logging.getLogger(__name__)

PLACE_VARIABLE = "SGLANG_EXT_ROUTER_PROCESS"
RESTART_PAUSE_S = 1.0
POLL_S = 0.2
KILL_AFTER_S = 10.0  # beyond the grace period


class ProcessPlace(NamedTuple):
    """Holds what the supervisor gives each of its processes, in an environment variable."""

    number: int
    key: str  # all of them have it
    peers: Sequence[str]  # HOST:PORT of each, this one's own among them
    listener: int  # descriptor of the socket at its own address
    folder: str  # for the counters of each, should it be killed


def process_place() -> ProcessPlace | None:
    """Return the place of this process; None if no supervisor started it."""
    place = os.environ.get(PLACE_VARIABLE)
    return None if place is None else ProcessPlace(*json.loads(place))


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
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(config.processes)]
        key, peers = secrets.token_hex(32), [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
        places = [ProcessPlace(index, key, peers, sock.fileno(), folder) for index, sock in enumerate(sockets)]
        children = [_start(place, arguments) for place in places]
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
                    children[index] = _start(places[index], arguments)
        return _stop(children, config.drain_delay_secs + config.shutdown_grace_period_secs + KILL_AFTER_S)


def _start(place: ProcessPlace, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "sglang_ext.cli", "router", *arguments],
        stdin=subprocess.PIPE,
        env={**os.environ, PLACE_VARIABLE: json.dumps(place)},
        pass_fds=(place.listener,),
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

"""Free TCP ports, picked where neither outgoing connections nor SGLang's own choices take them.

A picked port is bound seconds later, by another program. Until then it is free to see for everybody, so it is also
reserved: byte `port` of a file that all processes of this user share is locked, for as long as this process lives.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

# Linux hands out ports from 32768 on to outgoing connections; a plain SGLang instance draws the port of its ranks'
# rendezvous between 22000 and 29999 (`get_free_port_below_ephemeral`), to bind it later as well. From 30000 to
# 30100 are the ports where SGLang and this project's commands listen when none is given.
PORTS = (*range(20000, 22000), *range(30101, 32768))

_PORTS = frozenset(PORTS)
_reserved: set[int] = set()  # a process is never refused a lock that it holds


class NoFreePortError(RuntimeError):
    """Every port in the range is taken."""


def is_port_free(host: str, port: int) -> bool:
    """Return whether a server could listen on `host`:`port` at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def pick_free_ports(host: str, count: int, *, avoid: Iterable[int] = (), draw: random.Random) -> list[int]:
    """Return `count` different ports of `PORTS` that are free on `host` now, not in `avoid`, and not reserved.

    They stay reserved for this process while it lives. Raises NoFreePortError.
    """
    taken = {*avoid, *_reserved}
    picked: list[int] = []
    for port in draw.sample(PORTS, len(PORTS)):
        if len(picked) == count:
            break
        if port not in taken and _reserve(port) and is_port_free(host, port):
            picked.append(port)
    if len(picked) < count:
        raise NoFreePortError(f"no {count} free ports on {host} between {PORTS[0]} and {PORTS[-1]}")
    return picked


def pick_port_ranges(host: str, count: int, size: int, *, draw: random.Random) -> list[int]:
    """Return the first ports of `count` ranges of `size` ports each, all of which are as `pick_free_ports` says."""
    firsts: list[int] = []
    for first in draw.sample(PORTS, len(PORTS)):
        if len(firsts) == count:
            break
        ports = range(first, first + size)
        is_free = all(port in _PORTS and port not in _reserved and is_port_free(host, port) for port in ports)
        if is_free and all(map(_reserve, ports)):
            firsts.append(first)
    if len(firsts) < count:
        raise NoFreePortError(f"no {count} ranges of {size} free ports on {host}")
    return firsts


def _reserve(port: int) -> bool:
    """Lock the port's byte; False where another process has it."""
    reservations = _reservations()
    try:
        fcntl.lockf(reservations, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    _reserved.add(port)
    return True


@cache
def _reservations() -> int:
    """The shared file, opened once: closing any descriptor of it would give up every lock of the process."""
    path = Path(tempfile.gettempdir()) / f"sglang-ext-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

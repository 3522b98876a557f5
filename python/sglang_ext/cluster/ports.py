"""Free TCP ports, picked where outgoing connections do not take them."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable

# Linux hands out ports from 32768 on to outgoing connections; one of those could be taken again by the time
# that an instance restarts.
LOWEST_PORT = 20000
HIGHEST_PORT = 32767


class NoFreePortError(RuntimeError):
    """Every port in the range is taken."""


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could listen on `host`:`port` at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def pick_free_ports(host: str, count: int, *, avoid: Iterable[int] = (), draw: random.Random) -> list[int]:
    """Return `count` different ports that are free on `host` now and not in `avoid`."""
    taken = set(avoid)
    picked: list[int] = []
    candidates = draw.sample(range(LOWEST_PORT, HIGHEST_PORT + 1), HIGHEST_PORT + 1 - LOWEST_PORT)
    for port in candidates:
        if len(picked) == count:
            break
        if port not in taken and is_port_free(host, port):
            picked.append(port)
    if len(picked) < count:
        raise NoFreePortError(f"no {count} free ports on {host} between {LOWEST_PORT} and {HIGHEST_PORT}")
    return picked

"""What an engine's `/metrics` say of KV transfers by handshake."""

from __future__ import annotations

import re
import time

from support.engines import Engine


def metric(engine: Engine, name: str, labels: str = "") -> float:
    """The sum of a metric over its labels, or over those series whose labels contain `labels`."""
    pattern = rf"^sglang_ext:transfer_{name}(\{{[^}}]*\}})? (\S+)$"
    found = re.findall(pattern, engine.get("/metrics").body, re.M)
    return sum(float(value) for those, value in found if labels in those)


def settled(engine: Engine, name: str) -> float:
    """A metric once it has not changed for longer than the interval at which it is published."""
    value, since_s = metric(engine, name), time.monotonic()
    while time.monotonic() - since_s < 1.5:
        time.sleep(0.2)
        if metric(engine, name) != value:
            value, since_s = metric(engine, name), time.monotonic()
    return value

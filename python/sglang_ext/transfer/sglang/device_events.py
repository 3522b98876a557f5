"""Events in the work of this process's device, which threads of the endpoint wait for."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.transfer.endpoint.outgoing_transfer import DeviceEvent


def record_event(stream: Any = None) -> DeviceEvent:
    """Return an event behind all work that has been given to a stream of a GPU; None: to the current one."""
    event: DeviceEvent = torch.cuda.Event(blocking=True)  # a thread that waits for it takes no core meanwhile
    event.record(*(() if stream is None else (stream,)))  # type: ignore[attr-defined]
    return event

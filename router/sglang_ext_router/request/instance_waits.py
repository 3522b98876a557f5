"""Requests that wait for an instance: none of the kind that they need is ready, and one may return."""

from __future__ import annotations

import asyncio
from typing import Protocol

from sglang_ext_router.instances.registry import WorkerRegistry


class Waiting(Protocol):
    """A request that waits for an instance."""

    def on_instances_changed(self) -> None:
        """Other instances may be ready now: go on, or wait on."""

    def on_no_instance_came(self) -> None:
        """The time to wait is over."""


class InstanceWaits:
    """The waiting requests in order of their arrival; they try again whenever the ready instances may be others."""

    def __init__(self, registry: WorkerRegistry, loop: asyncio.AbstractEventLoop, max_waiting: int) -> None:
        self._loop = loop
        self._max_waiting = max_waiting
        self._ends_s: dict[Waiting, float] = {}
        self._is_waking = False
        registry.on_refreshed = self._on_refreshed

    def __len__(self) -> int:
        return len(self._ends_s)

    def add(self, request: Waiting, end_s: float) -> bool:
        """Let a request wait until `end_s`, as before if it waits already; return whether there is room for it."""
        if request not in self._ends_s:
            if len(self._ends_s) >= self._max_waiting or end_s <= self._loop.time():
                return False
            self._ends_s[request] = end_s
        return True

    def remove(self, request: Waiting) -> None:
        """The request goes on, or has ended."""
        self._ends_s.pop(request, None)

    def expire(self, now_s: float) -> None:
        """End the waiting of the requests whose time is over."""
        if self._ends_s:
            for request in [request for request, end_s in self._ends_s.items() if end_s <= now_s]:
                if self._ends_s.pop(request, None) is not None:
                    request.on_no_instance_came()

    def _on_refreshed(self) -> None:
        if self._ends_s and not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._wake)  # the registry is being changed

    def _wake(self) -> None:
        self._is_waking = False
        for request in tuple(self._ends_s):
            if request in self._ends_s:
                request.on_instances_changed()

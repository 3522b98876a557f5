"""Soft state shared between the processes of one router."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from sglang_ext_router.config import WorkerAddress

if TYPE_CHECKING:
    from sglang_ext_router.router import Router


class SiblingLink(Protocol):
    """How a process tells the others what they cannot see for themselves."""

    async def start(self, router: Router) -> None: ...

    async def stop(self) -> None: ...

    def tell_added(self, address: WorkerAddress) -> None: ...

    def tell_removed(self, url: str) -> None: ...

    def tell_draining(self, url: str, is_draining: bool) -> None: ...

    def metric_snapshots(self) -> Iterable[Mapping[str, Any]]: ...


class NoSiblings:
    """A router of one process."""

    async def start(self, router: Router) -> None:
        """Nobody to meet."""

    async def stop(self) -> None:
        """Nobody to leave."""

    def tell_added(self, address: WorkerAddress) -> None:
        """Nobody to tell."""

    def tell_removed(self, url: str) -> None:
        """Nobody to tell."""

    def tell_draining(self, url: str, is_draining: bool) -> None:
        """Nobody to tell."""

    def metric_snapshots(self) -> Iterable[Mapping[str, Any]]:
        return ()

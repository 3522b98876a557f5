"""SGLang's load report, counting the prefills that are parked between two chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer

from sglang_ext.sglang_plugin.laps.engine_interface import prefix_tokens


@dataclass(kw_only=True, frozen=True)
class ParkedLoadInquirer(SchedulerLoadInquirer):  # type: ignore[misc]  # SGLang has no type information
    """A parked request waits like a queued one, but only for what it has left, and its KV is in use already."""

    get_parked: Callable[[], Sequence[Any]]

    @classmethod
    def over(cls, stock: SchedulerLoadInquirer, get_parked: Callable[[], Sequence[Any]]) -> ParkedLoadInquirer:
        """The same inquirer, with parked requests."""
        values = {field.name: getattr(stock, field.name) for field in fields(stock)}
        return cls(**values, get_parked=get_parked)

    def _get_num_pending_tokens(self, chunk_deduct: int = 0) -> int:
        return int(super()._get_num_pending_tokens(chunk_deduct)) + self._parked_tokens()

    def get_num_waiting_uncached_tokens(self) -> int:
        return int(super().get_num_waiting_uncached_tokens()) + self._parked_tokens()

    def get_loads(self) -> LoadSnapshot:
        loads = super().get_loads()
        parked = self.get_parked()
        if not parked:
            return loads
        # What a parked request has computed counts as used already.
        tokens = self._parked_tokens()
        return msgspec.structs.replace(
            loads,
            num_waiting_reqs=loads.num_waiting_reqs + len(parked),
            num_total_tokens=loads.num_total_tokens + tokens,
            num_active_tokens=loads.num_active_tokens + tokens,
        )

    def _parked_tokens(self) -> int:
        return sum(max(0, request.seqlen - prefix_tokens(request)) for request in self.get_parked())

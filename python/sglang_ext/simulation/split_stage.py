"""Two pools: instances that compute short prompts alone, and a sequence-parallel cluster for long ones.

Instances of the short pool come first in the timeline. Neither pool helps the other out.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_ext.simulation.records import BusyInterval, SimRequest
from sglang_ext.simulation.run import RecordedStage


class SplitStage:
    """Sends a prompt of at most `boundary_tokens` new tokens to `short`, a longer one to `long`."""

    def __init__(self, boundary_tokens: int, short: RecordedStage, long: RecordedStage, short_instances: int) -> None:
        self._boundary_tokens = boundary_tokens
        self._short = short
        self._long = long
        self._short_instances = short_instances

    @property
    def timeline(self) -> list[BusyInterval]:
        shifted = (busy._replace(instance=busy.instance + self._short_instances) for busy in self._long.timeline)
        return [*self._short.timeline, *shifted]

    def arrive(self, request: SimRequest) -> None:
        is_short = request.new_tokens <= self._boundary_tokens
        (self._short if is_short else self._long).arrive(request)

    def unfinished(self) -> Iterable[SimRequest]:
        return [*self._short.unfinished(), *self._long.unfinished()]

"""The prefill instances of a simulated cluster, and when one of them fails."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Equal prefill instances. ValueError for a number below 1."""

    instances: int
    instances_per_node: int = 8
    kv_tokens: int = 1_000_000  # that one instance holds

    def __post_init__(self) -> None:
        for name in ("instances", "instances_per_node", "kv_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")


class Failure:
    """An instance is down for a while. Times are seconds of the simulation."""

    __slots__ = ("at_s", "down_s", "instance")

    def __init__(self, instance: int, at_s: float, down_s: float) -> None:
        if not (at_s >= 0 and down_s > 0):
            raise ValueError(f"a failure is at 0 s or later and lasts, got {at_s:g} s and {down_s:g} s")
        self.instance, self.at_s, self.down_s = instance, at_s, down_s

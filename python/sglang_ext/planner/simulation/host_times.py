"""Host time around the operators of an H200, fitted to runs that others have published; one place for all experiments.

`H200_HOST` is what `bench/papers.py authors` predicts the runs of LAPS's authors with (docs/explanation/laps-authors.md
says how it was fitted, and how far off it is). `NO_HOST` leaves bare operator times.

A request's way, on instances of prefill and decode:

    front ──▶ half of the way ──▶ iterations of prefill ──▶ transfer, the other half ──▶ decode's first step ──▶ front
"""

from __future__ import annotations

from typing import NamedTuple


class HostTimes(NamedTuple):
    """Holds the times of everything around the operators, in seconds."""

    front_s: float  # of a request at the load balancer, one thing after the other
    reply_s: float  # of a reply, likewise
    way_s: float  # HTTP, tokenizing and bootstrap, half of it before prefill
    transfer_s_per_byte: float  # of KV
    launch_s: float  # of a layer, without a graph
    launch_tp_s: float  # the same on each of several devices
    eager_s: float  # of an iteration without a graph
    replayed_s: float  # of an iteration that replays one
    request_s: float  # of each request in an iteration

    def launching_s(self, layers: int, tp: int, requests: int) -> float:
        """Return how long the host is at an iteration without a graph."""
        return self._layers_s(layers, tp) + self.eager_s + self.request_s * requests

    def iteration_s(self, device_s: float, layers: int, tp: int, requests: int, *, is_eager: bool) -> float:
        """Return the seconds of an iteration that takes a device `device_s`: layers are launched while it computes."""
        if is_eager:
            return max(device_s, self._layers_s(layers, tp)) + self.eager_s + self.request_s * requests
        return device_s + self.replayed_s + self.request_s * requests

    def _layers_s(self, layers: int, tp: int) -> float:
        return layers * (self.launch_tp_s if tp > 1 else self.launch_s)


NO_HOST = HostTimes(*(0.0 for _ in HostTimes._fields))
H200_HOST = HostTimes(
    front_s=1.39e-3,
    reply_s=0.202e-3,
    way_s=4.00e-3,
    transfer_s_per_byte=41.6e-12,
    launch_s=0.211e-3,
    launch_tp_s=0.416e-3,
    eager_s=3.50e-3,
    replayed_s=3.62e-3,
    request_s=0.242e-3,
)

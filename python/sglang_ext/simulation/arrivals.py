"""When requests arrive: Poisson, or in bursts, from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from sglang_ext.simulation.records import SimRequest


def poisson_s(rate_per_s: float, random: Random) -> Iterator[float]:
    """Arrival times without end. The same seed at twice the rate gives the same pattern in half the time."""
    now_s = 0.0
    while True:
        now_s += random.expovariate(1.0) / rate_per_s
        yield now_s


def bursty_s(rate_per_s: float, shape: float, random: Random) -> Iterator[float]:
    """Arrival times with gamma-distributed gaps of this mean rate; below a shape of 1 they come in bursts.

    The gaps' coefficient of variation is 1 / sqrt(shape).
    """
    now_s = 0.0
    while True:
        now_s += random.gammavariate(shape, 1.0 / shape) / rate_per_s
        yield now_s


def drawn_requests(
    lengths: Sequence[tuple[int, int]], count: int, rate_per_s: float, seed: int, burst_shape: float = 1.0
) -> Iterator[SimRequest]:
    """Requests whose (prompt, output) tokens are drawn from `lengths` with replacement, at such arrivals.

    Lengths and times have random streams of their own, so that the lengths of a seed are the same at every rate.
    """
    gaps, draws = Random(f"arrivals {seed}"), Random(f"lengths {seed}")
    times_s = poisson_s(rate_per_s, gaps) if burst_shape == 1.0 else bursty_s(rate_per_s, burst_shape, gaps)
    for key in range(count):
        prompt_tokens, output_tokens = draws.choice(lengths)
        yield SimRequest(key, next(times_s), prompt_tokens, output_tokens)


def scaled(requests: Sequence[SimRequest], rate_per_s: float) -> list[SimRequest]:
    """The same requests with their arrival times stretched to this mean rate (Tetris, section 7.2).

    ValueError unless the first and the last arrive at different times.
    """
    first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
    if not last_s > first_s:
        raise ValueError("all requests arrive at once: no rate can be given to them")
    factor = (len(requests) - 1) / rate_per_s / (last_s - first_s)
    return [one._replace(arrival_s=(one.arrival_s - first_s) * factor) for one in requests]

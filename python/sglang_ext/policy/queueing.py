"""Waiting in an M/G/1 queue, first come first served, and what mixing short with long service adds to it.

Poisson arrivals, one server, any distribution of service times S (LAPS, section 2.2).
"""

from __future__ import annotations

from math import inf


def mean_wait_s(arrivals_per_s: float, mean_service_s: float, mean_square_service_s2: float) -> float:
    """Pollaczek and Khinchine: W = lambda E[S^2] / (2 (1 - rho)), rho = lambda E[S]; infinite from rho = 1 on."""
    utilisation = arrivals_per_s * mean_service_s
    return arrivals_per_s * mean_square_service_s2 / (2 * (1 - utilisation)) if utilisation < 1 else inf


def mixing_penalty_s(
    arrivals_per_s: float, short_fraction: float, short_service_s: float, long_service_s: float
) -> float:
    """What the variance between the classes adds to W: lambda p (1 - p) (S_l - S_s)^2 / (2 (1 - rho)).

    `short_fraction` p of the requests takes `short_service_s`, the others `long_service_s`.
    """
    mean_s = short_fraction * short_service_s + (1 - short_fraction) * long_service_s
    variance_s2 = short_fraction * (1 - short_fraction) * (long_service_s - short_service_s) ** 2
    return mean_wait_s(arrivals_per_s, mean_s, variance_s2)

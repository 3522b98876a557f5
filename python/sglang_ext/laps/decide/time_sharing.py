"""Sharing an instance's time between short and long prefills (Medha's space sharing, with batches of their own).

Medha gives a long prefill (1 - clip(rho, 0, rho_max)) of an iteration's time budget and mixes short ones into the
rest. Here a batch is all short or one long chunk, so the share is kept over time, as an account: a long chunk of
t seconds earns the shorts x / (1 - x) * t seconds, and what they use is taken off.
"""

from __future__ import annotations

from math import sqrt

_LEAST_OF_SLO = 0.25
_MOST_OF_SLO = 3.0
_MOST_OVERHEAD = 0.05  # share of a round that may go to what every chunk costs again
_LONG_WEIGHT = 8.0  # time lost to overhead also delays what arrives later: by 1 / (1 - load) in all
_MOST_SHARE = 0.9  # under all options, a long prefill moves on
_REPORT_ROUNDS = 20.0


def choose_share(long_slack: float, rho_min: float, rho_max: float) -> float:
    """x: the shorts' share of the time while a long prefill of this relative slack waits.

    Medha's clip(rho, 0, rho_max) for `rho_min` 0. With a larger one the shorts keep that much when the long prefill
    is late: its deadline is then lost, theirs are not.
    """
    return min(rho_max, max(rho_min, long_slack))


def automatic_round_s(fixed_s: float, long_backlog_s: float, short_slo_s: float, longest_short_s: float) -> float:
    """Time budget of a round, s: a short prefill waits for a long chunk of at most this.

    A short prefill that arrives during a chunk waits T / 2 for its end, and chunks of T make the long prefills that
    wait (`long_backlog_s` of work) end later by backlog * fixed / T, `fixed_s` being what every chunk costs again.
    The sum, with a weight of 8 on the latter, is smallest at T = sqrt(2 * 8 * fixed * backlog). So T is short at
    light load and long where time is scarce. It is at least a quarter of the short prefills' objective and twenty
    times the fixed cost, and at most three times that objective, or `longest_short_s`, their own time, if that is
    more.
    """
    min_s = max(_LEAST_OF_SLO * short_slo_s, fixed_s / _MOST_OVERHEAD)
    max_s = max(min_s, _MOST_OF_SLO * max(short_slo_s, longest_short_s))
    return min(max(sqrt(2 * _LONG_WEIGHT * fixed_s * long_backlog_s), min_s), max_s)


class TimeAccount:
    """Describes what the short prefills may still use before the next long chunk, at the share x and at the largest
    share.

    Over any time that both classes wait, shorts use at most x / (1 - x) of what longs use, one round of balance
    and the batch that overdraws it.
    """

    __slots__ = ("_balance_s", "_max_balance_s", "long_s", "short_s")

    def __init__(self) -> None:
        self._balance_s: float | None = None  # None: a full round of any length
        self._max_balance_s: float | None = None
        self.short_s = 0.0  # used recently while both waited
        self.long_s = 0.0

    def can_run_short(self) -> bool:
        """Return whether the shorts are within their share."""
        return self._balance_s is None or self._balance_s > 0

    def can_run_urgent(self) -> bool:
        """Return whether shorts that are more urgent than the long prefill are within the largest share."""
        return self._max_balance_s is None or self._max_balance_s > 0

    def short_share(self) -> float:
        """Share of the time that shorts used recently while both classes waited; 0 before any."""
        used_s = self.short_s + self.long_s
        return self.short_s / used_s if used_s > 0 else 0.0

    def clear(self) -> None:
        """No long prefill waits: what shorts use is taken from none."""
        self._balance_s = self._max_balance_s = None

    def spend(self, short_s: float, round_s: float) -> None:
        """A short batch of this time runs while a long prefill waits. A debt of more than a round is forgiven."""
        balance_s = round_s if self._balance_s is None else self._balance_s
        max_s = round_s if self._max_balance_s is None else self._max_balance_s
        self._balance_s = max(balance_s - short_s, -round_s)
        self._max_balance_s = max_s - short_s
        self._report(short_s, 0.0, round_s)

    def earn(self, long_s: float, share: float, max_share: float, round_s: float) -> None:
        """A long chunk of this time runs. The balance is bounded by one round."""
        if self._balance_s is not None:
            share = min(share, _MOST_SHARE)
            self._balance_s = min(self._balance_s + share / (1 - share) * long_s, round_s)
        if self._max_balance_s is not None:
            max_share = min(max_share, _MOST_SHARE)
            self._max_balance_s = min(self._max_balance_s + max_share / (1 - max_share) * long_s, round_s)
        self._report(0.0, long_s, round_s)

    def _report(self, short_s: float, long_s: float, round_s: float) -> None:
        self.short_s += short_s
        self.long_s += long_s
        used_s = self.short_s + self.long_s
        if used_s > _REPORT_ROUNDS * round_s:
            scale = _REPORT_ROUNDS * round_s / used_s
            self.short_s *= scale
            self.long_s *= scale

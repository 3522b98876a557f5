"""The share of an instance's time that short prefills take while long ones wait, kept as an account.

A batch of only short prefills takes all of an iteration, so their share x is kept over time: long work of t seconds
earns them x / (1 - x) * t seconds, and what they use is taken off (Medha's space sharing, over time).
"""

from __future__ import annotations

_MOST_SHARE = 0.9  # under all options, a long prefill moves on
_REPORT_ROUNDS = 20.0


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

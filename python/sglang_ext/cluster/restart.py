"""When an instance that died is started again. Pure: times come in as arguments."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
STEADY_AFTER_S = 60.0  # an instance that served this long starts again with the first delay


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """Failures in a row of one instance."""

    failures: int = 0

    def after_death(self, served_s: float | None) -> RestartRecord:
        """Return the record after a death; `served_s` is how long it had been healthy, None if never."""
        if served_s is not None and served_s >= STEADY_AFTER_S:
            return RestartRecord(1)
        return RestartRecord(self.failures + 1)

    @property
    def delay_s(self) -> float:
        """Wait before the next start: doubled with every failure in a row, within bounds."""
        # The exponent is bounded too: a float overflows after a thousand doublings.
        return min(FIRST_DELAY_S * 2.0 ** min(max(self.failures - 1, 0), 16), LONGEST_DELAY_S)

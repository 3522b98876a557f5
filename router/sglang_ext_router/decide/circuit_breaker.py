"""A circuit breaker: it stops requests to an instance that fails, and finds out when the instance has recovered.

The states are the usual three. Two things are not. A burst is one piece of evidence: a failure counts only if
its request was started after the last counted failure was seen, so a hundred requests that die together do not
open the circuit. And the router tries a pool whose circuits are all open anyway: refusing everything is never better
than trying. Of several routers each has its own circuits, as the fault may lie on its own way to the instance; where
one has opened a circuit, the first failure of another one's opens it there.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum


class CircuitState(StrEnum):
    """Closed lets requests through, open does not, half-open lets one trial at a time through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_CLOSED, _OPEN, _HALF_OPEN = CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN
_NEVER_S = float("-inf")


class CircuitBreaker:
    """The breaker of one instance. Times are seconds on one monotonic clock of the caller's.

    Opens when `failure_threshold` failures were counted within `window_s` without a success in between; after
    `open_s` it is half-open, and closes after `success_threshold` successes. A trial whose outcome has not
    been reported `open_s` after its start is considered lost, and the next one may start. Raises ValueError,
    naming the argument.
    """

    def __init__(
        self,
        failure_threshold: int = 5,
        success_threshold: int = 2,
        open_s: float = 30.0,
        window_s: float = 60.0,
    ) -> None:
        if failure_threshold < 1:
            raise ValueError(f"failure_threshold must be at least 1, got {failure_threshold}")
        if success_threshold < 1:
            raise ValueError(f"success_threshold must be at least 1, got {success_threshold}")
        if not open_s > 0:
            raise ValueError(f"open_s must be above 0, got {open_s}")
        if not window_s > 0:
            raise ValueError(f"window_s must be above 0, got {window_s}")
        self.failure_threshold = failure_threshold
        self.success_threshold = success_threshold
        self.open_s = open_s
        self.window_s = window_s
        self.is_suspected = False  # another router's circuit to this instance is not closed: one failure opens it
        self._state = _CLOSED
        self._failures_s: deque[float] = deque(maxlen=failure_threshold)
        self._last_failure_s = _NEVER_S  # when the last counted failure was seen
        self._opened_s = _NEVER_S
        self._trial_s: float | None = None  # start of the trial under way
        self._successes = 0

    def state(self, now_s: float) -> CircuitState:
        """The state at `now_s`: an open circuit becomes half-open when its time has passed."""
        if self._state is _OPEN and now_s - self._opened_s >= self.open_s:
            return _HALF_OPEN
        return self._state

    def can_try(self, now_s: float) -> bool:
        """Return whether a request may be sent now."""
        if self._state is _CLOSED:
            return True
        if self.state(now_s) is _OPEN:
            return False
        return self._trial_s is None or now_s - self._trial_s >= self.open_s

    @property
    def is_quiet(self) -> bool:
        """Return whether it is closed and remembers no failure: successes and starts need not be recorded."""
        return self._state is _CLOSED and not self._failures_s

    def on_start(self, now_s: float) -> None:
        """A request is sent. In half-open it is the trial, if there is none yet."""
        if self._state is _CLOSED:
            return
        if self.state(now_s) is _HALF_OPEN:
            if self._state is _OPEN:
                self._half_open()
            if self._trial_s is None or now_s - self._trial_s >= self.open_s:
                self._trial_s = now_s

    def record_success(self, now_s: float, started_s: float | None = None) -> None:
        """A request has succeeded. Started before the last counted failure, it does not speak against it."""
        if started_s is not None and started_s <= self._last_failure_s:
            return
        if self._state is _CLOSED:
            if self._failures_s:
                self._failures_s.clear()
            return
        if self._state is _OPEN:  # all circuits of the pool were open, so it was tried anyway, and works
            self._half_open()
        self._trial_s = None
        self._successes += 1
        if self._successes >= self.success_threshold:
            self._state = _CLOSED
            self._failures_s.clear()

    def record_failure(self, started_s: float, now_s: float) -> None:
        """A request that was sent at `started_s` has failed."""
        if started_s <= self._last_failure_s:
            return
        self._last_failure_s = now_s
        if self._state is _CLOSED:
            failures_s = self._failures_s
            failures_s.append(now_s)
            while failures_s[0] <= now_s - self.window_s:
                failures_s.popleft()
            if len(failures_s) < self.failure_threshold and not self.is_suspected:
                return
        self._state = _OPEN
        self._opened_s = now_s
        self._trial_s = None

    def release_trial(self) -> None:
        """A request has ended without a verdict (its client left, say): the trial is free again."""
        self._trial_s = None

    def _half_open(self) -> None:
        self._state = _HALF_OPEN
        self._trial_s = None
        self._successes = 0

"""Adaptive wait-depth (LAPS, Algorithm 1): how long a short batch fills, and how deep it should get.

The timer of a window starts at the arrival of the batch's oldest request, so a window needs no state of its own and
no decision can prolong it. What is learned is the depth D that windows reach and the window W that reaching it takes;
what a window expects is the rate of the latest arrivals.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from math import exp, inf
from typing import Final, NamedTuple

from sglang_ext.laps.decide.round_plan import DispatchReason

# Looking a member up in its class takes longer than comparing it.
_DEPTH: Final = DispatchReason.DEPTH
_WINDOW: Final = DispatchReason.WINDOW
_SLACK: Final = DispatchReason.SLACK
_NO_GAIN: Final = DispatchReason.NO_GAIN
_TOKENS: Final = DispatchReason.TOKENS
_FULL_SHAPE: Final = DispatchReason.FULL_SHAPE
_HEAD_WAIT: Final = DispatchReason.HEAD_WAIT
_LEARNING_RATE: Final = 1 / 8
_HEADROOM: Final = 1.5  # the next batch may take longer to fill than this one
_GROW_AT: Final = 0.75  # of the way to the next depth
_SHRINK_AT: Final = 0.1  # of the way up from the depth below
_VALUE_OF_OTHERS: Final = 0.3
_MOST_OTHERS: Final = 3.0
_LEAST_SPAN_S: Final = 1e-3  # arrivals of one instant are a burst, not an infinite rate
_MOST_OFFERED: Final = 256
_LONG_WORKS: Final = 64
_LEAST_OFFERED: Final = 32
_OFFERED_FOR_S: Final = 60.0


class GatheringBatch(NamedTuple):
    """The batch that could leave now."""

    depth: int  # requests; at least 1
    new_tokens: int
    is_full: bool  # no other request can join it: shape, memory or time are used up
    oldest_arrival_s: float
    newest_arrival_s: float
    latest_start_s: float  # min over the short queue of deadline - predicted time: absolute, may be infinite
    break_even_gap_s: float  # longest gap to the next arrival that is worth waiting out; 0 when none is


class Verdict(NamedTuple):
    """A reason to leave now, or None: wait until `wake_s` (absolute) or until something arrives."""

    reason: DispatchReason | None
    wake_s: float


class WindowLimits(NamedTuple):
    """The bounds of the options, s."""

    w_min_s: float
    w_max_s: float
    t_max_s: float
    sigma_s: float
    delta_s: float


class Evidence(Enum):
    """Describes what a batch that left says about the depth that a window reaches."""

    REACHED = "reached"  # the depth was there
    MISSED = "missed"  # a whole window, undisturbed, was not enough
    NONE = "none"  # cut short, drained, or nothing was waited for


def break_even_gap_s(depth: int, alone_s: float, batch_s: float, joined_s: float, others: float = 0.0) -> float:
    """Longest expected gap to the next short request for which waiting lowers the sum of latencies; 0 if none does.

    `alone_s` is the time T(1) of a short prefill by itself, `batch_s` T(d) that of the batch, `joined_s` T(d+1) with
    one more. Leaving now, the d requests end at T(d) and the next, which arrives after g, at T(d) + T(1); waiting,
    all end at g + T(d+1). The sums are equal at g = T(1) / (d+1) - (T(d+1) - T(d)): where a padded or
    overhead-bound batch takes one more for free, T(1) / (d+1); where time is linear in tokens, never above 0.

    `others` is the number n of requests, in addition to these, for which the machine is free earlier by what waiting
    saves, T(1) - (T(d+1) - T(d)) - g: with them the gap is (1+n) T(1) / (d+1+n) - (T(d+1) - T(d)).
    """
    grown_s = max(0.0, joined_s - batch_s)
    return max(0.0, (1 + others) * alone_s / (depth + 1 + others) - grown_s)


def others_served(arrivals_per_s: float, batch_s: float, busy_share: float) -> float:
    """n of `break_even_gap_s`: to how many that will come a second of the machine's time is worth a second.

    On an idle machine to none. On a busy one those who arrive during a batch start when it ends, but they are not
    served a second later for each second lost: the busier the machine, the deeper their batches get by themselves. So
    each counts for 0.3, and three at most. In simulation that saves an overhead-bound machine 2 to 7% of its time for
    0 to 3% of the mean TTFT at high rates, and changes nothing at low ones. If each counted in full, or n were
    1 / (1 - busy share), it would cost 10 to 60%.
    """
    return _VALUE_OF_OTHERS * min(arrivals_per_s * batch_s, _MOST_OTHERS) * busy_share * busy_share


class AdaptiveWaitDepth:
    """W and D of one instance. Raises ValueError without depths to choose from."""

    __slots__ = ("_depths", "_fill", "_level", "_limits", "learned_window_s")

    def __init__(self, limits: WindowLimits, depths: Sequence[int]) -> None:
        if not depths or min(depths) < 1:
            raise ValueError(f"depths must be at least 1, got {list(depths)}")
        self._limits = limits
        self._depths = sorted({1, *depths})
        self._level = len(self._depths) - 1  # the deepest captured graph, as in Algorithm 1
        self._fill = float(self.depth)  # average depth that windows reach
        self.learned_window_s = limits.w_max_s

    @property
    def depth(self) -> int:
        """D."""
        return self._depths[self._level]

    def use_depths(self, depths: Sequence[int]) -> None:
        """There are other depths to choose from now: D becomes the largest that is not above it."""
        depth = self.depth
        self._depths = sorted({1, *depths})
        self._level = bisect_right(self._depths, depth) - 1

    def choose(self, now_s: float, batch: GatheringBatch, arrivals_per_s: float) -> Verdict:
        """Decide with deadlines: W = clip(min{W_SLA, W_GR, learned W, what waiting pays}, [W_min, W_max])."""
        limits = self._limits
        now = self._choose_at_once(now_s, batch)
        if now is not None:
            return Verdict(now, now_s)
        if batch.depth >= self.depth:
            return Verdict(_DEPTH, now_s)
        end_s, reason = min(
            (batch.oldest_arrival_s + self.window_s(arrivals_per_s), _WINDOW),
            (batch.latest_start_s - limits.delta_s, _SLACK),
            (self._pays_until_s(now_s, batch, arrivals_per_s), _NO_GAIN),
        )
        min_s = batch.oldest_arrival_s + limits.w_min_s
        if end_s < min_s:
            end_s, reason = min_s, _WINDOW
        if end_s <= now_s:
            return Verdict(reason, now_s)
        return Verdict(None, min(end_s, self._forced_s(batch)))

    def window_s(self, arrivals_per_s: float) -> float:
        """The window without deadlines: the learned one, or W_GR, in which D requests should arrive, if that is less.

        The paper's W_GR is (D - depth) / rate. An expectation is missed half of the time, hence the headroom.
        """
        graph_s = _HEADROOM * (self.depth - 1) / max(arrivals_per_s, 1e-9)
        return max(self._limits.w_min_s, min(self.learned_window_s, graph_s))

    def choose_token_max(self, now_s: float, batch: GatheringBatch, token_max: int) -> Verdict:
        """Decide without deadlines: leave with `token_max` tokens, or when nothing has arrived for W_max."""
        now = self._choose_at_once(now_s, batch)
        if batch.new_tokens >= token_max:
            return Verdict(_TOKENS, now_s)
        if now is not None:
            return Verdict(now, now_s)
        drained_s = batch.newest_arrival_s + self._limits.w_max_s
        if drained_s <= now_s:
            return Verdict(_WINDOW, now_s)
        return Verdict(None, min(drained_s, self._forced_s(batch)))

    def evidence(self, reason: DispatchReason, depth: int, arrivals_per_s: float) -> Evidence:
        """Return what a batch of this depth says. With less than one arrival expected in a window, the queue was
        drained."""
        if depth >= self.depth:
            return Evidence.REACHED
        if reason is _WINDOW and arrivals_per_s * self._limits.w_max_s >= 1:
            return Evidence.MISSED
        return Evidence.NONE

    def learn(self, evidence: Evidence, depth: int, fill_s: float) -> None:
        """A batch of `depth` requests has left that arrived within `fill_s`.

        Algorithm 1 as printed only ever lowers W and D. Here both are averages, so they follow the load in either
        direction: D to the depth that batches have, in steps of the grid and with hysteresis; W to the time that
        filling takes, and back towards W_max while windows end without reaching D.
        """
        if evidence is Evidence.NONE:
            return
        limits = self._limits
        wanted_s = limits.w_max_s
        reachable = depth
        if evidence is Evidence.REACHED:
            wanted_s = min(max(_HEADROOM * fill_s, limits.w_min_s), limits.w_max_s)
            if depth > 1 and fill_s < limits.w_max_s / 2:
                reachable = 2 * depth  # in the rest of the longest window as many would have come again
        if self.depth > 1:  # a window for one request has no length to learn
            self.learned_window_s += _LEARNING_RATE * (wanted_s - self.learned_window_s)
        self._fill += _LEARNING_RATE * (min(reachable, self._depths[-1]) - self._fill)
        self._level = self._follow(self._level)

    def _follow(self, level: int) -> int:
        """The level of the grid for the average fill, from `level`."""
        depths = self._depths
        while level + 1 < len(depths):
            here, above = depths[level], depths[level + 1]
            if self._fill < here + _GROW_AT * (above - here):
                break
            level += 1
        while level > 0:
            below, here = depths[level - 1], depths[level]
            if self._fill > below + _SHRINK_AT * (here - below):
                break
            level -= 1
        return level

    def _choose_at_once(self, now_s: float, batch: GatheringBatch) -> DispatchReason | None:
        if now_s >= batch.latest_start_s - self._limits.sigma_s:  # as in _forced_s, to the last bit
            return _SLACK
        if batch.is_full:
            return _FULL_SHAPE
        if now_s >= batch.oldest_arrival_s + self._limits.t_max_s:
            return _HEAD_WAIT
        return None

    def _forced_s(self, batch: GatheringBatch) -> float:
        return min(batch.oldest_arrival_s + self._limits.t_max_s, batch.latest_start_s - self._limits.sigma_s)

    def _pays_until_s(self, now_s: float, batch: GatheringBatch, arrivals_per_s: float) -> float:
        """Waiting pays while the gap to the next arrival, expected or already seen, is below the break-even."""
        if arrivals_per_s * batch.break_even_gap_s <= 1:
            return now_s
        return batch.newest_arrival_s + batch.break_even_gap_s


class ArrivalRate:
    """Rate over at most `arrivals` latest arrivals, none of them older than `horizon_s`."""

    __slots__ = ("_arrivals_s", "horizon_s")

    def __init__(self, arrivals: int = 64, horizon_s: float = 10.0) -> None:
        if arrivals < 2:
            raise ValueError(f"arrivals must be at least 2, got {arrivals}")
        if not horizon_s > 0:
            raise ValueError(f"horizon_s must be above 0, got {horizon_s}")
        self.horizon_s = horizon_s
        self._arrivals_s: deque[float] = deque(maxlen=arrivals)

    def add(self, now_s: float) -> None:
        """A request has arrived. A time before the latest arrival counts as that one's."""
        if self._arrivals_s:
            now_s = max(now_s, self._arrivals_s[-1])
        self._arrivals_s.append(now_s)

    def per_s(self, now_s: float) -> float:
        """Arrivals per second: n arrivals since (and without) the first remembered one, over that time."""
        arrivals_s = self._arrivals_s
        first = bisect_right(arrivals_s, now_s - self.horizon_s)
        count = len(arrivals_s) - first
        if count < 2:
            return count / self.horizon_s
        return (count - 1) / max(now_s - arrivals_s[first], _LEAST_SPAN_S)


class OfferedLoad(NamedTuple):
    """The load of an instance. `utilisation` is the time that arrives to be computed per second."""

    requests_per_s: float
    utilisation: float

    @property
    def mean_work_s(self) -> float:
        """Return what a request takes to be computed; 0 before the first one."""
        return self.utilisation / self.requests_per_s if 0 < self.requests_per_s < inf else 0.0


class OfferedWork:
    """The work that arrives: of the latest 256 requests, but of those older than a minute only the latest 32."""

    __slots__ = ("_arrivals", "_work_s")

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, float, int, int]] = deque()
        self._work_s = 0.0

    def add(self, now_s: float, work_s: float, new_tokens: int = 0, cached_tokens: int = 0) -> None:
        """A request has arrived that takes `work_s`."""
        arrivals = self._arrivals
        if arrivals:
            now_s = max(now_s, arrivals[-1][0])
        arrivals.append((now_s, work_s, new_tokens, cached_tokens))
        self._work_s += work_s
        while len(arrivals) > _MOST_OFFERED or (
            len(arrivals) > _LEAST_OFFERED and now_s - arrivals[0][0] > _OFFERED_FOR_S
        ):
            self._work_s -= arrivals.popleft()[1]

    def predict_again(self, work_s: Callable[[int, int], float]) -> None:
        """Predict all requests again; `work_s` returns the time of a number of new and cached tokens."""
        self._arrivals = deque([(at_s, work_s(new, cached), new, cached) for at_s, _, new, cached in self._arrivals])
        self._work_s = sum([arrival[1] for arrival in self._arrivals])

    def load(self, now_s: float) -> OfferedLoad:
        """Return the load by the requests that are remembered, over the time since the first of them.

        Before there is one, others may come at once; as long as none follows the first, less often with time. Its work
        does not count: it is not known how long nothing had come before.
        """
        arrivals = self._arrivals
        if not arrivals:
            return OfferedLoad(inf, 0.0)
        first_s, first_work_s, _, _ = arrivals[0]
        span_s = max(now_s - first_s, _LEAST_SPAN_S)
        return OfferedLoad(len(arrivals) / span_s, max(0.0, self._work_s - first_work_s) / span_s)


class LongWork:
    """The work of the latest 64 long prefills.

    `typical_s` is the mean work, s, of the prefill that a second of it belongs to, sum(x^2) / sum(x); 0 without any.
    """

    __slots__ = ("_works", "typical_s")

    def __init__(self) -> None:
        self._works: deque[tuple[float, int, int]] = deque(maxlen=_LONG_WORKS)
        self.typical_s = 0.0

    def add(self, work_s: float, new_tokens: int, cached_tokens: int) -> None:
        """A long prefill has arrived that takes `work_s`."""
        self._works.append((work_s, new_tokens, cached_tokens))
        self._weigh()

    def predict_again(self, work_s: Callable[[int, int], float]) -> None:
        """Predict all of them again; `work_s` returns the time of a number of new and cached tokens."""
        works = [(work_s(new, cached), new, cached) for _, new, cached in self._works]
        self._works = deque(works, maxlen=_LONG_WORKS)
        self._weigh()

    def _weigh(self) -> None:
        total_s = square_s2 = 0.0
        for work_s, _, _ in self._works:
            total_s += work_s
            square_s2 += work_s * work_s
        self.typical_s = square_s2 / total_s if total_s > 0 else 0.0


class BusyShare:
    """Share of the time in which the machine has computed recently: an average over about `horizon_s`."""

    __slots__ = ("_busy_s", "_since_s", "horizon_s", "share")

    def __init__(self, horizon_s: float = 2.0) -> None:
        if not horizon_s > 0:
            raise ValueError(f"horizon_s must be above 0, got {horizon_s}")
        self.horizon_s = horizon_s
        self.share = 0.0  # when the latest iteration started
        self._since_s = 0.0
        self._busy_s = 0.0

    def add(self, now_s: float, duration_s: float) -> None:
        """An iteration starts that should take `duration_s`. An iteration that starts earlier has taken less than it
        should."""
        span_s = now_s - self._since_s
        if span_s > 0:
            weight = 1 - exp(-span_s / self.horizon_s)
            self.share += weight * (min(1.0, self._busy_s / span_s) - self.share)
        self._since_s = now_s
        self._busy_s = duration_s

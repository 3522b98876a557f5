"""The cheapest layouts that hold, found with few trials.

What is used is that more instances of a pool, or less load, never hurt. Of a family (a boundary, a TP, split or not)
each pool's least size is found with the others as large as they can be: below that corner nothing holds. Mostly the
corner itself holds; if not, what lies above it is tried in order of cost. So the result is that of trying all sizes,
wherever more never hurts.

On a long trace all families are compared on a quarter of it first, the busiest; the cheapest of them then on the whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from sglang_ext.planner.simulation.events import SimRequest
from sglang_ext.planner.sizing.load_trial import (
    Breach,
    ClusterLayout,
    LoadTrial,
    LoadVerdict,
    ObjectiveFigures,
    ServiceObjective,
    SizedEngine,
    TrialSetup,
)

T = TypeVar("T")
Sizes = tuple[int, ...]  # instances of each pool of a family
LOAD_STEP = 1.05  # between two loads that are tried
MOST_LOAD_STEPS = 40  # beyond the load that must hold: seven times as much
WHOLE_REQUESTS = 4000  # a trace of at most this many is not shortened
GUESSED_UTILISATION = 0.7


class LayoutFamily(NamedTuple):
    """Layouts that differ only in the sizes of their pools: short, long and decode, or both and decode."""

    boundary_tokens: int
    tp: int
    decode_tp: int
    is_split: bool
    long_pp: int = 1
    is_ring: bool = False

    @property
    def gpus_each(self) -> Sizes:
        """GPUs of an instance of each pool."""
        long = self.tp * self.long_pp
        return (self.tp, long, self.decode_tp) if self.is_split else (long, self.decode_tp)

    def layout(self, sizes: Sizes) -> ClusterLayout:
        short, long, both = (*sizes[:2], 0) if self.is_split else (0, 0, sizes[0])
        return ClusterLayout(
            *(self.boundary_tokens, self.tp, self.decode_tp, short, long, both, sizes[-1], self.long_pp, self.is_ring)
        )


class SizedLayout(NamedTuple):
    """A layout that holds, what it carries, and what it misses first beyond."""

    layout: ClusterLayout
    load: float  # times the trace's: the largest that was found to hold
    breach: Breach | None  # one step above; None: it holds at all loads that were tried
    as_recorded: dict[ServiceObjective, ObjectiveFigures]  # at the trace's own load


class InParallel(Protocol):
    """`map`, for calls that wait for trials."""

    def __call__(self, function: Callable[[int], T], values: Iterable[int], /) -> Iterable[T]: ...


def cheapest_sizes(
    gpus_each: Sizes,
    max_gpus: int,
    guess: Sizes,
    holds: Callable[[Sizes], bool],
    in_parallel: InParallel = map,
    is_too_dear: Callable[[int], bool] = lambda gpus: False,
) -> Sizes | None:
    """The sizes of at least 1 with the fewest GPUs for which `holds`, the smallest sizes first among equals.

    None if there are none with at most `max_gpus`, or as soon as it is clear that they take a number of GPUs that
    `is_too_dear`. `holds` must never become false by a larger size; it is asked for sizes beyond `max_gpus`, too, with
    all pools but one at the most that they can have.
    """
    total = sum(gpus_each)
    most = tuple((max_gpus - total + each) // each for each in gpus_each)
    if min(most) < 1:
        return None

    def holds_with(pool: int, size: int) -> bool:
        """Return whether it is enough if the other pools are as large as can be."""
        return holds((*most[:pool], size, *most[pool + 1 :]))

    def below_guess(pool: int) -> int:
        """A size below which nothing holds: the least that does, unless that is more than was guessed."""
        high, step = min(max(1, guess[pool]), most[pool]), 1
        is_enough = False
        while high > 1:
            size = max(1, high - step)
            if not holds_with(pool, size):
                return _least(lambda size: holds_with(pool, size), size, high) if is_enough else high
            high, step, is_enough = size, 2 * step, True
        return high

    def from_corner(pool: int) -> int | None:
        size, step = corner[pool], 1
        if holds_with(pool, size):
            return size
        while size < most[pool]:
            larger = min(most[pool], size + step)
            if holds_with(pool, larger):
                return _least(lambda size: holds_with(pool, size), size, larger)
            size, step = larger, 2 * step
        return None

    def gpus_of(sizes: Sizes) -> int:
        return sum(size * each for size, each in zip(sizes, gpus_each, strict=True))

    def is_out(sizes: Sizes) -> bool:
        return gpus_of(sizes) > max_gpus or is_too_dear(gpus_of(sizes))

    pools = range(len(gpus_each))
    corner = tuple(in_parallel(below_guess, pools))
    if is_out(corner):
        return None
    if holds(corner):
        return corner
    least = list(in_parallel(from_corner, pools))
    if any(size is None for size in least):
        return None
    first = tuple(size for size in least if size is not None)
    waiting = [(gpus_of(first), first)]
    seen = {first}
    while waiting:
        _, sizes = heapq.heappop(waiting)
        if is_out(sizes):
            return None
        if holds(sizes):
            return sizes
        for pool in pools:
            larger = (*sizes[:pool], sizes[pool] + 1, *sizes[pool + 1 :])
            if larger not in seen and larger[pool] <= most[pool]:
                seen.add(larger)
                heapq.heappush(waiting, (gpus_of(larger), larger))
    return None


def _least(holds: Callable[[int], bool], fails: int, enough: int) -> int:
    """The smallest size that holds, between a failing size and a size that holds."""
    while enough - fails > 1:
        middle = (fails + enough) // 2
        if holds(middle):
            enough = middle
        else:
            fails = middle
    return enough


def largest_load_step(holds: Callable[[int], bool], most: int) -> int:
    """The largest step from 0 to `most` that holds, 0 being known to; nothing holds above a step that does not."""
    step, width = 0, 1
    while step < most:
        further = min(most, step + width)
        if not holds(further):
            # `_least` of the opposite question, counted downwards.
            return -_least(lambda negative: holds(-negative), -further, -step)
        step, width = further, 2 * width
    return step


def guessed_sizes(family: LayoutFamily, setup: TrialSetup, load: float) -> Sizes:
    """Sizes at which each pool would be busy for 0.7 of the time, by the work in the trace. A place to begin at."""
    engine = setup.engines[family.tp]
    short_s = sum(
        engine.compute_s(request.prompt_tokens)
        for request in setup.requests
        if request.prompt_tokens <= family.boundary_tokens
    )
    long_s = sum(
        engine.compute_s(request.prompt_tokens, family.long_pp)
        for request in setup.requests
        if request.prompt_tokens > family.boundary_tokens or not family.is_split
    )
    duration_s = max(1e-9, setup.requests[-1].arrival_s - setup.requests[0].arrival_s) / load
    # A decode instance of a batch of n makes n tokens in base + n x per_request.
    decode = setup.decode
    batch = max(1.0, (setup.targets.time_per_token_s - decode.base_s) / max(1e-9, decode.per_request_s))
    tokens_s = sum(request.output_tokens for request in setup.requests) * (decode.base_s / batch + decode.per_request_s)

    def instances(work_s: float) -> int:
        return max(1, round(work_s / duration_s / GUESSED_UTILISATION))

    if family.is_split:
        return instances(short_s), instances(long_s), instances(tokens_s)
    return instances(long_s), instances(tokens_s)


def busiest_part(requests: Sequence[SimRequest], count: int, engine: SizedEngine) -> tuple[SimRequest, ...]:
    """The `count` consecutive requests that bring the most prefill work per second."""
    work_s = [0.0]
    for request in requests:
        work_s.append(work_s[-1] + engine.compute_s(request.prompt_tokens))

    def busyness(first: int) -> float:
        duration_s = requests[first + count - 1].arrival_s - requests[first].arrival_s
        return (work_s[first + count] - work_s[first]) / max(1e-9, duration_s)

    step = max(1, count // 8)
    first = max(range(0, len(requests) - count + 1, step), key=busyness)
    start_s = requests[first].arrival_s
    return tuple(request._replace(arrival_s=request.arrival_s - start_s) for request in requests[first : first + count])


class Trials(Protocol):
    """Carries trials out, each once; several at a time. `part` numbers the traces: the last one is the whole."""

    def verdict(self, part: int, trial: LoadTrial) -> LoadVerdict: ...

    def families_done(self, done: int, of: int) -> None:
        """Show the progress of the search."""
        ...


class LayoutSearch:
    """See the module. `setups` are the trace's parts that are compared one after the other, the last one all of it."""

    def __init__(
        self, setups: Sequence[TrialSetup], trials: Trials, in_parallel: InParallel, max_gpus: int, shown: int
    ) -> None:
        self._setups = setups
        self._trials = trials
        self._in_parallel = in_parallel
        self._max_gpus = max_gpus
        self._shown = shown

    def cheapest(self, families: Sequence[LayoutFamily], load: float) -> list[ClusterLayout]:
        """The cheapest layout of each of the best families, cheapest first, that holds at `load` times the trace's."""
        best: list[tuple[LayoutFamily, Sizes]] = [
            (family, guessed_sizes(family, self._setups[0], load)) for family in families
        ]
        for part in range(len(self._setups)):
            best = self._part(part, best, load)
        return [family.layout(sizes) for family, sizes in best]

    def _part(
        self, part: int, begun: Sequence[tuple[LayoutFamily, Sizes]], load: float
    ) -> list[tuple[LayoutFamily, Sizes]]:
        found: dict[int, ClusterLayout] = {}
        done = 0

        def is_too_dear(gpus: int) -> bool:
            """Return whether it is beyond as many as are asked for, independent of later results."""
            known = sorted(layout.gpus for layout in list(found.values()))
            return len(known) >= self._shown and gpus > known[self._shown - 1]

        def search(number: int) -> tuple[LayoutFamily, Sizes] | None:
            nonlocal done
            family, guess = begun[number]

            def holds(sizes: Sizes) -> bool:
                return self._trials.verdict(part, LoadTrial(family.layout(sizes), load)).holds

            sizes = cheapest_sizes(family.gpus_each, self._max_gpus, guess, holds, self._in_parallel, is_too_dear)
            if sizes is not None:
                found[number] = family.layout(sizes)
            done += 1
            self._trials.families_done(done, len(begun))
            return None if sizes is None else (family, sizes)

        results = [result for result in self._in_parallel(search, range(len(begun))) if result is not None]
        # Among equals the order of the families decides, whichever was done first.
        results.sort(key=lambda result: result[0].layout(result[1]).gpus)
        return results[: self._shown]

    def measured(self, layout: ClusterLayout, load: float) -> SizedLayout:
        """Return how far beyond `load` the layout holds, and what breaks there."""
        part = len(self._setups) - 1

        def verdict(step: int) -> LoadVerdict:
            return self._trials.verdict(part, LoadTrial(layout, load * LOAD_STEP**step))

        step = largest_load_step(lambda step: verdict(step).holds, MOST_LOAD_STEPS)
        breach = None if step == MOST_LOAD_STEPS else verdict(step + 1).breach
        as_recorded = self._trials.verdict(part, LoadTrial(layout, 1.0, is_complete=True))
        return SizedLayout(layout, load * LOAD_STEP**step, breach, dict(as_recorded.figures))


def parts_of(setup: TrialSetup) -> tuple[TrialSetup, ...]:
    """The traces to compare families on: of a long one its busiest quarter first."""
    if len(setup.requests) <= WHOLE_REQUESTS:
        return (setup,)
    quarter = max(WHOLE_REQUESTS // 2, len(setup.requests) // 4)
    part = busiest_part(setup.requests, quarter, setup.engines[min(setup.engines)])
    return TrialSetup(part, setup.engines, setup.decode, setup.targets), setup

"""Decides which requests of a batch can all be on time, where not all of them can, and what a batch takes.

Moore and Hodgson's rule, for jobs that all end together: in order of deadline, and the longest is put back wherever the
batch would end too late. The sums are plain numbers, for this runs in every iteration of a busy instance.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from math import inf

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.round_plan import QueuedPrefill


class CostRates:
    """`CostCoefficients` as plain numbers."""

    __slots__ = ("alpha_s", "kappa_s", "read_s", "request_s", "token_s")

    def __init__(self, cost: CostCoefficients) -> None:
        self.alpha_s: float = cost.alpha_s
        self.token_s: float = cost.token_s
        self.read_s: float = cost.read_s
        self.kappa_s: float = cost.kappa_s
        self.request_s: float = cost.request_s

    def time_s(self, work: int, tokens: int, cached_tokens: int, requests: int) -> float:
        """Return the same as `CostCoefficients.iteration_s`, to the last bit."""
        return (
            self.alpha_s * work
            + self.token_s * tokens
            + self.read_s * cached_tokens
            + self.request_s * (requests - 1)
            + self.kappa_s
        )


class BatchCost:
    """Describes what a batch takes by its sums: on a captured shape, or on the ordinary kernels."""

    __slots__ = ("eager", "grid", "has_replayed", "replayed")

    def __init__(self, cost: CostCoefficients, grid: GraphGrid) -> None:
        self.grid = grid
        self.eager = CostRates(cost)
        self.has_replayed = cost.replayed is not None  # whether replays are known to have a cost of their own
        self.replayed = self.eager if cost.replayed is None else CostRates(cost.replayed)

    def time_s(self, longest_tokens: int, requests: int, new_tokens: int, cached_tokens: int, work: int) -> float:
        """Seconds of a batch: on a captured shape all of its tokens are computed, but attention only for requests'."""
        if self.grid.shapes and requests > 0:
            at = self.grid.padded_at(longest_tokens, requests, new_tokens, cached_tokens)
            if at >= 0:
                return self.replayed.time_s(work, self.grid.tokens[at], cached_tokens, requests)
        return self.eager.time_s(work, new_tokens, cached_tokens, requests)


class BatchSums:
    """Sums over the requests of a batch."""

    __slots__ = ("cached_tokens", "kv_tokens", "longest_tokens", "new_tokens", "work")

    def __init__(self, longest_tokens: int, new_tokens: int, cached_tokens: int, kv_tokens: int, work: int) -> None:
        self.longest_tokens = longest_tokens
        self.new_tokens = new_tokens
        self.cached_tokens = cached_tokens
        self.kv_tokens = kv_tokens
        self.work = work


class Contender:
    """A request of a batch that cannot keep all of them."""

    __slots__ = ("at", "cached_tokens", "deadline_s", "left_at", "new_tokens", "own_s", "work")

    def __init__(self, at: int, request: QueuedPrefill, cost: CostRates) -> None:
        self.at = at  # its position among the joined contenders
        self.left_at = 1 << 60  # the step at which it was put back
        self.new_tokens = request.new_tokens
        self.cached_tokens = request.cached_tokens
        self.deadline_s = request.deadline_s
        self.work = self.new_tokens * (self.new_tokens + 2 * self.cached_tokens)
        # What it adds to a batch that is not padded.
        self.own_s = cost.alpha_s * self.work + cost.token_s * self.new_tokens + cost.read_s * self.cached_tokens


def max_on_time(
    must: list[Contender],
    requests: int,
    base: BatchSums,
    cost: BatchCost,
    now_s: float,
    stretch: float,
    latest_s: float,
    *,
    leaves_time: bool,
) -> list[Contender]:
    """Return as many of `must` as can join `requests` others with the sums of `base` and end on time, by `latest_s`.

    A batch that starts at `now_s` is on time if it is even where it takes `stretch` times what it should.

    Of several such subsets it is the subset that ends longest before its earliest deadline, where others could use that
    time (`leaves_time`); else the one with the earliest deadline, of the shortest requests.

    For each deadline, from the latest to the earliest: the shortest without an earlier deadline.
    A prefill that is too long for a deadline is so for all earlier ones, as there is less time and there are more to
    choose from.
    """
    has_shapes = len(cost.grid.shapes) > 0
    longest, new, cached, work = base.longest_tokens, base.new_tokens, base.cached_tokens, base.work
    by_deadline = [(-member.deadline_s, member.at, member) for member in must]
    by_deadline.sort()
    heap: list[tuple[float, int, Contender]] = []  # the longest first, of several the least urgent
    lengths: list[int] = []  # of those in the heap, sorted
    best_step, best_count, best_left_s = -1, 0, -inf
    for step, (_, at, member) in enumerate(by_deadline):
        end_s = min(member.deadline_s, latest_s)
        heappush(heap, (-member.own_s, -at, member))
        new += member.new_tokens
        cached += member.cached_tokens
        work += member.work
        if has_shapes:
            insort(lengths, member.new_tokens)
            longest = max(base.longest_tokens, lengths[-1])
        time_s = cost.time_s(longest, requests + len(heap), new, cached, work)
        while heap and now_s + stretch * time_s > end_s:
            out = heappop(heap)[2]
            out.left_at = step
            new -= out.new_tokens
            cached -= out.cached_tokens
            work -= out.work
            if has_shapes:
                del lengths[bisect_left(lengths, out.new_tokens)]
                longest = max(base.longest_tokens, lengths[-1]) if lengths else base.longest_tokens
            time_s = cost.time_s(longest, requests + len(heap), new, cached, work)
        count = len(heap)
        left_s = end_s - now_s - stretch * time_s if leaves_time else 0.0
        if count > best_count or (count == best_count and count > 0 and left_s >= best_left_s):
            best_step, best_count, best_left_s = step, count, left_s
    return [member for step, (_, _, member) in enumerate(by_deadline) if step <= best_step < member.left_at]

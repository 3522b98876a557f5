"""The longest time of a chunk while short prefills arrive: a chunk cannot be interrupted, so they wait for its end.

A short prefill that arrives at a member during a chunk of c seconds waits c / 2 on average, and every chunk costs its
group a fixed time k again: launching kernels, and meeting, which is how long chunks have taken recently beyond their
computing, as members had batches to end and waited for each other. Let short prefills arrive at R per second on the s
instances of the group together, and an instance-second cost the waiting prompts p seconds of delay. Then a second of
chunks delays the short prefills by R c / 2, and costs (1 + p s) k / c. The sum is least at

    c = sqrt(2 k (1 + p s) / R)

So chunks become longer with the load (p), with the fixed cost, and where fewer short prefills arrive. No chunk is
shorter than four times k, so that three quarters of the group's time remain for computing: where batches follow each
other on all members, they meet long. But a chunk takes at most half of the short prefills' objective, which leaves the
other half to their own batch, unless four times what it takes to launch one is more.

Where many short prefills arrive, one batch does not compute all that came during a chunk before the next chunk. So a
prefill that has begun lets its members work these off first: its next chunk and the short prefills that wait at a
member take at most half of the objective together. It does so while it has twice the time that it needs to be on time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_SHARE_OF_OBJECTIVE = 0.5
_OVERHEADS = 4.0
_SHORT_WEIGHT = 12.0
_SPARE_TIME = 2.0  # times what is left of a prefill takes, until its deadline


class ShortLoad(NamedTuple):
    """Short prefills that arrive at the instances of a pool."""

    per_s: float  # on each instance, mean of all
    slo_s: float  # the tightest objective that an instance has for them; infinity: none
    work_s: float = 0.0  # that those of a second take on each instance, mean of all


NO_SHORT_LOAD = ShortLoad(0.0, math.inf)


def longest_chunk_s(overhead_s: float, size: int, price: float, shorts: ShortLoad, meeting_s: float = 0.0) -> float:
    """Return the longest time of a chunk on `size` instances; infinity where nothing short is about.

    `overhead_s`: what it takes to launch a chunk on such a group. `meeting_s`: how long its members meet, recently.
    `price`: see `price_planner`, seconds per instance-second.
    """
    if shorts == NO_SHORT_LOAD:
        return math.inf
    fixed_s = overhead_s + meeting_s
    best_s = math.inf
    if shorts.per_s > 0:
        best_s = max(_OVERHEADS * fixed_s, math.sqrt(2 * fixed_s * (1 + price * size) / (shorts.per_s * size)))
    return max(_OVERHEADS * overhead_s, min(best_s, _SHARE_OF_OBJECTIVE * shorts.slo_s))


def shorts_delayed(shorts: ShortLoad) -> float:
    """Return what a second of chunks on an instance costs its short prefills, in seconds of delay of a long one.

    They do not wait for the queue of long ones, but for the end of a chunk: half of the longest one on average. A
    second of a short prefill counts as twelve of a long one, whose objective is longer. With six, short prompts
    and follow-ups waited longer on two real instances at 60% of their load in one run, and as long in another. With
    twelve, the simulated goodput of eight is 0.6% lower in the mean of the settings of `bench/goodput.py`.
    """
    if not 0 < shorts.slo_s < math.inf:
        return 0.0
    return _SHORT_WEIGHT * shorts.per_s * _SHARE_OF_OBJECTIVE * shorts.slo_s / 2


def should_wait(chunk_s: float, busy_s: float, shorts: ShortLoad, left_s: float, due_in_s: float) -> bool:
    """Return whether the next chunk of a prefill waits until its members have computed short prefills.

    `busy_s`: until the slowest member has computed its batch and the short prefills that wait there. `left_s`: what is
    left of the prefill takes. `due_in_s`: its deadline from now.
    """
    are_late = busy_s > 0 and busy_s + chunk_s > _SHARE_OF_OBJECTIVE * shorts.slo_s
    return are_late and _SPARE_TIME * left_s < due_in_s

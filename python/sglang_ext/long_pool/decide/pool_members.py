"""The instances of a long pool as its coordinator knows them: their reports, their steps, and their connections."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_ext.long_pool.decide.chunk_length import NO_SHORT_LOAD, ShortLoad
from sglang_ext.long_pool.decide.orders import MemberReport
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot

_NOT_YET_S = 1e-6
_LEAST_CHUNK_TOKENS = 64
_FIRST_SHUNNED_S = 1.0
_LONGEST_SHUNNED_S = 10.0
_SHORTS_EXPECTED_FOR_S = 60.0
_WAIT_OF_OBJECTIVE = 1 / 16  # of short prefills, that members of a chunk may wait for each other
_MEETING_OF_OBJECTIVE = 1 / 4  # the same, for a long one
_NONE_KEPT: Mapping[int, float] = {}
_NONE_PROMISED: Mapping[int, int] = {}


class _Claim(NamedTuple):
    """KV that a step takes on one instance, as it was ordered."""

    request: int
    tokens: int


@dataclass(slots=True)
class LongInstance:
    """One instance."""

    node: int
    report: MemberReport
    step: int | None = None  # sequence of the step that it is in
    step_s: float = 0.0  # predicted
    step_ends_s: float = 0.0  # predicted
    step_began_s: float = 0.0
    reported_s: float | None = None
    latest_report_s: float = -math.inf
    max_free_tokens: int = 0  # of KV, in any report
    claims: dict[int, _Claim] = field(default_factory=dict)  # by step, of steps that its last report does not know of
    shunned_until_s: float = -math.inf  # others could not reach it
    times_unreachable: int = 0  # since it last took part in a chunk that was done
    learned_chunk_tokens: float = math.inf  # that it can compute at once: for twice as many it had no memory

    @property
    def free_tokens(self) -> int:
        """KV that is free now, as far as is known."""
        return max(0, self.report.free_kv_tokens - sum(claim.tokens for claim in self.claims.values()))

    @property
    def max_chunk_tokens(self) -> float:
        """Return the tokens that the member can compute at once; infinity where no bound is known."""
        reported = self.report.max_chunk_tokens
        return min(math.inf if reported is None else reported, self.learned_chunk_tokens)

    def backlog_s(self, now_s: float) -> float:
        """Return the ordinary work that is left: an instance works on what it has reported until its next report, and
        not while it is in a step."""
        return self._left_s(self.report.backlog_s, now_s)

    def begins_in_s(self, now_s: float) -> float:
        """Return how long its chunk or batch that runs seems to take: then it could begin another chunk."""
        if self.step is not None:
            return max(_NOT_YET_S, self.step_ends_s - now_s)
        return self._left_s(self.report.running_s, now_s)

    def shorts_s(self, now_s: float) -> float:
        """Return what the short prefills take that wait there; not the batch that runs."""
        return max(0.0, self.report.short_backlog_s - max(0.0, self._worked_s(now_s) - self.report.running_s))

    def _left_s(self, reported_s: float, now_s: float) -> float:
        return max(0.0, reported_s - self._worked_s(now_s))

    def _worked_s(self, now_s: float) -> float:
        """Return how long it has worked on what it has reported."""
        if self.reported_s is None:
            return 0.0
        return max(0.0, (now_s if self.step is None else self.step_began_s) - self.reported_s)

    def end_step(self, now_s: float) -> None:
        """Mark the instance as out of its step: the batch before it has ended, too. As many short prefills are expected
        to have come since its report as recently."""
        if self.reported_s is not None:
            report = self.report
            came_s = (now_s - max(self.step_began_s, self.reported_s)) * report.short_work_s
            self.report = report._replace(
                backlog_s=max(0.0, self.backlog_s(now_s) - self._left_s(report.running_s, now_s)) + came_s,
                short_backlog_s=self.shorts_s(now_s) + came_s,
                running_s=0.0,
            )
            self.reported_s = now_s
        self.step = None

    def record_unreachable(self, now_s: float) -> None:
        """Another member could not talk to it: it is left out of groups, the longer the more often that happens."""
        shunned_s = min(_LONGEST_SHUNNED_S, _FIRST_SHUNNED_S * 2.0**self.times_unreachable)
        self.shunned_until_s = now_s + shunned_s
        self.times_unreachable += 1

    def record_out_of_memory(self, tokens: int) -> None:
        """It had no memory for this many tokens of a chunk: it gets half as many from now on."""
        if tokens:
            self.learned_chunk_tokens = max(_LEAST_CHUNK_TOKENS, tokens // 2)

    def claim(self, sequence: int, request: int, tokens: int) -> None:
        """A step is ordered that takes this many tokens of KV there."""
        self.claims[sequence] = _Claim(request, tokens)

    def free_claimed(self, request: int) -> None:
        """A request is dropped: what of it is in no report yet is not claimed any more."""
        self.claims = {sequence: claim for sequence, claim in self.claims.items() if claim.request != request}

    def record_begun(self, sequence: int | None) -> None:
        """Take the KV slots of this step, and of those before it, from the known free ones; None: of all steps."""
        self.claims = {
            member: claim for member, claim in self.claims.items() if sequence is not None and member > sequence
        }

    def add_backlog(self, work_s: float, now_s: float) -> None:
        """It has been given ordinary work that its report does not know of."""
        self.report = self.report._replace(backlog_s=self.backlog_s(now_s) + work_s)
        self.reported_s = now_s


class PoolMembers:
    """All of a pool. Iteration is in the order of their numbers, as are positions in a snapshot."""

    def __init__(self, short_backlog_s: float) -> None:
        """Ordinary work of at most `short_backlog_s` keeps no step waiting; where short prefills have an objective, a
        sixteenth of that counts. Members begin a step when each has ended its batch, and wait for each other."""
        self._short_backlog_s = short_backlog_s
        self._members: dict[int, LongInstance] = {}
        self._order: tuple[int, ...] = ()
        self.positions: dict[int, int] = {}  # in a snapshot, by number
        self._shorts_seen_s = -math.inf  # when a member reported short prefills last

    def __contains__(self, instance: int) -> bool:
        return instance in self._members

    def __getitem__(self, instance: int) -> LongInstance:
        return self._members[instance]

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, instance: int, node: int, report: MemberReport) -> None:
        """A new one, which knows nothing."""
        self._members[instance] = LongInstance(node, report, max_free_tokens=report.free_kv_tokens)
        self._number()

    def remove(self, instance: int) -> bool:
        """Return whether it was there."""
        is_there = self._members.pop(instance, None) is not None
        self._number()
        return is_there

    def _number(self) -> None:
        self._order = tuple(sorted(self._members))
        self.positions = {instance: position for position, instance in enumerate(self._order)}

    def record_free(self, instance: int, sequence: int, free_kv_tokens: int | None) -> None:
        """Record a member's free KV slots at the end of its step, done or failed; None where they are not known."""
        member = self._members.get(instance)
        if member is not None and member.step == sequence and free_kv_tokens is not None:
            member.report = member.report._replace(free_kv_tokens=free_kv_tokens)
            member.record_begun(sequence)

    def report(self, instance: int, report: MemberReport, now_s: float, begun_step: int | None) -> None:
        """Record a member's newest report and the last step that it had begun then; None: all ordered steps."""
        member = self._members.get(instance)
        if member is not None:
            member.report, member.reported_s, member.latest_report_s = report, now_s, now_s
            member.record_begun(begun_step)
            member.max_free_tokens = max(member.max_free_tokens, report.free_kv_tokens)
            if report.short_per_s > 0 and report.short_slo_s is not None:
                self._shorts_seen_s = now_s

    @property
    def short_backlog_s(self) -> float:
        """Return how much ordinary work keeps no step waiting."""
        objective_s = self._short_objective_s()
        return self._short_backlog_s if objective_s is None else _WAIT_OF_OBJECTIVE * objective_s

    @property
    def longest_meeting_s(self) -> float:
        """Return how much ordinary work keeps no step waiting, however long that takes."""
        objective_s = self._short_objective_s()
        return self._short_backlog_s if objective_s is None else _MEETING_OF_OBJECTIVE * objective_s

    def _short_objective_s(self) -> float | None:
        """Return the tightest objective that a member has for short prefills; None where none has one."""
        objectives_s = [
            member.report.short_slo_s for member in self._members.values() if member.report.short_slo_s is not None
        ]
        return min(objectives_s, default=None)

    def short_load(self, now_s: float) -> ShortLoad:
        """Return what short prefills arrive; those of the last minute are expected again."""
        if now_s > self._shorts_seen_s + _SHORTS_EXPECTED_FOR_S:
            return NO_SHORT_LOAD
        reports = [member.report for member in self._members.values()]
        serving = [report for report in reports if report.short_slo_s is not None]
        objectives_s = [report.short_slo_s for report in serving if report.short_slo_s is not None]
        return ShortLoad(
            sum(report.short_per_s for report in serving) / max(1, len(reports)),
            min(objectives_s, default=math.inf),
            sum(report.short_work_s for report in serving) / max(1, len(reports)),
        )

    def oldest_report_s(self) -> float:
        """Return when the member that has reported least recently did so; infinity without members."""
        return min((member.latest_report_s for member in self._members.values()), default=math.inf)

    def max_tokens(self) -> int:
        """Return what the largest of them has held, as far as is known: no longer prompt fits a single instance."""
        return max((member.max_free_tokens for member in self._members.values()), default=0)

    def free_s(self, group: Iterable[int], now_s: float) -> float:
        """Return when the last of these has ended its step, as it seems."""
        steps = [self._members[instance] for instance in group if self._members[instance].step is not None]
        return max((step.step_ends_s for step in steps), default=now_s)

    def fit_chunk(self, group: Collection[int], tokens: int, compute_s: float, page_tokens: int) -> tuple[int, float]:
        """Return this much of a chunk, and of its time, that each of its group has memory for its part, besides KV.

        A part is two runs of positions, each of which may be a page larger than its share. Shares are whole pages
        wherever they can be: what is left of a page is lost to others.
        """
        bound = min(self._members[instance].max_chunk_tokens for instance in group)
        if tokens <= bound:
            return tokens, compute_s
        most = int(bound)
        unit = page_tokens if len(group) == 1 else 2 * page_tokens
        share = most // unit * unit if len(group) == 1 else (most - unit) // unit * unit
        fitting = min(tokens, len(group) * (share if share >= unit else max(1, most // 2)))
        return fitting, compute_s * fitting / tokens

    def begin_step(self, sequence: int, group: Iterable[int], now_s: float, compute_s: float) -> None:
        """Mark the members as busy for an estimated `compute_s`."""
        for instance in group:
            member = self._members[instance]
            member.step, member.step_s = sequence, compute_s
            member.step_began_s, member.step_ends_s = now_s, now_s + compute_s

    def end_step(self, sequence: int, group: Iterable[int], now_s: float) -> None:
        """Mark the members of the group that are still connected as idle."""
        for instance in group:
            member = self._members.get(instance)
            if member is not None and member.step == sequence:
                member.end_step(now_s)

    def are_ready(self, group: Sequence[int]) -> bool:
        """Return whether none is in a step."""
        return all(self._members[instance].step is None for instance in group)

    def record_reached(self, group: Sequence[int]) -> None:
        """They have done a chunk together."""
        if len(group) > 1:
            for instance in group:
                self._members[instance].times_unreachable = 0

    def any_idle(self, now_s: float, kept: Collection[int]) -> bool:
        """Return whether a step could begin somewhere."""
        return any(
            member.step is None
            and instance not in kept
            and now_s >= member.shunned_until_s
            and member.backlog_s(now_s) <= self.short_backlog_s
            for instance, member in self._members.items()
        )

    def begin_in_s(self, now_s: float, kept: Collection[int]) -> list[float]:
        """Return, by position, when a chunk could begin there between two batches, from now; infinity where none may:
        in one, `kept`, or not reached."""
        return [
            math.inf
            if member.step is not None or instance in kept or now_s < member.shunned_until_s
            else member.begins_in_s(now_s)
            for instance in self._order
            if (member := self._members[instance])
        ]

    def shorts_s(self, now_s: float) -> list[float]:
        """Return, by position, what the short prefills take that wait there."""
        return [self._members[instance].shorts_s(now_s) for instance in self._order]

    def snapshot(
        self,
        now_s: float,
        kept: Mapping[int, float] = _NONE_KEPT,
        promised: Mapping[int, int] = _NONE_PROMISED,
        *,
        counts_backlog: bool = True,
    ) -> PrefillSnapshot:
        """Delays are the rest of the running step and the ordinary work behind it, if that is not short.

        An instance that is in a step is not free before it has answered, even if that was predicted, and an instance
        that is `kept` not before the time given. `promised`: tokens that will come to it.
        """
        nodes, delays_s, free_tokens = [], [], []
        for instance in self._order:
            member = self._members[instance]
            delay_s = member.backlog_s(now_s) if counts_backlog else 0.0
            if delay_s <= self.short_backlog_s:
                delay_s = 0.0
            if member.step is not None:
                delay_s += max(_NOT_YET_S, member.step_ends_s - now_s)
            elif instance in kept:
                delay_s += max(_NOT_YET_S, kept[instance] - now_s)
            nodes.append(member.node)
            delays_s.append(max(delay_s, member.shunned_until_s - now_s))
            free_tokens.append(max(0, member.free_tokens - promised.get(instance, 0)))
        return PrefillSnapshot(nodes, delays_s, free_tokens)

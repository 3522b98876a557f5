"""A pool whose minimum is 0 may be emptied, and comes back when its class needs instances again."""

from __future__ import annotations

from sglang_ext.types import LengthClass
from sglang_ext_router.decide.instance_pressure import (
    ControllerState,
    DecisionReason,
    InstanceSignals,
    PoolInstance,
    PressureSettings,
    decide,
)

SHORT, LONG = LengthClass.SHORT, LengthClass.LONG
EMPTIABLE = PressureSettings(min_short=0, min_long=0, confirm_rounds=1, cooldown_s=5.0)
INTERVAL_S = 1.0


class TwoInstances:
    """Fluid instances: each class is offered so much work per second, the emptied pool's class is served by both."""

    def __init__(self) -> None:
        self.pools = {0: SHORT, 1: LONG}
        self.backlog_s = {SHORT: 0.0, LONG: 0.0}
        self.state = ControllerState()
        self.now_s = 0.0
        self.moves: list[tuple[float, LengthClass]] = []
        self.reasons: set[DecisionReason] = set()

    def serving(self, length_class: LengthClass) -> list[int]:
        return [one for one, pool in self.pools.items() if pool is length_class] or list(self.pools)

    def step(self, offered: dict[LengthClass, float]) -> None:
        """One control interval; work is shared out among those who serve it, own class first."""
        capacity = dict.fromkeys(self.pools, INTERVAL_S)
        busy = {one: dict.fromkeys(LengthClass, 0.0) for one in self.pools}
        for length_class in sorted(LengthClass, key=lambda one: len(self.serving(one))):
            self.backlog_s[length_class] += offered[length_class] * INTERVAL_S
            for one in self.serving(length_class):
                done_s = min(capacity[one], self.backlog_s[length_class] / 1)
                capacity[one] -= done_s
                busy[one][length_class] += done_s / INTERVAL_S
                self.backlog_s[length_class] -= done_s
        self.now_s += INTERVAL_S
        instances = []
        for one, pool in self.pools.items():
            parts = {
                length_class: self.backlog_s[length_class] / len(self.serving(length_class))
                if one in self.serving(length_class)
                else 0.0
                for length_class in LengthClass
            }
            other = LONG if pool is SHORT else SHORT
            told = InstanceSignals(parts[SHORT], parts[LONG], 0.0, 0.0, sum(busy[one].values()), busy[one][other])
            instances.append(PoolInstance(one, pool, True, told, True, 0, 0.0))
        decision = decide(instances, EMPTIABLE, self.state, self.now_s)
        self.state = decision.state
        self.reasons.add(decision.reason)
        if decision.proposal is not None:
            self.pools[decision.proposal.worker_id] = decision.proposal.target
            self.state = self.state.after_move(decision.proposal.target, self.now_s)
            self.moves.append((self.now_s, decision.proposal.target))

    def run(self, seconds: int, short: float, long: float) -> list[LengthClass]:
        """Targets of the moves within that time."""
        before = len(self.moves)
        for _ in range(seconds):
            self.step({SHORT: short, LONG: long})
        return [target for _, target in self.moves[before:]]


def test_both_serve_the_heavy_class() -> None:
    pair = TwoInstances()
    assert pair.run(60, short=1.3, long=0.1) == [SHORT]
    assert list(pair.pools.values()) == [SHORT, SHORT]


def test_no_instance_moves_while_the_emptied_pools_class_is_kept_up_with() -> None:
    pair = TwoInstances()
    pair.run(60, short=1.3, long=0.1)
    assert pair.run(120, short=0.1, long=1.3) == []


def test_an_instance_comes_back_when_the_emptied_pools_class_piles_up() -> None:
    pair = TwoInstances()
    pair.run(60, short=1.3, long=0.1)
    assert pair.run(120, short=0.1, long=2.0) == [LONG]


def test_balanced_load_moves_no_instance() -> None:
    assert TwoInstances().run(120, short=0.6, long=0.6) == []


def test_a_pool_is_not_emptied_when_one_pool_cannot_carry_both() -> None:
    pair = TwoInstances()
    assert pair.run(60, short=1.5, long=0.6) == []
    assert DecisionReason.WOULD_OVERLOAD in pair.reasons


def test_an_emptied_pool_stays_empty_under_the_same_load() -> None:
    pair = TwoInstances()
    pair.run(60, short=1.3, long=0.1)
    assert pair.run(300, short=1.3, long=0.1) == []

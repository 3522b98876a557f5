"""The simulation of a round that a real pool has served."""

from __future__ import annotations

import pytest

from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from support.conversations import Answer
from support.pool_simulation import batch_costs_of, costs_of, paces_of, simulated_ttfts_s

ONE = SpCost(0.05, 3e-4, 1e-7, 5e-8)
TWO = SpCost(0.07, 1.6e-4, 5e-8, 2.5e-8)
COSTS = (SpCandidate(1, ONE), SpCandidate(2, TWO))
BATCHES = CostCoefficients(alpha_s=5e-8, token_s=3e-4, read_s=0.0, kappa_s=0.05)  # as chunks on one instance
OVERHEAD_S = 0.03
BOUNDARY_TOKENS = 512


def simulated(
    *answers: Answer, costs: tuple[SpCandidate, ...] = COSTS, batches: CostCoefficients = BATCHES
) -> dict[tuple[int, int], float]:
    return simulated_ttfts_s(answers, costs, batches, len(costs), BOUNDARY_TOKENS, OVERHEAD_S)


def answer(talk: int, turn: int, tokens: int, sent_s: float, ttft_s: float | None = 1.0) -> Answer:
    return Answer((talk, turn), tokens, sent_s, ttft_s, ())


def test_costs_are_those_of_a_coordinators_status() -> None:
    fields = {"a_s": 0.05, "b_s_per_token": 3e-4, "c_s_per_token2": 1e-7, "d_s_per_token2": 5e-8}
    assert costs_of({"costs": [{"size": 1, "cost": fields}], "members": []}) == (SpCandidate(1, ONE),)


def test_batches_cost_what_the_instances_have_measured() -> None:
    fits = [{"alpha_s": 4e-8, "token_s": 2e-4, "read_s": 0.0, "kappa_s": 0.04, "request_s": 0.01, "samples": 9}]
    fits.append({"alpha_s": 6e-8, "token_s": 4e-4, "read_s": 0.0, "kappa_s": 0.06, "request_s": 0.03, "samples": 5})
    assert batch_costs_of([{"fit": fit} for fit in fits]) == pytest.approx((5e-8, 3e-4, 0.0, 0.05, 0.02, None))
    slow = simulated(answer(1, 0, 100, 0.0), batches=BATCHES.times(3.0))[1, 0]
    assert slow == pytest.approx(3 * ONE.predict_s(0, 100) + OVERHEAD_S, abs=0.01)


@pytest.mark.parametrize("sent_s", [0.0, 5000.0])
def test_a_chat_prompt_on_an_idle_pool_takes_one_batch(sent_s: float) -> None:
    ttft_s = simulated(answer(1, 0, 100, sent_s))[1, 0]
    assert ttft_s == pytest.approx(ONE.predict_s(0, 100) + OVERHEAD_S, abs=0.01)


def test_a_long_prompt_on_an_idle_pool_is_shared() -> None:
    ttft_s = simulated(answer(1, 1, 6000, 0.0))[1, 1]
    assert ttft_s == pytest.approx(TWO.predict_s(0, 6000) + OVERHEAD_S, rel=0.1)
    assert simulated(answer(1, 1, 6000, 0.0), costs=COSTS[:1])[1, 1] > 1.5 * ttft_s


def test_the_next_turn_is_computed_behind_the_kept_rows() -> None:
    ttfts_s = simulated(answer(1, 1, 6000, 0.0), answer(1, 2, 6200, 10.0))
    assert ttfts_s[1, 2] < 0.3 * ttfts_s[1, 1]
    of_another = simulated(answer(1, 1, 6000, 0.0), answer(2, 1, 6200, 10.0))
    assert of_another[2, 1] > ttfts_s[1, 1]


def test_the_next_turn_comes_as_long_after_its_answer_as_in_reality() -> None:
    # In reality the first turn was answered after 0.1 s and the second came 1.9 s later; here the first takes longer.
    first, second = answer(1, 1, 9000, 0.0, 0.1), answer(1, 2, 9200, 2.0)
    ttfts_s = simulated(first, second)
    first_s = ttfts_s[1, 1]
    assert first_s > 2.0
    during_the_pause = simulated(first, second, answer(2, 1, 9000, first_s + 1.0))
    assert during_the_pause[1, 2] > 1.5 * ttfts_s[1, 2], "it has come before the other prompt"
    behind_the_answer = simulated(first, second, answer(2, 1, 9000, first_s + 1.9 + ttfts_s[1, 2]))
    assert behind_the_answer[1, 2] == pytest.approx(ttfts_s[1, 2], abs=0.01)


def test_every_request_is_simulated_once() -> None:
    answers = [answer(1000 + number, 0, 20 + number, 0.1 * number) for number in range(50)]
    answers += [answer(number, turn, 3000 + 100 * turn, 3.0 * turn) for number in range(4) for turn in (1, 2, 3)]
    ttfts_s = simulated(*answers)
    assert ttfts_s.keys() == {one.key for one in answers}
    assert all(ttft_s > OVERHEAD_S for ttft_s in ttfts_s.values())


def test_a_turn_behind_one_that_failed_is_refused() -> None:
    with pytest.raises(AssertionError, match="ends with a turn that failed"):
        simulated(answer(1, 1, 6000, 0.0, None), answer(1, 2, 6200, 10.0))


def test_batches_vary_as_the_instances_have_measured() -> None:
    statuses = [{"fit": {"pace_quantiles": [0.5, 2.0]}}, {"fit": {"pace_quantiles": None}}]
    paces = paces_of([*statuses, {"fit": {"pace_quantiles": [1.0]}}])
    assert paces == (0.5, 2.0, 1.0)
    chats = [answer(number, 0, 100, 10.0 * number) for number in range(60)]
    alone_s = ONE.predict_s(0, 100)
    drawn = {
        key: (ttft_s - OVERHEAD_S) / alone_s
        for key, ttft_s in simulated_ttfts_s(
            chats, COSTS, BATCHES, 2, BOUNDARY_TOKENS, OVERHEAD_S, paces, seed=3
        ).items()
    }
    for pace in paces:
        assert 10 < sum(one == pytest.approx(pace, rel=0.05) for one in drawn.values()) < 30, pace
    (document_s,) = simulated_ttfts_s(
        [answer(1, 1, 6000, 0.0)], COSTS, BATCHES, 2, BOUNDARY_TOKENS, OVERHEAD_S, (2.0,)
    ).values()
    assert document_s == pytest.approx(2 * TWO.predict_s(0, 6000) + OVERHEAD_S, rel=0.1), "chunks, too"

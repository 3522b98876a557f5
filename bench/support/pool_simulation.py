"""One pool of the simulator under the requests that a real one has served, at the costs that its coordinator knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_ext.costs.engine_profile import IterationCost
from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.planner.simulation.events import EventLoop, Prefix, ServedPrefill, SimRequest, feed
from sglang_ext.planner.simulation.instances import InstancesSpec
from sglang_ext.planner.simulation.iteration_policies import LapsPolicy
from sglang_ext.planner.simulation.one_pool import OnePool, OnePoolOptions
from sglang_ext.types import Role
from support.conversations import Answer

_BLOCK_TOKENS = 256
_KV_TOKENS = 1_000_000
_CHUNK_TOKENS = 8192


class _FirstTokens:
    """Takes note of when each request has its first token."""

    def __init__(self) -> None:
        self.ttft_s: dict[int, float] = {}

    def on_first_token(self, served: ServedPrefill) -> None:
        self.ttft_s[served.request.key] = served.ttft_s

    def on_refused(self, request: SimRequest) -> None:
        raise AssertionError(f"{request} is refused")


def costs_of(status: Mapping[str, Any]) -> tuple[SpCandidate, ...]:
    """Return what a coordinator's status says that chunks cost, by SP size."""
    return tuple(SpCandidate(one["size"], SpCost(**one["cost"])) for one in status["costs"])


def simulated_ttfts_s(
    answers: Sequence[Answer], costs: Sequence[SpCandidate], instances: int, boundary_tokens: int, overhead_s: float
) -> dict[tuple[int, int], float]:
    """Return each request's time to first token, by its key, had a simulated pool served it.

    `answers` are those of one round: requests come when they came in reality. `overhead_s`: of what surrounds prefill,
    added to each.
    """
    single = next(candidate.cost for candidate in costs if candidate.size == 1)
    assert isinstance(single, SpCost)
    work_s = (single.c_s_per_token2, single.d_s_per_token2)
    iteration = IterationCost(single.a_s, 0.0, single.b_s_per_token, 0.0, 0.0, *work_s)
    coefficients = CostCoefficients(single.d_s_per_token2, single.b_s_per_token, 0.0, single.a_s, 0.0)
    limits = InstanceLimits(
        page_tokens=1, max_chunk_tokens=_CHUNK_TOKENS, max_batch_tokens=_CHUNK_TOKENS, max_requests=64
    )

    options = LapsOptions(boundary_tokens=boundary_tokens)

    def policy(_: Role) -> LapsPolicy:
        return LapsPolicy(Laps(options, GraphGrid(), coefficients, limits))

    ordered = sorted(answers, key=lambda answer: answer.sent_s)
    began_s = ordered[0].sent_s
    requests = []
    for key, answer in enumerate(ordered):
        talk = answer.key[0] << 20  # all turns of a conversation begin alike
        blocks = tuple(talk + number for number in range(answer.tokens // _BLOCK_TOKENS))
        prefix = Prefix(_BLOCK_TOKENS, blocks)
        requests.append(SimRequest(key, answer.sent_s - began_s, answer.tokens, 1, 0, prefix))
    spec = InstancesSpec((Role.BOTH,) * instances, coefficients, _KV_TOKENS, boundary_tokens, iteration)
    loop, listener = EventLoop(), _FirstTokens()
    stage = OnePool(
        loop, spec, costs, policy, OnePoolOptions(short_slo_s=options.short_ttft_slo_ms / 1e3), listener, False
    )
    feed(loop, requests, stage)
    loop.run()
    return {answer.key: listener.ttft_s[key] + overhead_s for key, answer in enumerate(ordered)}

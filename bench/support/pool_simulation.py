"""One pool of the simulator under the requests that a real one has served, at the costs that its coordinator knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.planner.simulation.events import EventLoop, Prefix, ServedPrefill, SimRequest, feed
from sglang_ext.planner.simulation.instances import InstancesSpec
from sglang_ext.planner.simulation.iteration_policies import LapsPolicy
from sglang_ext.planner.simulation.one_pool import OnePool
from sglang_ext.planner.simulation.pool_instances import OnePoolOptions
from sglang_ext.types import Role
from support.conversations import Answer

_BLOCK_TOKENS = 32
_KV_TOKENS = 1_000_000
_CHUNK_TOKENS = 8192


class _Conversations:
    """Takes note of when each request has its first token, and lets the next turn of its conversation come then.

    The client waits as long between an answer and the next turn as it did in reality.
    """

    def __init__(self, answers: Sequence[Answer], loop: EventLoop, overhead_s: float) -> None:
        self._loop = loop
        self._overhead_s = overhead_s
        self.ttft_s: dict[tuple[int, int], float] = {}
        self.stage: OnePool
        began_s = min(answer.sent_s for answer in answers)
        self.openings: list[SimRequest] = []  # in the order in which they come
        self._answers: list[Answer] = []  # by key of the simulated request
        self._next: dict[int, int] = {}  # the request that follows another one
        self._pause_s: dict[int, float] = {}  # before it
        latest: dict[int, int] = {}  # request by conversation
        for key, answer in enumerate(sorted(answers, key=lambda answer: answer.sent_s)):
            self._answers.append(answer)
            before = latest.get(answer.key[0])
            if before is None:
                self.openings.append(self._request(key, answer.sent_s - began_s))
            else:
                earlier = self._answers[before]
                assert earlier.ttft_s is not None, "a conversation ends with a turn that failed"
                self._next[before] = key
                self._pause_s[key] = max(0.0, answer.sent_s - earlier.sent_s - earlier.ttft_s)
            latest[answer.key[0]] = key

    def on_first_token(self, served: ServedPrefill) -> None:
        key = served.request.key
        self.ttft_s[self._answers[key].key] = served.ttft_s + self._overhead_s
        following = self._next.get(key)
        if following is not None:
            arrival_s = self._loop.now_s + self._overhead_s + self._pause_s[following]
            self._loop.schedule(arrival_s, self.stage.arrive, self._request(following, arrival_s))

    def _request(self, key: int, arrival_s: float) -> SimRequest:
        answer = self._answers[key]
        talk = answer.key[0] << 20  # all turns of a conversation begin alike
        blocks = tuple(talk + number for number in range(answer.tokens // _BLOCK_TOKENS))
        return SimRequest(key, arrival_s, answer.tokens, 1, 0, Prefix(_BLOCK_TOKENS, blocks))

    def on_refused(self, request: SimRequest) -> None:
        raise AssertionError(f"{request} is refused")


def costs_of(status: Mapping[str, Any]) -> tuple[SpCandidate, ...]:
    """Return what a coordinator's status says that chunks cost, by SP size."""
    return tuple(SpCandidate(one["size"], SpCost(**one["cost"])) for one in status["costs"])


def batch_costs_of(statuses: Sequence[Mapping[str, Any]]) -> CostCoefficients:
    """Return what the instances' statuses (`GET /laps`) say that their own batches cost, in the mean."""
    fits = [status["fit"] for status in statuses]
    names = ("alpha_s", "token_s", "read_s", "kappa_s", "request_s")
    return CostCoefficients(*(mean(fit[name] for fit in fits) for name in names))


def paces_of(statuses: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Return what the instances' latest batches took over what their fits expect, equally likely each."""
    return tuple(pace for status in statuses for pace in status["fit"]["pace_quantiles"] or ())


def simulated_ttfts_s(
    answers: Sequence[Answer],
    costs: Sequence[SpCandidate],
    batches: CostCoefficients,
    instances: int,
    boundary_tokens: int,
    overhead_s: float,
    paces: Sequence[float] = (),
    seed: int = 0,
) -> dict[tuple[int, int], float]:
    """Return each request's time to first token, by its key, had a simulated pool served it.

    `answers` are those of one round: chat prompts and first turns come when they came in reality, a later turn as long
    after the answer before it as in reality. `costs`: of the pool's chunks, `batches`: of an instance's own batches.
    `overhead_s`: of what surrounds prefill, added to each. `paces`: what batches and chunks may take over their costs,
    equally likely each; drawn by `seed`.
    """
    limits = InstanceLimits(
        page_tokens=1, max_chunk_tokens=_CHUNK_TOKENS, max_batch_tokens=_CHUNK_TOKENS, max_requests=64
    )

    options = LapsOptions(boundary_tokens=boundary_tokens)

    def policy(_: Role) -> LapsPolicy:
        return LapsPolicy(Laps(options, GraphGrid(), batches, limits))

    spec = InstancesSpec((Role.BOTH,) * instances, batches, _KV_TOKENS, boundary_tokens)
    loop = EventLoop()
    conversations = _Conversations(answers, loop, overhead_s)
    pool = OnePoolOptions(short_slo_s=options.short_ttft_slo_ms / 1e3, paces=tuple(paces), seed=seed)
    stage = conversations.stage = OnePool(loop, spec, costs, policy, pool, conversations, False)
    feed(loop, conversations.openings, stage)
    loop.run()
    return conversations.ttft_s

"""Which pool, which instance: by length, by what is cached where, by load, by who failed before."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from typing import Any

import pytest

from sglang_ext.types import LengthClass, Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.decide.block_index import Tier, TokenBlocks, salt_seed
from sglang_ext_router.decide.pool_choice import FixedBoundary
from sglang_ext_router.decide.prefill_choice import PREFILL_POLICIES
from sglang_ext_router.decide.prefix_index import BLOCK_BYTES
from sglang_ext_router.instances.registry import WorkerRegistry
from sglang_ext_router.instances.workers import HeldBlocks, RankReport, Worker
from sglang_ext_router.request.prompt import Prompt, measure
from sglang_ext_router.request.routing import NoInstanceError, Route, RoutePlanner
from support.router_process import Cluster, cluster
from support.scripted_engine import reply

CONTEXT_TOKENS = 8192
NONE: frozenset[int] = frozenset()


class Pools:
    """A planner over ready instances, named by role and number."""

    def __init__(self, *roles: Role, draw: float = 0.0, **options: Any) -> None:
        addresses = tuple(WorkerAddress(f"http://{role}{i}:1", role) for i, role in enumerate(roles))
        self.config = replace(RouterConfig(), workers=addresses, length_boundary_tokens=512, **options)
        self.registry = WorkerRegistry(self.config)
        self.workers = list(self.registry)
        for worker in self.workers:
            worker.is_healthy = True
            worker.max_prompt_tokens = CONTEXT_TOKENS
            worker.reported_free_kv_tokens = 100_000
        self.draw = draw
        self.registry.refresh()
        model = self.registry.find_model(None)
        assert model is not None
        self.model = model
        self.planner = RoutePlanner(self.config, self.registry, lambda: self.draw)

    def deploy(self, *revisions: str, topology: tuple[str, ...] = ()) -> None:
        """Revision, and place, of the instances in order."""
        for worker, revision in zip(self.workers, revisions, strict=True):
            worker.revision = revision
        for worker, place in zip(self.workers, topology, strict=False):
            worker.topology = place
        self.registry.refresh()

    def route(
        self, prompt: Prompt, tokens: int, without: set[int] | None = None, without_decode: set[int] | None = None
    ) -> Route:
        return self.planner.route(self.model, prompt, tokens, without or NONE, without_decode or NONE, 100.0)

    def prefill_of(self, tokens: int, text: str = "", without: set[int] | None = None) -> Worker:
        return self.route(measure(b"/generate", {"text": text or "x"}), tokens, without).prefill


SHORT, LONG, BOTH, DECODE = Role.SHORT, Role.LONG, Role.BOTH, Role.DECODE
TEXT = "".join(f"{i:07d} " for i in range(1000))  # 8,000 bytes, 2,000 tokens by the prior


@pytest.mark.parametrize(
    ("tokens", "role", "length_class"),
    [(1, SHORT, LengthClass.SHORT), (512, SHORT, LengthClass.SHORT), (513, LONG, LengthClass.LONG)],
)
def test_short_to_short_and_long_to_long(tokens: int, role: Role, length_class: LengthClass) -> None:
    pools = Pools(SHORT, LONG, DECODE)
    route = pools.route(measure(b"/generate", {"text": "x"}), tokens)
    assert route.prefill.role is role
    assert route.decision.length_class is length_class
    assert (route.decision.new_tokens, route.decision.cached_tokens) == (tokens, 0)
    assert not route.is_spilled


def test_an_instance_for_both_takes_both() -> None:
    pools = Pools(BOTH, DECODE)
    assert pools.prefill_of(10) is pools.prefill_of(5000) is pools.workers[0]


def test_a_cached_prefix_changes_the_class() -> None:
    pools = Pools(SHORT, LONG, DECODE)
    prompt = measure(b"/generate", {"text": TEXT})
    assert pools.route(prompt, 2000).prefill is pools.workers[1]
    pools.planner.prefixes.index.record(pools.workers[0].id, prompt.hashes[: 7000 // BLOCK_BYTES])
    route = pools.route(prompt, 2000)
    assert route.prefill is pools.workers[0]
    assert route.decision.length_class is LengthClass.SHORT
    assert route.decision.cached_tokens == (7000 // BLOCK_BYTES) * BLOCK_BYTES // 4
    assert route.decision.new_tokens == 2000 - route.decision.cached_tokens


def test_what_instances_of_other_models_hold_puts_no_class_in_doubt() -> None:
    pools = Pools(SHORT, LONG, DECODE)
    prompt = measure(b"/generate", {"text": 3 * TEXT})
    cached_bytes = 3 * len(TEXT) - 4000
    assert not pools.planner.needs_exact_count(pools.model, prompt)
    pools.planner.prefixes.index.add_worker(99)
    pools.planner.prefixes.index.record(99, prompt.hashes[: cached_bytes // BLOCK_BYTES])
    assert not pools.planner.needs_exact_count(pools.model, prompt)
    pools.planner.prefixes.index.record(pools.workers[0].id, prompt.hashes[: cached_bytes // BLOCK_BYTES])
    assert pools.planner.needs_exact_count(pools.model, prompt)


def test_all_cached_still_leaves_one_token_to_compute() -> None:
    pools = Pools(SHORT, DECODE)
    prompt = measure(b"/generate", {"text": "x" * BLOCK_BYTES * 4})
    pools.planner.prefixes.record_sent(pools.workers[0], prompt.hashes)
    decision = pools.route(prompt, 256).decision
    assert (decision.cached_tokens, decision.new_tokens) == (255, 1)


def test_the_holder_of_the_prefix_is_preferred() -> None:
    pools = Pools(LONG, LONG, DECODE)
    prompt = measure(b"/generate", {"text": TEXT})
    for holder in pools.workers[:2]:
        pools.planner.prefixes.index.clear(pools.workers[0].id)
        pools.planner.prefixes.index.clear(pools.workers[1].id)
        pools.planner.prefixes.record_sent(holder, prompt.hashes)
        assert pools.prefill_of(2000, TEXT) is holder


@pytest.mark.parametrize(("waiting", "processes", "goes_to_holder"), [(0, 1, False), (400, 1, True), (100, 4, True)])
def test_a_cached_prefix_is_worth_what_it_saves_those_behind_it(
    waiting: int, processes: int, goes_to_holder: bool
) -> None:
    """The holder has a queue that is longer than computing the prefix again takes; what follows waits, too."""
    pools = Pools(SHORT, SHORT, DECODE, processes=processes)
    holder, other = pools.workers[:2]
    prompt = measure(b"/generate", {"text": TEXT[:1600]})
    pools.planner.prefixes.record_sent(holder, prompt.hashes)
    for worker in (holder, other):
        worker.rate.tokens_per_s = 10_000.0
    holder.pending_tokens, other.pending_tokens = 1500, 1000
    arrived = pools.model.prefill_loads[holder.served_classes]
    for number in range(waiting):
        arrived.record_arrival(90.0 + 10.0 * number / waiting, 0.01)
    assert (pools.route(prompt, 400).prefill is holder) == goes_to_holder


def test_what_was_not_prefilled_is_not_counted_on() -> None:
    pools = Pools(LONG, LONG, DECODE)
    prompt = measure(b"/generate", {"text": TEXT})
    worker = pools.workers[0]
    pools.planner.prefixes.record_sent(worker, prompt.hashes)
    pools.planner.prefixes.forget_sent(prompt, worker, 1000, 2000)
    cached = pools.route(prompt, 2000).decision.cached_tokens
    assert 1000 - BLOCK_BYTES <= cached <= 1000


def test_waiting_work_counts() -> None:
    pools = Pools(SHORT, SHORT, DECODE)
    pools.workers[0].pending_tokens = 1000
    assert pools.prefill_of(100) is pools.workers[1]
    pools.workers[1].foreign_tokens = 2000
    assert pools.prefill_of(100) is pools.workers[0]
    pools.workers[0].sibling_tokens = 3000
    assert pools.prefill_of(100) is pools.workers[1]


def test_what_should_be_computed_by_now_does_not_count() -> None:
    pools = Pools(SHORT, SHORT, DECODE)
    for worker, tokens in zip(pools.workers, (3000, 1000), strict=False):
        worker.pending_tokens = tokens
    assert pools.prefill_of(100) is pools.workers[1]
    rate = pools.workers[0].rate.tokens_per_s
    pools.workers[0].progress.begin(100.0 - 2900 / rate, 3000)
    assert pools.prefill_of(100) is pools.workers[0]
    pools.workers[0].pending_tokens += 2000  # sent since then
    assert pools.prefill_of(100) is pools.workers[1]


def test_equal_instances_are_drawn() -> None:
    pools = Pools(SHORT, SHORT, DECODE)
    seen = set()
    for pools.draw in (0.0, 0.4, 0.6, 0.99):
        seen.add(pools.prefill_of(100).id)
    assert seen == {0, 1}


@pytest.mark.parametrize(("tokens", "own", "other"), [(10, SHORT, LONG), (5000, LONG, SHORT)])
def test_without_its_own_pool_the_other_helps_out(tokens: int, own: Role, other: Role) -> None:
    pools = Pools(other, DECODE)
    route = pools.route(measure(b"/generate", {"text": "x"}), tokens)
    assert (route.prefill.role, route.is_spilled) == (other, True)
    assert route.decision.length_class.value == own.value
    strict = Pools(other, DECODE, pool_spill=False)
    with pytest.raises(NoInstanceError, match=own.value):
        strict.prefill_of(tokens)


def waits(pools: Pools, *waits_s: float) -> None:
    """So long an instance has work, in order."""
    for worker, wait_s in zip(pools.workers, waits_s, strict=False):
        worker.pending_tokens = int(wait_s * worker.rate.tokens_per_s)


@pytest.mark.parametrize(
    ("tokens", "waits_s", "role", "is_spilled"),
    [
        (100, (0.4, 0.0), SHORT, False),  # half of the class's second is not waited for yet
        (100, (0.6, 0.0), LONG, True),
        (100, (0.6, 0.4), SHORT, False),  # not half as long there
        (100, (9.0, 4.0), LONG, True),
        (5000, (0.0, 2.0), LONG, False),
        (5000, (0.0, 3.0), SHORT, True),
        (5000, (2.0, 3.0), LONG, False),
    ],
)
def test_a_pool_that_overflows_is_helped_by_the_other(
    tokens: int, waits_s: tuple[float, float], role: Role, is_spilled: bool
) -> None:
    pools = Pools(SHORT, LONG, DECODE)
    waits(pools, *waits_s)
    route = pools.route(measure(b"/generate", {"text": "x"}), tokens)
    assert (route.prefill.role, route.is_spilled) == (role, is_spilled)
    assert route.decision.length_class is (LengthClass.SHORT if tokens == 100 else LengthClass.LONG)
    assert route.decision.predicted_wait_s == pytest.approx(waits_s[role is LONG], abs=0.01)


@pytest.mark.parametrize(
    "options",
    [{"pool_spill": False}, {"pool_overflow_share": 0.0}, {"coordinator_url": "http://127.0.0.1:1"}],
    ids=lambda options: next(iter(options)),
)
def test_a_pool_does_not_overflow_where_that_is_off_or_a_coordinator_plans(options: dict[str, Any]) -> None:
    pools = Pools(SHORT, LONG, DECODE, **options)
    waits(pools, 60.0, 0.0)
    assert pools.prefill_of(100).role is SHORT
    waits(pools, 0.0, 60.0)
    assert pools.prefill_of(5000).role is LONG


def test_a_pool_does_not_overflow_to_what_cannot_hold_the_prompt_or_has_failed_it_or_is_of_another_revision() -> None:
    pools = Pools(SHORT, LONG, SHORT, DECODE, DECODE)
    waits(pools, 0.0, 60.0, 1.0)
    first, long, second, *_ = pools.workers
    assert pools.prefill_of(5000) is first
    assert pools.prefill_of(5000, without={first.id}) is second
    first.max_prompt_tokens = 4000
    assert pools.prefill_of(5000) is second
    first.max_prompt_tokens = CONTEXT_TOKENS
    pools.deploy("v2", "v1", "v1", "v2", "v1")
    pools.draw = 0.0  # of the revisions that serve the class
    assert {pools.prefill_of(5000) for pools.draw in (0.0, 0.3, 0.6, 0.9)} == {second}
    assert long.pending_tokens, "a look changes nothing"


def test_what_is_cached_in_the_own_pool_may_be_worth_the_wait() -> None:
    pools = Pools(LONG, SHORT, DECODE)
    prompt = measure(b"/generate", {"text": TEXT})
    waits(pools, 3.0, 0.0)
    worker = pools.workers[0]
    assert pools.route(prompt, 2000).prefill is pools.workers[1]
    for one in pools.workers[:2]:
        one.rate.tokens_per_s = 500.0  # 2,000 tokens are 4 s
    waits(pools, 3.0, 0.0)
    pools.planner.prefixes.record_sent(worker, prompt.hashes)
    assert pools.route(prompt, 2000).prefill is worker


def test_excluded_instances_are_a_last_resort() -> None:
    pools = Pools(SHORT, SHORT, DECODE, DECODE)
    for without in ({0}, {1}):
        assert pools.prefill_of(100, without=without).id not in without
    assert pools.prefill_of(100, without={0, 1}).id in {0, 1}
    route = pools.route(measure(b"/generate", {"text": "x"}), 100, without_decode={2})
    assert route.decode.id == 3


def test_an_excluded_pool_is_helped_out_by_the_other() -> None:
    pools = Pools(SHORT, LONG, DECODE)
    assert pools.prefill_of(100, without={0}).role is LONG


def test_draining_and_unhealthy_instances_get_nothing() -> None:
    pools = Pools(SHORT, SHORT, DECODE)
    pools.workers[0].is_draining = True
    pools.registry.refresh()
    assert pools.prefill_of(100) is pools.workers[1]
    pools.workers[1].is_healthy = False
    pools.registry.refresh()
    with pytest.raises(NoInstanceError, match="prefill"):
        pools.prefill_of(100)


def test_no_decode_instance() -> None:
    with pytest.raises(NoInstanceError, match="decode"):
        Pools(SHORT).prefill_of(100)


def test_decode_by_freeness() -> None:
    pools = Pools(BOTH, DECODE, DECODE)
    first, second = pools.workers[1:]
    prompt = measure(b"/generate", {"text": "x"})
    first.reserved_tokens = 50_000
    assert pools.route(prompt, 100).decode is second
    second.reported_free_kv_tokens = 10_000
    assert pools.route(prompt, 100).decode is first
    first.sibling_tokens = 49_000
    assert pools.route(prompt, 100).decode is second
    second.reported_awaiting_tokens = 20_000  # another router's transfers
    assert pools.route(prompt, 100).decode is first


def test_decode_where_the_prompt_is_held_unless_that_is_much_fuller() -> None:
    pools = Pools(BOTH, DECODE, DECODE)
    first, second = pools.workers[1:]
    prompt = measure(b"/generate", {"text": TEXT})
    for worker in (first, second):
        worker.caches_at_decode = True
        pools.planner.prefixes.index.add_worker(worker.id)
    pools.planner.prefixes.record_sent(second, prompt.hashes)
    first.reported_free_kv_tokens, second.reported_free_kv_tokens = 100_000, 60_000
    assert pools.route(prompt, 2000).decode is first  # it is not known to the model that any of them keeps prefixes
    pools.registry.refresh()
    route = pools.route(prompt, 2000)
    assert route.decode is second
    assert 1900 < route.decision.decode_cached_tokens < 2000
    assert route.decision.cached_tokens == 0
    assert pools.route(measure(b"/generate", {"text": TEXT[4000:]}), 1000).decode is first
    second.reported_free_kv_tokens = 40_000
    route = pools.route(prompt, 2000)
    assert (route.decode, route.decision.decode_cached_tokens) == (first, 0)


def test_a_decode_instance_that_reports_its_blocks() -> None:
    pools = Pools(BOTH, DECODE, DECODE)
    ids = list(range(500))
    prompt = measure(b"/generate", {"input_ids": ids})
    for worker in pools.workers[1:]:
        worker.caches_at_decode = True
        worker.held_blocks = HeldBlocks(16)
        worker.held_blocks.sources = (pools.planner.prefixes.blocks.add_source(),)
        worker.held_blocks.is_whole = True
    pools.registry.refresh()
    held = pools.workers[2].held_blocks
    assert held is not None
    blocks = TokenBlocks(array("q", ids).tobytes()).of(16)
    pools.planner.prefixes.blocks.store(held.sources[0], [blocks.key(at) for at in range(20)])
    route = pools.route(prompt, 500)
    assert (route.decode, route.decision.decode_cached_tokens) == (pools.workers[2], 320)


def test_a_prefix_on_the_host_counts_less_than_one_on_the_device() -> None:
    ids = list(range(500))
    prompt = measure(b"/generate", {"input_ids": ids})
    pools = Pools(BOTH, BOTH, DECODE)
    sources = []
    for worker in pools.workers[:2]:
        worker.held_blocks = HeldBlocks(16)
        worker.held_blocks.sources = (pools.planner.prefixes.blocks.add_source(),)
        worker.held_blocks.is_whole = True
        sources += worker.held_blocks.sources
    blocks = TokenBlocks(array("q", ids).tobytes()).of(16)
    keys = [blocks.key(at) for at in range(20)]
    pools.planner.prefixes.blocks.store(sources[1], keys, Tier.HOST)
    route = pools.route(prompt, 500)
    assert (route.prefill, route.decision.cached_tokens) == (pools.workers[1], 288)
    pools.planner.prefixes.blocks.store(sources[0], keys)
    route = pools.route(prompt, 500)
    assert (route.prefill, route.decision.cached_tokens) == (pools.workers[0], 320)


def keep_prefixes(served: Cluster) -> None:
    """Have the decode engines say that they have a prefix cache."""
    for engine in served.decode:
        assert isinstance(engine.info, dict)
        engine.info = {**engine.info, "disaggregation_decode_enable_radix_cache": True}
        served.worker(engine.url).has_info = False


async def test_a_conversation_stays_with_its_decode_instance() -> None:
    """It is counted, forgotten where the answer fails, and where the cache is flushed."""
    async with cluster(decode=2) as served:
        keep_prefixes(served)
        await served.until(lambda: served.model.caches_at_decode)
        described = (await served.ask("GET", "/workers")).json["workers"]
        assert [one["cached_prefixes"] for one in described if one["role"] == "decode"] == 2 * [{"from": "estimate"}]
        metrics = served.router.metrics

        async def home() -> str:
            before = metrics.decode_cached_tokens
            answer = await served.ask("POST", "/generate", {"text": TEXT})
            assert answer.status == 200
            await served.until_idle()
            held.append(metrics.decode_cached_tokens > before)
            return str(answer.headers["x-sglang-ext-decode"])

        held: list[bool] = []
        first = await home()
        for engine in served.decode:  # the other one is somewhat freer
            used_tokens = (1 << 18) if engine.url == first else 0
            engine.loads = {
                "loads": [{"num_running_reqs": 0, "num_used_tokens": used_tokens, "max_total_num_tokens": 1 << 20}]
            }
        await served.until(lambda: served.worker(first).reported_free_kv_tokens < 1 << 20)
        assert [await home() for _ in range(3)] == 3 * [first]
        assert held == [False, True, True, True]
        served.router.forget_prefixes()
        other = await home()
        assert (other != first, held[-1]) == (True, False)
        planner, worker = served.router.planner, served.worker(other)
        assert planner.prefixes.index.worker_block_count(worker.id) > 0
        planner.prefixes.empty_worker(worker)
        next(engine for engine in served.decode if engine.url == other).plan(reply({"error": "no"}, status=500))
        assert await home() == first
        assert planner.prefixes.index.worker_block_count(worker.id) == 0


def test_decode_instances_that_are_too_small_are_passed_over() -> None:
    pools = Pools(BOTH, DECODE, DECODE)
    pools.workers[1].max_prompt_tokens = 1000
    pools.registry.refresh()
    prompt = measure(b"/generate", {"text": "x"})
    assert pools.model.longest_decode_tokens == CONTEXT_TOKENS
    for pools.draw in (0.0, 0.99):
        assert pools.route(prompt, 2000).decode is pools.workers[2]
    pools.workers[2].is_draining = True
    pools.registry.refresh()
    assert pools.route(prompt, 2000).decode is pools.workers[1], "it is its to refuse"


def test_a_small_decode_instance_is_not_taken_because_the_large_one_has_failed() -> None:
    pools = Pools(BOTH, DECODE, DECODE)
    pools.workers[1].max_prompt_tokens = 1000
    pools.registry.refresh()
    prompt = measure(b"/generate", {"text": "x"})
    route = pools.planner.route(pools.model, prompt, 2000, set(), {pools.workers[2].id}, 0.0)
    assert route.decode is pools.workers[2]


@pytest.mark.parametrize("needs_decode", [True, False])
def test_prefill_instances_that_are_too_small_are_passed_over(needs_decode: bool) -> None:
    pools = Pools(BOTH, BOTH, DECODE)
    small, large, _ = pools.workers
    small.max_prompt_tokens = 1000
    pools.registry.refresh()
    large.pending_tokens = 100_000  # the other one is the emptiest
    prompt = measure(b"/generate", {"text": "x"})

    def prefill(tokens: int, excluded: set[int] = frozenset()) -> Worker:  # type: ignore[assignment]
        return pools.planner.route(pools.model, prompt, tokens, excluded, set(), 0.0, needs_decode).prefill

    assert prefill(1000) is small
    assert prefill(1001) is large
    assert prefill(1001, {large.id}) is large, "tried again where it fits"
    assert prefill(CONTEXT_TOKENS + 1) is large, "which can say how long it may be"


def test_a_prompt_that_only_the_other_pool_holds_goes_there() -> None:
    pools = Pools(SHORT, LONG, DECODE, pool_spill=False)
    short, long, _ = pools.workers
    short.max_prompt_tokens = 100
    pools.registry.refresh()
    prompt = measure(b"/generate", {"text": "x"})
    route = pools.route(prompt, 200)
    assert (route.prefill, route.decision.length_class) == (long, LengthClass.SHORT)


@pytest.mark.parametrize("role", [LONG, BOTH])
def test_instances_of_a_long_pool_hold_a_prompt_together(role: Role) -> None:
    pools = Pools(role, role, DECODE, coordinator_url="http://127.0.0.1:1")
    small, large, _ = pools.workers
    small.max_prompt_tokens, large.max_prompt_tokens = 1000, 2000
    pools.registry.refresh()
    large.pending_tokens = 5
    prompt = measure(b"/generate", {"text": "x"})
    assert pools.route(prompt, 3000).prefill is small


@pytest.mark.parametrize("policy", sorted({*PREFILL_POLICIES} - {"predicted_wait"}))
def test_every_policy_stays_within_the_pool(policy: str) -> None:
    pools = Pools(SHORT, LONG, SHORT, LONG, DECODE, prefill_policy=policy)
    for step in range(20):
        pools.draw = step / 20
        assert pools.prefill_of(100).role is SHORT
        assert pools.prefill_of(1000).role is LONG


@pytest.mark.parametrize("policy", ["freeness", "round_robin", "random", "power_of_two"])
def test_every_decode_policy_uses_all_instances(policy: str) -> None:
    pools = Pools(BOTH, DECODE, DECODE, decode_policy=policy)
    prompt = measure(b"/generate", {"text": "x"})
    seen = set()
    for step in range(20):
        pools.draw = step / 20
        seen.add(pools.route(prompt, 100).decode.id)
    assert seen == {1, 2}


def test_prompts_of_token_ids_share_prefixes_too() -> None:
    pools = Pools(LONG, LONG, DECODE)
    ids = list(range(1000))
    prompt = measure(b"/generate", {"input_ids": ids})
    pools.planner.prefixes.record_sent(pools.workers[1], prompt.hashes)
    longer = measure(b"/generate", {"input_ids": [*ids, *range(5000, 6000)]})
    assert pools.planner.estimate_tokens(pools.model, longer) == 2000
    route = pools.route(longer, 2000)
    assert route.prefill is pools.workers[1]
    assert 1000 - BLOCK_BYTES // 8 <= route.decision.cached_tokens <= 1000


def test_the_ratio_of_bytes_and_tokens_is_learned() -> None:
    pools = Pools(SHORT, DECODE)
    prompt = measure(b"/generate", {"text": "x" * 2000})
    assert pools.planner.estimate_tokens(pools.model, prompt) == 500
    for size in [500, 1000, 2000, 3000] * 100:
        pools.planner.learn_tokens(pools.model, measure(b"/generate", {"text": "x" * size}), size // 2)
    assert pools.planner.estimate_tokens(pools.model, prompt) == pytest.approx(1000, rel=0.05)


async def test_a_conversation_stays_where_its_prefix_is() -> None:
    """Turn after turn of a long conversation is a short prefill where the turns before were computed."""
    async with cluster(short=2, long=2, length_boundary_tokens=256) as served:
        messages = [{"role": "user", "content": TEXT[:4000]}]
        homes = []
        for turn in range(4):
            answer = await served.ask("POST", "/v1/chat/completions", {"messages": messages})
            homes.append((answer.headers["x-sglang-ext-class"], answer.headers["x-sglang-ext-prefill"]))
            await served.until_idle()
            messages += [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": "go on"}]
        assert homes[0][0] == "long"
        assert homes[1:] == [("short", homes[0][1])] * 3


@pytest.mark.parametrize(("images", "expected"), [(0, "short"), (1, "short"), (2, "long")])
async def test_images_count_for_the_class_and_refuse_nothing(images: int, expected: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    content = [{"type": "text", "text": "look"}, *[image] * images]
    async with cluster(length_boundary_tokens=4096, image_tokens=3000) as served:
        before = served.model.estimator.estimate(10_000)
        served.short[0].script = served.long[0].script = reply({"choices": [], "usage": {"prompt_tokens": 9}})
        asked = {"messages": [{"role": "user", "content": content}]}
        answer = await served.ask("POST", "/v1/chat/completions", asked)
        assert (answer.status, answer.headers["x-sglang-ext-class"]) == (200, expected)
        await served.until_idle()
        # What an instance says of a prompt with images teaches nothing about text.
        assert (served.model.estimator.estimate(10_000) == before) == (images > 0)


PROMPT = measure(b"/generate", {"text": "x"})


def test_prefill_and_decode_are_of_one_revision() -> None:
    pools = Pools(SHORT, SHORT, DECODE, DECODE)
    pools.deploy("v1", "v2", "v1", "v2")
    pools.workers[3].reported_free_kv_tokens = 200_000  # it would be the first choice of all
    seen = set()
    for step in range(20):
        pools.draw = step / 20
        route = pools.route(PROMPT, 100)
        assert route.decode is not None
        assert route.prefill.revision == route.decode.revision
        seen.add(route.prefill.revision)
    assert seen == {"v1", "v2"}


def test_a_revision_without_decode_gets_nothing() -> None:
    pools = Pools(SHORT, SHORT, SHORT, DECODE)
    pools.deploy("v2", "v2", "v1", "v1")
    for step in range(20):
        pools.draw = step / 20
        assert pools.route(PROMPT, 100).prefill is pools.workers[2]
    assert pools.model.ready_prefill == (pools.workers[2],)  # nor does it count as capacity that waits for work
    pools.workers[3].is_healthy = False
    pools.registry.refresh()
    # Log-probabilities of a prompt need no decode instance.
    pools.draw = 0.0
    alone = pools.planner.route(pools.model, PROMPT, 100, NONE, NONE, 100.0, needs_decode=False)
    assert alone.prefill is pools.workers[0]


def test_a_class_is_served_by_the_revision_that_has_its_pool() -> None:
    pools = Pools(LONG, SHORT, LONG, DECODE, DECODE, pool_spill=False)
    pools.deploy("v2", "v1", "v1", "v2", "v1")
    for step in range(20):
        pools.draw = step / 20
        assert pools.route(PROMPT, 100).prefill is pools.workers[1]
    pools.draw = 0.0
    assert pools.prefill_of(2000) is pools.workers[2]
    pools.draw = 0.9
    assert pools.prefill_of(2000) is pools.workers[0]


def test_what_failed_or_is_small_does_not_leave_a_request_without_a_pair() -> None:
    pools = Pools(SHORT, SHORT, DECODE, DECODE)
    pools.deploy("v1", "v2", "v1", "v2")
    v1_prefill, v2_prefill, v1_decode, v2_decode = pools.workers
    assert pools.route(PROMPT, 100, {v1_prefill.id}).prefill is v2_prefill
    assert pools.route(PROMPT, 100, None, {v2_decode.id}).prefill is v1_prefill
    # Only v2's prefill and v1's decode have not failed: no pair, so those that have are tried again.
    route = pools.route(PROMPT, 100, {v1_prefill.id}, {v2_decode.id})
    assert route.decode is not None
    assert route.prefill.revision == route.decode.revision
    v1_decode.max_prompt_tokens = 50
    pools.registry.refresh()
    assert pools.route(PROMPT, 100).decode is v2_decode
    assert pools.route(PROMPT, 100, {v2_prefill.id}).decode is v2_decode, "the only one that can hold it"


def test_two_halves_of_different_revisions_serve_nothing_and_say_so() -> None:
    pools = Pools(SHORT, DECODE)
    pools.deploy("v2", "v1")
    with pytest.raises(NoInstanceError, match="no prefill and decode instance of one revision are ready"):
        pools.route(PROMPT, 100)
    assert pools.model.missing_roles() == ["prefill and decode of one revision"]
    pools.deploy("v1", "v1")
    assert pools.model.missing_roles() == []
    pools.route(PROMPT, 100)


def test_decode_nearby_is_preferred_while_it_has_room() -> None:
    places = ("a/n1", "b/n1", "a/n2", "a/n1")
    pools = Pools(SHORT, DECODE, DECODE, DECODE, prefer_same_topology=True)
    pools.deploy("", "", "", "", topology=places)
    far, near, nearest = pools.workers[1:]
    assert pools.route(PROMPT, 100).decode is nearest
    nearest.reported_free_kv_tokens = 50
    assert pools.route(PROMPT, 100).decode is near
    near.reported_free_kv_tokens = 50
    assert pools.route(PROMPT, 100).decode is far
    far.reported_free_kv_tokens = 0
    assert pools.route(PROMPT, 100).decode is not None
    without = Pools(SHORT, DECODE, DECODE, DECODE)
    without.deploy("", "", "", "", topology=places)
    assert without.route(PROMPT, 100).decode is without.workers[1]


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        (b"/generate", {"text": "x", "sampling_params": {"max_new_tokens": 7}}, 7),
        (b"/generate", {"text": ["x", "y"], "sampling_params": [{"max_new_tokens": 7}, {"max_new_tokens": 9}]}, 9),
        (b"/generate", {"text": "x"}, 0),
        (b"/generate", {"text": "x", "sampling_params": {"max_new_tokens": None}}, 0),
        (b"/v1/completions", {"prompt": "x", "max_tokens": 7}, 7),
        (b"/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 7}, 7),
        (b"/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 7}, 7),
        (b"/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 7}, 7),
        (b"/v1/responses", {"input": "x", "max_output_tokens": 7}, 7),
    ],
)
def test_the_longest_reply_is_read_from_the_body(path: bytes, body: dict[str, Any], limit: int) -> None:
    assert measure(path, body).max_new_tokens == limit


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_prompt_and_reply_go_where_the_context_holds_both(kind: str) -> None:
    pools = Pools(BOTH, BOTH, DECODE, DECODE)
    small, large = pools.workers[:2] if kind == "prefill" else pools.workers[2:]
    for worker in pools.workers:
        worker.context_tokens = 1000 if worker is small else CONTEXT_TOKENS
    pools.registry.refresh()

    def chosen(tokens: int, reply_tokens: int) -> set[Worker | None]:
        body = {"text": "x", "sampling_params": {"max_new_tokens": reply_tokens}}
        found: set[Worker | None] = set()
        for draw in (0.0, 0.9):
            pools.draw = draw
            route = pools.route(measure(b"/generate", body), tokens)
            found.add(route.prefill if kind == "prefill" else route.decode)
        return found

    assert chosen(600, 400) == {small, large}
    assert chosen(600, 401) == {large}
    assert chosen(1, 2000) == {large}
    assert chosen(600, 0) == {small, large}  # an unbounded reply ends at the end of the context
    assert chosen(600, CONTEXT_TOKENS) == {large}, "none holds both: the largest says so"


def test_tokens_are_counted_where_the_reply_leaves_the_context_in_doubt() -> None:
    pools = Pools(BOTH, DECODE, DECODE)
    low, high = pools.model.estimator.interval(len(TEXT))
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 100}}
    prompt = measure(b"/generate", body)
    pools.planner._given_boundary = FixedBoundary(1 << 20)  # no class is in doubt
    assert not pools.planner.needs_exact_count(pools.model, prompt)
    pools.workers[0].context_tokens = pools.workers[1].context_tokens = CONTEXT_TOKENS
    pools.workers[2].context_tokens = (low + high) // 2 + 100
    pools.registry.refresh()
    assert pools.planner.needs_exact_count(pools.model, prompt)
    pools.workers[2].context_tokens = (low + high) // 2 + 10_000
    pools.registry.refresh()
    assert not pools.planner.needs_exact_count(pools.model, prompt)


class TestReportedBlocks:
    """Instances that report their blocks, and one that does not."""

    IDS = tuple(range(1000, 2000))

    def pools(self) -> Pools:
        pools = Pools(BOTH, BOTH, BOTH, DECODE)
        for worker in pools.workers[:2]:
            worker.held_blocks = HeldBlocks(16)
            worker.held_blocks.sources = (
                pools.planner.prefixes.blocks.add_source(),
                pools.planner.prefixes.blocks.add_source(),
            )
            worker.held_blocks.is_whole = True
        return pools

    def store(self, pools: Pools, number: int, rank: int, tokens: int, ids: tuple[int, ...] = IDS) -> None:
        held = pools.workers[number].held_blocks
        assert held is not None
        blocks = TokenBlocks(array("q", ids).tobytes()).of(16)
        pools.planner.prefixes.blocks.store(held.sources[rank], [blocks.key(at) for at in range(tokens // 16)])

    def cached(self, pools: Pools, **fields: Any) -> list[int]:
        prompt = measure(b"/generate", {"input_ids": list(self.IDS), **fields})
        return pools.planner.prefixes.cached_tokens(prompt, len(self.IDS), pools.workers[:3])

    def test_the_rank_that_holds_most_counts(self) -> None:
        pools = self.pools()
        self.store(pools, 0, 0, 320)
        self.store(pools, 0, 1, 480)
        self.store(pools, 1, 0, 16)
        assert self.cached(pools) == [480, 16, 0]
        assert pools.route(measure(b"/generate", {"input_ids": list(self.IDS)}), 1000).prefill is pools.workers[0]

    def test_the_last_token_is_always_computed(self) -> None:
        pools = self.pools()
        self.store(pools, 0, 0, 1000, self.IDS)
        ids = self.IDS[:16]
        prompt = measure(b"/generate", {"input_ids": list(ids)})
        assert pools.planner.prefixes.cached_tokens(prompt, 16, pools.workers[:1]) == [15]

    def test_what_was_sent_long_ago_counts_only_where_events_do_not_say_all(self) -> None:
        pools = self.pools()
        prompt = measure(b"/generate", {"input_ids": list(self.IDS)})
        for worker in pools.workers[:3]:
            pools.planner.prefixes.record_sent(worker, prompt.hashes)
        just_sent = self.cached(pools)
        assert just_sent[0] == just_sent[1] == just_sent[2] > 900
        pools.planner.prefixes.age_recent()
        assert self.cached(pools) == just_sent
        pools.planner.prefixes.age_recent()
        assert self.cached(pools) == [0, 0, just_sent[2]]
        held = pools.workers[1].held_blocks
        assert held is not None
        held.is_whole = False
        assert self.cached(pools) == [0, just_sent[1], just_sent[2]]
        self.store(pools, 0, 0, 160)
        assert self.cached(pools)[0] == 160

    def test_what_was_not_computed_or_is_flushed_does_not_count(self) -> None:
        pools = self.pools()
        prompt = measure(b"/generate", {"input_ids": list(self.IDS)})
        for worker in pools.workers[:3]:
            pools.planner.prefixes.record_sent(worker, prompt.hashes)
        pools.planner.prefixes.forget_sent(prompt, pools.workers[0], 0, 1000)
        pools.planner.prefixes.empty_worker(pools.workers[1])
        pools.planner.prefixes.remove_worker(pools.workers[2])
        assert self.cached(pools) == [0, 0, 0]

    @pytest.mark.parametrize(
        "fields",
        [
            {"extra_key": "tenant"},
            {"lora_path": "adapter"},
            {"model": "base:adapter"},
            {"image_data": "x"},
            {"cache_salt": "s"},
            {"cache_salt": 7},
        ],
    )
    def test_a_prompt_with_a_cache_of_its_own_finds_nothing_of_others(self, fields: dict[str, Any]) -> None:
        pools = self.pools()
        self.store(pools, 0, 0, 480)
        assert self.cached(pools) == [480, 0, 0]
        assert self.cached(pools, **fields) == [0, 0, 0]

    def test_a_salt_has_blocks_of_its_own(self) -> None:
        pools = self.pools()
        held = pools.workers[0].held_blocks
        assert held is not None
        blocks = TokenBlocks(array("q", self.IDS).tobytes(), salt_seed("s")).of(16)
        pools.planner.prefixes.blocks.store(held.sources[0], [blocks.key(at) for at in range(5)])
        assert self.cached(pools, cache_salt="s") == [80, 0, 0]

    def test_texts_and_batches_go_by_what_was_sent(self) -> None:
        assert measure(b"/generate", {"text": "x" * 999}).blocks is None
        assert measure(b"/generate", {"input_ids": [[1, 2], [3, 4]]}).blocks is None
        assert measure(b"/v1/completions", {"prompt": [1, 2, 3]}).blocks is not None
        assert measure(b"/generate", {"input_embeds": [[0.5], [0.5]]}).blocks is None


class TestRanks:
    """Instances with data-parallel ranks, each of which has a queue and a prefix cache of its own."""

    IDS = tuple(range(3000, 4000))
    PROMPT = measure(b"/generate", {"input_ids": list(IDS)})

    def pools(self, has_events: bool = True) -> Pools:
        pools = Pools(BOTH, DECODE)
        for worker in pools.workers:
            worker.set_ranks(3)
            worker.caches_at_decode = worker.role is DECODE
            pools.planner.prefixes.add_worker(worker)
            for rank in worker.ranks:
                rank.free_kv_tokens = 100_000
            if has_events:
                worker.held_blocks = HeldBlocks(16)
                worker.held_blocks.sources = tuple(pools.planner.prefixes.blocks.add_source() for _ in range(3))
                worker.held_blocks.is_whole = True
        pools.registry.refresh()
        return pools

    def hold(self, pools: Pools, worker: Worker, rank: int) -> None:
        """The rank holds the prompt, by its events or as it was sent there."""
        if worker.held_blocks is None:
            pools.planner.prefixes.record_sent(worker, self.PROMPT.hashes, rank)
        else:
            blocks = TokenBlocks(array("q", self.IDS).tobytes()).of(16)
            source = worker.held_blocks.sources[rank]
            pools.planner.prefixes.blocks.store(source, [blocks.key(at) for at in range(blocks.count)])

    @pytest.mark.parametrize("has_events", [True, False])
    def test_the_ranks_that_hold_the_prompt_get_it_unless_they_are_busy(self, has_events: bool) -> None:
        pools = self.pools(has_events)
        prefill, decode = pools.workers
        self.hold(pools, prefill, 1)
        self.hold(pools, decode, 2)
        route = pools.route(self.PROMPT, 1000)
        assert (route.prefill_rank, route.decode_rank) == (1, 2)
        assert route.decision.cached_tokens > 900
        assert route.decision.decode_cached_tokens > 900
        prefill.ranks[1].pending_tokens = 2000  # which takes longer than to compute it elsewhere
        decode.ranks[2].reserved_tokens = 60_000
        route = pools.route(self.PROMPT, 1000)
        assert route.prefill_rank != 1
        assert route.decode_rank != 2
        assert (route.decision.cached_tokens, route.decision.decode_cached_tokens) == (0, 0)
        assert route.decision.new_tokens == 1000

    def test_by_what_is_under_way_and_reported(self) -> None:
        pools = self.pools()
        prefill, decode = pools.workers
        for number, rank in enumerate(prefill.ranks):
            rank.pending_tokens = 100 * (number != 2)
        for rank, awaiting in zip(decode.ranks, (50_000, 0, 0), strict=True):
            rank.take_report(RankReport(0, 90_000, awaiting))
        decode.ranks[1].in_flight = 5
        route = pools.route(self.PROMPT, 1000)
        assert (route.prefill_rank, route.decode_rank) == (2, 2)
        prefill.ranks[2].take_report(RankReport(900, 0, 0))  # of another client
        assert pools.route(self.PROMPT, 1000).prefill_rank in (0, 1)

    def test_what_a_rank_holds_is_forgotten(self) -> None:
        pools = self.pools(has_events=False)
        prefill = pools.workers[0]
        pools.planner.prefixes.record_sent(
            prefill, self.PROMPT.hashes
        )  # by another router, which does not name the rank
        assert pools.route(self.PROMPT, 1000).decision.cached_tokens == 0
        self.hold(pools, prefill, 1)
        pools.planner.prefixes.forget_sent(self.PROMPT, prefill, 0, 1000, rank=0)
        assert pools.route(self.PROMPT, 1000).prefill_rank == 1
        pools.planner.prefixes.forget_sent(self.PROMPT, prefill, 0, 1000, rank=1)
        assert pools.route(self.PROMPT, 1000).decision.cached_tokens == 0
        self.hold(pools, prefill, 1)
        pools.planner.prefixes.empty_worker(prefill)
        assert pools.route(self.PROMPT, 1000).decision.cached_tokens == 0


async def test_each_leg_names_its_rank() -> None:
    """Headers name it, and both legs know prefill's; what is under way is counted, and reports are read, by rank."""
    async with cluster(short=1, long=0, decode=1) as served:
        (prefill,), (decode,) = served.short, served.decode
        load = {"num_running_reqs": 0, "max_total_num_tokens": 50_000, "num_waiting_uncached_tokens": 0}
        for engine, used in ((prefill, (0, 0)), (decode, (0, 40_000))):
            assert isinstance(engine.info, dict)
            engine.info = {**engine.info, "dp_size": 2, "disaggregation_decode_enable_radix_cache": True}
            engine.loads = {"loads": [{**load, "dp_rank": rank, "num_used_tokens": used[rank]} for rank in (1, 0)]}
            served.worker(engine.url).has_info = False
        workers = [served.worker(engine.url) for engine in (prefill, decode)]
        await served.until(lambda: all(len(worker.ranks) == 2 for worker in workers))
        await served.until(lambda: [rank.free_kv_tokens for rank in workers[1].ranks] == [50_000, 10_000])
        for held in (0, 1):
            workers[0].ranks[1 - held].pending_tokens += 5000
            assert (await served.ask("POST", "/generate", {"text": f"{held} {TEXT[:600]}"})).status == 200
            workers[0].ranks[1 - held].pending_tokens -= 5000
            received = [engine.requests[-1] for engine in (prefill, decode)]
            lines = ("x-override-routed-dp-rank", "x-data-parallel-rank")
            assert [[dict(one.headers)[line] for line in lines] for one in received] == [2 * [str(held)], 2 * ["0"]]
            assert received[0].body == received[1].body
            index = served.router.planner.prefixes.index
            known = [[index.worker_block_count(rank.prefix_id) > 0 for rank in worker.ranks] for worker in workers]
            assert known == [[True, held == 1], [True, False]]
            assert json.loads(received[0].body)["disagg_prefill_dp_rank"] == held
        await served.until_idle()


async def test_an_undivided_instance_is_given_its_rank_by_headers() -> None:
    async with cluster(short=0, long=0, decode=0, plain=1) as served:
        (engine,) = served.plain
        assert isinstance(engine.info, dict)
        engine.info = {**engine.info, "dp_size": 2}
        worker = served.worker(engine.url)
        worker.has_info = False
        await served.until(lambda: len(worker.ranks) == 2)
        worker.ranks[0].pending_tokens += 5000
        assert (await served.ask("POST", "/generate", {"text": TEXT[:600]})).status == 200
        worker.ranks[0].pending_tokens -= 5000
        headers = dict(engine.requests[-1].headers)
        assert (headers["x-override-routed-dp-rank"], headers["x-data-parallel-rank"]) == ("1", "1")

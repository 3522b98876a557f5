"""What the scheduler replaces of SGLang's is there, with these arguments, and load reports count parked prefills."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.laps.decide.round_plan import PriorityClass
from sglang_ext.live.decide.instance_work import WorkLog
from sglang_ext.types import LengthClass
from support.prefill_loop import policy

pytestmark = pytest.mark.usefixtures("sglang_imported")


# By name, the parameters that SGLang calls it with.
OVERRIDDEN = {
    "init_load_inquirer": [],
    "run_event_loop": [],
    "get_new_batch_prefill": ["running_batch"],
    "update_running_batch": ["batch"],
    "run_batch": ["batch", "pp_proxy_tensors"],
    "process_batch_result": ["batch", "result"],
    "process_disagg_prefill_inflight_queue": ["rids_to_check"],
    "is_fully_idle": ["for_health_check"],
    "abort_request": ["recv_req"],
    "process_pending_chunked_abort": [],
    "get_internal_state": ["recv_req"],
    "set_internal_state": ["recv_req"],
    "collect_inflight_reqs": [],
    "_poll_timeout_aborts": [],
}
# What a newer SGLang has beside these, and ours hands on without a look.
PASSED_ON = {"is_fully_idle": {"ignore_waiting"}}


@pytest.fixture(scope="module")
def schedulers(sglang_imported: None) -> tuple[Any, Any]:
    """Ours, and SGLang's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a CPU cannot do
        from sglang.srt.managers.scheduler import Scheduler

        from sglang_ext.laps.sglang.scheduler import LengthAwareScheduler

    return LengthAwareScheduler, Scheduler


@pytest.mark.slow
def test_nothing_else_of_sglang_is_hidden(schedulers: tuple[Any, Any]) -> None:
    ours, stock = schedulers
    own = {name for name in vars(ours) if not name.startswith("__")}
    assert own & set(dir(stock)) == set(OVERRIDDEN)


@pytest.mark.slow
def test_what_is_overridden_takes_these_arguments(schedulers: tuple[Any, Any]) -> None:
    _, stock = schedulers
    for name, expected in OVERRIDDEN.items():
        _, *parameters = inspect.signature(getattr(stock, name)).parameters.values()
        assert [parameter.name for parameter in parameters[: len(expected)]] == expected, name
        more = {parameter.name for parameter in parameters[len(expected) :]}
        assert more <= PASSED_ON.get(name, set()), name


def request(seqlen: int, prefix_len: int = 0) -> Any:
    return SimpleNamespace(seqlen=seqlen, prefix_len=prefix_len, num_matched_prefix_tokens=prefix_len)


def stock_inquirer(waiting: list[Any], chunked: Any, bootstrapping: Sequence[Any] = ()) -> Any:
    """SGLang's own, over these requests; what it does not need for them is absent."""
    from dataclasses import fields

    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer

    values = {field.name: None for field in fields(SchedulerLoadInquirer)} | {
        "disaggregation_mode": DisaggregationMode.PREFILL,
        "get_waiting_queue": lambda: waiting,
        "waiting_queue_prefix_matched": lambda: True,
        "get_recent_cache_hit_rate": lambda: 0.0,
        "get_chunked_req": lambda: chunked,
        "get_disagg_prefill_bootstrap_queue": lambda: SimpleNamespace(queue=list(bootstrapping)),
    }
    return SchedulerLoadInquirer(**values)


def over(stock: Any, parked: list[Any], held: Sequence[Any] = ()) -> Any:
    from sglang_ext.laps.sglang.scheduler import ParkedLoadInquirer

    return ParkedLoadInquirer.over(stock, lambda: parked, lambda: held)


def test_tokens_that_parked_requests_have_left_are_waiting() -> None:
    stock = stock_inquirer([request(100), request(50, 20)], chunked=request(300, 200))
    parked = [request(1000, 400), request(80, 79)]
    waiting_tokens = stock.get_num_waiting_uncached_tokens()
    assert waiting_tokens == 100 + 30 + 100
    ours = over(stock, parked)
    assert ours.get_num_waiting_uncached_tokens() == waiting_tokens + 600 + 1
    assert ours._get_num_pending_tokens() == stock._get_num_pending_tokens() + 601
    assert ours._get_num_pending_tokens(32) == stock._get_num_pending_tokens(32) + 601


def test_requests_that_a_batch_is_built_without_are_waiting() -> None:
    """SGLang counts in the middle of it, when its queue holds nothing but the members of the batch."""
    stock = stock_inquirer([request(100)], chunked=None)
    ours = over(stock, [request(1000, 400)], held=[request(50, 20), request(70)])
    assert ours._get_num_pending_tokens() == 100 + 50 + 70 + 600
    assert ours.get_num_waiting_uncached_tokens() == 100 + 30 + 70 + 600


def test_prompts_that_decode_has_no_slots_for_yet_are_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext.laps.sglang import scheduler

    bootstrapping = [request(900)]
    seen: list[Any] = []
    monkeypatch.setattr(scheduler, "late_tokens", lambda queue: seen.append(queue.queue) or 900)
    ours = over(stock_inquirer([request(100)], None, bootstrapping), [])
    assert ours.get_num_waiting_uncached_tokens() == 100 + 900
    assert seen == [bootstrapping]


def test_it_sees_requests_that_are_parked_later() -> None:
    parked: list[Any] = []
    ours = over(stock_inquirer([], chunked=None), parked)
    assert ours.get_num_waiting_uncached_tokens() == 0
    parked.append(request(10, 4))
    assert ours.get_num_waiting_uncached_tokens() == 6
    parked.clear()
    assert ours.get_num_waiting_uncached_tokens() == 0


def test_the_load_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.load_snapshot import LoadSnapshot
    from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer

    base = LoadSnapshot(num_running_reqs=1, num_waiting_reqs=2, num_total_tokens=50, num_active_tokens=40)
    monkeypatch.setattr(SchedulerLoadInquirer, "get_loads", lambda self: base)
    parked = [request(1000, 400)]
    ours = over(stock_inquirer([], chunked=None), parked)
    loads = ours.get_loads()
    assert (loads.num_waiting_reqs, loads.num_total_tokens, loads.num_active_tokens) == (3, 650, 640)
    assert loads.num_running_reqs == 1
    assert base.num_waiting_reqs == 2
    parked.clear()
    assert ours.get_loads() is base


def test_every_field_of_the_stock_inquirer_is_taken_over() -> None:
    from dataclasses import fields

    stock = stock_inquirer([request(3)], chunked=None)
    ours = over(stock, [])
    for field in fields(stock):
        if field.name == "get_waiting_queue":
            assert ours.get_waiting_queue() == stock.get_waiting_queue()
        else:
            assert getattr(ours, field.name) is getattr(stock, field.name)


def started(rid: str, poll: object) -> Any:
    entry = SimpleNamespace(key=100 + int(rid))
    return SimpleNamespace(rid=rid, disagg_kv_sender=SimpleNamespace(poll=lambda: poll), _sglang_ext_laps=entry)


@pytest.mark.parametrize("launched", [True, False])
def test_deciding_is_timed_and_building_a_batch_is_not(
    schedulers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    from sglang_ext.laps.sglang.instance import LapsInstance
    from sglang_ext.laps.sglang.metrics import NoMetrics
    from sglang_ext.laps.sglang.rank_agreement import SingleRankAgreement, Step

    ours, stock = schedulers
    now_s = 100.0

    def takes(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def build(self: Any, running_batch: Any) -> Any:
        takes(0.5)
        return SimpleNamespace(batch_to_run=SimpleNamespace(reqs=[]) if launched else None)

    def plan(engine: Any, laps: LapsInstance, running_batch: Any) -> Any:
        takes(0.003)
        found = ours._carry_out(engine, laps, Step((1,), None), None, running_batch)
        takes(0.001)
        return found

    monkeypatch.setattr(stock, "get_new_batch_prefill", build)
    monkeypatch.setattr(ours, "_plan_batch", plan)
    laps = LapsInstance(policy(), SingleRankAgreement(), NoMetrics())
    laps.now_s = lambda: now_s
    engine = object.__new__(ours)
    waiting = SimpleNamespace(**vars(request(10)), origin_input_ids=[1] * 10, output_ids=[], host_hit_length=0)
    engine.__dict__ |= {
        "_laps": laps,
        "_parked": [],
        "waiting_queue": [],
        "chunked_prefill_size": 64,
        "chunked_req": None,
        "_waiting": SimpleNamespace(requests=lambda keys: [waiting] if keys else [], take=lambda *_: None),
        "page_size": 1,
        "enable_hicache_storage": False,
    }
    for _ in range(2):
        ours.get_new_batch_prefill(engine, SimpleNamespace(batch_is_full=True))
    # A round in which nothing leaves delays no iteration.
    assert laps.decisions.batches == 2 * launched
    assert laps.decisions.seconds == pytest.approx(0.008 * launched)


def test_parked_prefills_give_their_memory_back_before_replies_are_retracted(
    schedulers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefills that have computed least begin again, as many as it takes."""
    from sglang_ext.laps.sglang import scheduler

    ours, stock = schedulers
    happened: list[Any] = []
    monkeypatch.setattr(scheduler, "release_kv_cache", lambda request, *_, **__: happened.append(request.prefix_len))
    monkeypatch.setattr(stock, "update_running_batch", lambda self, batch: batch)
    engine: Any = object.__new__(ours)
    engine._laps = engine.tree_cache = None
    engine._parked = [request(3000, computed) for computed in (900, 100, 500)]
    for parked in engine._parked:
        parked.reset_for_retract = lambda: happened.append("reset")
    engine._add_request_to_queue = lambda request, is_retracted: happened.append(is_retracted)
    batch = SimpleNamespace(check_decode_mem=lambda: len(engine._parked) < 2)
    assert engine.update_running_batch(batch) is batch
    assert happened == [100, "reset", True, 500, "reset", True]
    assert [parked.prefix_len for parked in engine._parked] == [900]


def test_a_decode_step_follows_every_prefill_of_an_undivided_instance(schedulers: tuple[Any, Any]) -> None:
    ours, _ = schedulers
    idle: list[bool] = []
    engine: Any = object.__new__(ours)
    engine.chunked_req, engine._must_decode = None, True
    engine._laps = SimpleNamespace(clock=SimpleNamespace(record_idle=lambda: idle.append(True)))
    running = SimpleNamespace(is_empty=lambda: False, is_prefill_only=False)
    plan = engine.get_new_batch_prefill(running)
    assert (plan.batch_to_run, plan.running_batch) == (None, running)
    assert idle == [True]
    assert not engine._must_decode


@pytest.mark.parametrize("is_later_stage", [False, True])
def test_started_prefills_end_when_their_transfer_has_failed(
    schedulers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, is_later_stage: bool
) -> None:
    """A later stage of a pipeline does as the first one, whatever it sees itself."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    from sglang_ext.laps.sglang import scheduler

    monkeypatch.setattr(
        scheduler, "poll_and_all_reduce_attn_cp_tp_group", lambda senders, *_: [int(one.poll()) for one in senders]
    )
    ended: list[str] = []
    states = (KVPoll.Transferring, KVPoll.Failed, KVPoll.WaitingForInput, KVPoll.Failed, KVPoll.Bootstrapping)
    engine = SimpleNamespace(
        _parked=[started(str(number), state) for number, state in enumerate(states)],
        attn_cp_cpu_group=None,
        attn_tp_cpu_group=None,
        _unpark=lambda request: engine._parked.remove(request),
        handle_bootstrap_failure=lambda request: ended.append(request.rid),
    )
    engine._failed_parked = lambda: schedulers[0]._failed_parked(engine)
    agreement = SimpleNamespace(agree_keys=lambda find: [102] if is_later_stage else find())
    schedulers[0]._end_failed(engine, SimpleNamespace(agreement=agreement))
    assert ended == (["2"] if is_later_stage else ["1", "3"])
    assert [request.rid for request in engine._parked] == [str(n) for n in range(5) if str(n) not in ended]


def test_a_short_batch_runs_without_those_that_have_lost_their_prefix(
    schedulers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_ext.laps.sglang.queued_request import LapsEntry, entry_of, remember

    matched = []

    def match(request: Any, found: dict[str, int]) -> None:
        matched.append(request.rid)
        request.prefix_len = found[request.rid]

    monkeypatch.setattr("sglang.srt.mem_cache.common.match_kv_cache", match)

    def waiting(rid: str, prefix: int) -> Any:
        request = SimpleNamespace(
            rid=rid,
            origin_input_ids=[0] * 1000,
            output_ids=[],
            prefix_len=prefix,
            host_hit_length=0,
            sampling_params=SimpleNamespace(custom_params=None),
        )
        remember(request, LapsEntry(1, LengthClass.SHORT, 1000 - prefix, 10.0, 10.4, PriorityClass.NORMAL))
        return request

    same, evicted, uncached = waiting("same", 900), waiting("evicted", 900), waiting("uncached", 0)
    put = []
    laps = SimpleNamespace(
        policy=policy(boundary_tokens=256), now_s=lambda: 11.0, put=lambda request, *_: put.append(request.rid)
    )
    engine = SimpleNamespace(tree_cache={"same": 900, "evicted": 0})
    assert schedulers[0]._without_evicted(engine, laps, [same, evicted, uncached]) == [same, uncached]
    assert matched == ["same", "evicted"]
    assert put == ["evicted"]
    entry = entry_of(evicted)
    assert entry is not None
    assert entry.length_class is LengthClass.LONG
    assert entry.deadline_s == laps.policy.deadline_s(LengthClass.LONG, 1000, 0, 10.0, None)


class Waiting(SimpleNamespace):
    """A request in a queue: equal to itself alone, as SGLang's."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_tokens_are_pending_while_sglang_builds_a_batch_without_them(
    schedulers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang writes what is pending into its log from within the construction of a batch."""
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    from sglang_ext.laps.sglang.instance import LapsInstance
    from sglang_ext.laps.sglang.metrics import NoMetrics
    from sglang_ext.laps.sglang.rank_agreement import SingleRankAgreement
    from sglang_ext.laps.sglang.waiting_requests import WaitingRequests

    ours, stock = schedulers
    engine = ours.__new__(ours)

    def waiting(tokens: int) -> Any:
        return Waiting(
            rid=str(tokens),
            seqlen=tokens,
            origin_input_ids=[0] * tokens,
            output_ids=[],
            prefix_len=0,
            host_hit_length=0,
            num_matched_prefix_tokens=0,
            sampling_params=SimpleNamespace(custom_params=None),
            time_stats=SimpleNamespace(prefill_bootstrap_queue_entry_time=0.0),
        )

    engine.waiting_queue = [waiting(100), waiting(5000), waiting(4000)]
    engine.chunked_req, engine.page_size, engine.chunked_prefill_size = None, 1, 512
    engine.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
    engine.is_hybrid_swa = False
    engine.tree_cache = SimpleNamespace(evictable_size=lambda: 0)
    engine.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: 1 << 20)
    engine._parked, engine._held, engine._aborted_while_parked, engine._next_key = [], [], [], 0
    engine._waiting, engine._uncounted, engine._started_tokens = WaitingRequests(), [], None
    engine._loading, engine.enable_hicache_storage = {}, False
    engine._laps = LapsInstance(policy(boundary_tokens=256), SingleRankAgreement(), NoMetrics())
    monkeypatch.setattr("sglang.srt.mem_cache.common.match_kv_cache", lambda *_: None)
    built: list[tuple[int, int]] = []

    def build(scheduler: Any, running_batch: Any) -> Any:
        inquirer = ours_over(stock_inquirer_of(scheduler), scheduler)
        built.append((len(scheduler.waiting_queue), inquirer._get_num_pending_tokens()))
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)

    monkeypatch.setattr(stock, "get_new_batch_prefill", build)
    engine.get_new_batch_prefill(SimpleNamespace(batch_is_full=False))
    assert built
    assert all(members < 3 for members, _ in built)
    assert {tokens for _, tokens in built} == {9100}
    assert sorted(one.seqlen for one in engine.waiting_queue) == [100, 4000, 5000]


def stock_inquirer_of(scheduler: Any) -> Any:
    from dataclasses import replace

    return replace(stock_inquirer([], chunked=None), get_waiting_queue=lambda: scheduler.waiting_queue)


def ours_over(stock: Any, scheduler: Any) -> Any:
    return over(stock, scheduler._parked, scheduler._held_back())


def test_the_clock_sees_rounds_and_what_ran_on_a_graph(
    schedulers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_ext.graphs.sglang.runner import Replay
    from sglang_ext.laps.sglang import scheduler
    from sglang_ext.laps.sglang.instance import DecisionTimes, IterationClock

    ours, stock = schedulers
    replay: list[Replay | None] = [None]
    times_s, learned = iter(range(100)), []
    monkeypatch.setattr(scheduler, "replay_of", lambda runner, tokens, result: replay[0])
    monkeypatch.setattr(stock, "run_batch", lambda *_: "result")
    monkeypatch.setattr(stock, "process_batch_result", lambda *_: None)
    plans = iter([None, "batch", "batch", None, "batch"])
    monkeypatch.setattr(ours, "_plan_batch", lambda *_: SimpleNamespace(batch_to_run=next(plans)))
    engine = ours.__new__(ours)
    engine.tp_worker = SimpleNamespace(model_runner=None)
    engine._laps = SimpleNamespace(
        clock=IterationClock(),
        stage=None,
        work=WorkLog(),
        decisions=DecisionTimes(),
        now_s=lambda: float(next(times_s)),
        policy=SimpleNamespace(record_iteration=learned.append),
        has_tree_grown=False,
    )
    extend = SimpleNamespace(is_extend=lambda: True)
    batch = SimpleNamespace(forward_mode=extend, reqs=[], extend_lens=[10, 20], prefix_lens=[0, 5])
    one = SimpleNamespace(inflight_middle_chunks=1, sampling_params=SimpleNamespace(custom_params=None), rid="r")
    batch.reqs = [one, one]
    for is_replayed in (None, True, False, None, True):
        replay[0] = Replay(64, "32x2") if is_replayed else None
        if engine.get_new_batch_prefill(None).batch_to_run is not None:  # two readings of the time, or one
            assert engine.run_batch(batch) == "result"  # a third
            engine.process_batch_result(batch, "result")  # and a fourth
    assert [(one.is_first, one.duration_s) for one in learned] == [(True, 3.0), (False, 4.0), (True, 3.0)]
    assert engine._laps.decisions == DecisionTimes(3, 3.0)
    assert [(one.new_tokens, one.is_replayed) for one in learned] == [(64, True), (30, False), (64, True)]
    assert {one.attention_work for one in learned} == {10.0 * 10 + 20 * 30}
    told = engine._laps.work.answer(100.0, (), 0, 64)["records"]
    assert [record[4] for record in told] == ["r and 1 more, graph 32x2", "r and 1 more", "r and 1 more, graph 32x2"]
    assert [record[2] - record[1] for record in told] == [one.duration_s for one in learned]
    assert {(record[5], record[6]) for record in told} == {(30, 2)}, "tokens without the padding of a graph"


@pytest.mark.parametrize(
    ("of_all_layers", "of_windows", "free_tokens"),
    [((100, 900), (300, 100), 1000), ((100, 900), (100, 60), 160), ((50, 20), (100, 60), 70)],
)
def test_a_pool_of_windows_counts_where_a_batch_does_not_fit(
    schedulers: tuple[Any, Any], of_all_layers: tuple[int, int], of_windows: tuple[int, int], free_tokens: int
) -> None:
    """Free and evictable tokens of each pool. A batch of 128 tokens needs the window of 64 before it, too."""
    ours, _ = schedulers
    engine = ours.__new__(ours)
    engine.is_hybrid_swa, engine.max_prefill_tokens, engine.sliding_window_size = True, 128, 64
    engine.token_to_kv_pool_allocator = SimpleNamespace(
        full_available_size=lambda: of_all_layers[0], swa_available_size=lambda: of_windows[0]
    )
    engine.tree_cache = SimpleNamespace(
        full_evictable_size=lambda: of_all_layers[1], swa_evictable_size=lambda: of_windows[1]
    )
    assert engine._free_tokens() == free_tokens


@pytest.mark.slow
def test_a_prefill_whose_prefix_is_on_its_way_from_storage_is_set_aside(
    schedulers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_ext.laps.sglang.instance import LapsInstance
    from sglang_ext.laps.sglang.metrics import NoMetrics
    from sglang_ext.laps.sglang.queued_request import LapsEntry, remember
    from sglang_ext.laps.sglang.rank_agreement import SingleRankAgreement

    ours, _ = schedulers
    matched: list[Any] = []
    monkeypatch.setattr("sglang_ext.laps.sglang.scheduler.match_prefix", lambda request, _: matched.append(request))
    laps = LapsInstance(policy(), SingleRankAgreement(), NoMetrics())
    requests = {}
    for key in (1, 2):
        waiting = SimpleNamespace(prefix_len=0, origin_input_ids=[1] * 900, output_ids=[], host_hit_length=0)
        waiting.cache_request_handle = key
        entry = LapsEntry(key, LengthClass.LONG, 900, 0.0, 100.0, PriorityClass.NORMAL)
        remember(waiting, entry)
        laps.put(waiting, entry, 0.0)
        requests[key] = waiting
    loading = {1}
    engine = object.__new__(ours)
    engine.__dict__ |= {
        "_loading": {},
        "_waiting": requests,
        "tree_cache": SimpleNamespace(
            has_ongoing_prefetch=loading.__contains__,
            check_prefetch_progress=lambda handle: handle not in loading,
        ),
    }
    engine._set_loading_aside(laps, list(requests.values()))
    engine._take_loaded(laps, 1.0)
    assert (1 in laps.policy.queue, 2 in laps.policy.queue) == (False, True)
    loading.clear()
    engine._take_loaded(laps, 2.0)
    assert 1 in laps.policy.queue
    assert matched == [requests[1]]
    # A request that goes meanwhile is forgotten.
    loading.add(2)
    engine._set_loading_aside(laps, [requests.pop(2)])
    engine._take_loaded(laps, 3.0)
    assert 2 not in laps.policy.queue
    assert not engine._loading

"""The pool protocol without I/O: numbers, refusals, ids of a chunk's tokens, timeouts, stuck steps, hung members."""

from __future__ import annotations

import json
from array import array

import pytest

from sglang_ext.identifiers import pool_request
from sglang_ext.long_pool.coordinator import coordinator_server
from sglang_ext.long_pool.coordinator.coordinator_server import StatusEncoder
from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts, prior_candidates
from sglang_ext.long_pool.coordinator.pool_history import (
    FormerMember,
    PoolHistory,
    PoolStatus,
    PrefillEnd,
    PrefillRecord,
    PrefillTimes,
)
from sglang_ext.long_pool.coordinator.pool_protocol import NewMember, PoolProtocol, PoolProtocolError
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.decide.orders import Drop, GiveUp, MeasuredCost, MemberReport, RollBack, RunChunk
from sglang_ext.long_pool.decide.sharding import Interleaving, lay_out
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.long_pool.link_frames import PeerAddress
from sglang_ext.long_pool.messages import (
    PROTOCOL_VERSION,
    AddressedMessage,
    Alive,
    CancelMessage,
    ChunkOrder,
    CollectOrder,
    DeclineMessage,
    Heartbeat,
    Hello,
    Message,
    OfferMessage,
    Refusal,
    ReportMessage,
    StepDone,
    StepFailed,
    Transferred,
    Welcome,
)
from sglang_ext.long_pool.step_clock import StepTimes
from sglang_ext_router.instances.long_pool import MAX_STATUS_BYTES, cached_rooms, pool_prompts

SETTINGS = PoolSettings(min_chunk_tokens=16, step_timeout_s=2.0, member_timeout_s=1.0)
TIMES = StepTimes(1.0, 0.2, 0.1)
IDS = array("i", range(1000, 1400))


def hello(name: str = "a", **changes: object) -> Hello:
    one = Hello(PROTOCOL_VERSION, name, "node", "model", 3, 1, MemberReport(0.0, 100_000))
    return one._replace(**changes)  # type: ignore[arg-type]


class Pool:
    """A pool protocol and its clock."""

    def __init__(self, *names: str, settings: PoolSettings = SETTINGS) -> None:
        costs = PoolCosts([SpCandidate(size, SpCost(0.05 * (size - 1), 0.01 / size, 0.0, 0.0)) for size in (1, 2)])
        self.protocol = PoolProtocol(settings, costs)
        self.now_s = 100.0
        for name in names:
            self.join(hello(name))

    def join(self, one: Hello) -> list[AddressedMessage]:
        answer = self.protocol.greet(one)
        assert isinstance(answer, NewMember)
        return self.protocol.join(answer.instance, one, self.now_s)

    def say(self, instance: int, message: Message) -> list[AddressedMessage]:
        return self.protocol.take(instance, message, self.now_s)

    def wait(self, seconds: float) -> list[AddressedMessage]:
        """Time passes, and everybody says so."""
        self.now_s += seconds
        for instance in self.protocol.members:
            self.protocol.take(instance, ReportMessage(MemberReport(0.0, 100_000)), self.now_s)
        return self.protocol.tick(self.now_s)

    def offer(self, request: int = 1, owner: int = 0) -> list[AddressedMessage]:
        return self.say(owner, OfferMessage(pool_request(owner, request), IDS, 0, 0.0, None))


def of_kind(out: list[AddressedMessage], kind: type) -> list[AddressedMessage]:
    return [one for one in out if isinstance(one.message, kind)]


def test_a_prompt_from_offer_to_end() -> None:
    pool = Pool("a", "b")
    chunks = pool.offer()
    assert [one.instance for one in chunks] == [0, 1]
    seen: list[int] = []
    for place, (_, order) in enumerate(chunks):
        assert isinstance(order, ChunkOrder)
        positions = [p for part in order.chunk.layout.new[place] for p in part]
        assert order.token_ids == array("i", (IDS[p] for p in positions))
        seen += positions
        sequence = order.chunk.sequence
    assert sorted(seen) == list(range(400))
    assert pool.say(0, StepDone(sequence, TIMES, 1000)) == []
    collects = pool.say(1, StepDone(sequence, TIMES, 1000))
    assert [type(one.message) for one in collects] == [CollectOrder, CollectOrder]
    pool.say(1, StepDone(sequence + 1, TIMES, 1000))
    assert [type(one.message) for one in pool.say(0, StepDone(sequence + 1, TIMES, 1000))] == [Drop, Drop]
    (record,) = pool.protocol.take_events().ended
    assert record.outcome is PrefillEnd.COLLECTED
    assert [chunk.new_tokens for chunk in record.chunks] == [400]
    assert pool.protocol.status(pool.now_s).requests_collected == 1


def test_the_rest_of_a_chunk_that_is_cut_is_shown_as_planned() -> None:
    pool = Pool("a", "b", settings=SETTINGS._replace(max_chunk_s=1.0))
    pool.offer(1, owner=0)
    status = json.loads(StatusEncoder().encode(pool.protocol.status(pool.now_s)))
    (one,) = status["requests"]
    (step,), (chunk,) = one["steps"], one["planned"]
    assert 0 < step["new_tokens"] < 400
    assert chunk == {"new_tokens": 400 - step["new_tokens"], "members": step["members"]}
    (row,) = pool_prompts(status, 0.0)
    assert row.planned == [(chunk["new_tokens"], ["a", "b"])]
    for sequence in range(1, 20):  # chunks, and what is collected in the end
        for instance in (0, 1):
            pool.say(instance, StepDone(sequence, TIMES, 1000))
    (record,) = pool.protocol.status(pool.now_s).recent
    assert (record.planned, sum(chunk.new_tokens for chunk in record.chunks)) == ((), 400)


def test_where_the_time_of_a_prompt_went() -> None:
    pool = Pool("a", "b")
    pool.now_s += 2.0
    pool.offer()
    pool.now_s += 1.5
    pool.say(0, StepDone(1, StepTimes(1.25, 0.25, 0.0), 1000))
    pool.say(1, StepDone(1, StepTimes(1.5, 0.25, 0.75), 1000))
    assert pool.protocol.status(pool.now_s).requests[0].times.collect_s == 0.0, "it has begun and not ended"
    pool.now_s += 0.5
    pool.say(1, StepDone(2, TIMES, 1000))
    pool.say(0, StepDone(2, TIMES, 1000))
    (record,) = pool.protocol.status(pool.now_s).recent
    assert record.times == PrefillTimes(
        wait_s=0.0, compute_s=0.75, ring_s=0.25, rebalance_s=0.375, collect_s=0.5, failed_s=0.0
    )
    assert pool.say(0, Transferred(record.request, 3.5, 0.25)) == []
    times = pool.protocol.status(pool.now_s).recent[-1].times
    assert (times.transfer_s, times.exposed_transfer_s) == (3.5, 0.25)
    history = pool.protocol.history
    assert (history.transfers, history.transfer_s) == (1, {"hidden": 3.25, "exposed": 0.25})
    with pytest.raises(PoolProtocolError, match="does not belong to instance 1"):
        pool.say(1, Transferred(record.request, 3.5, 0.25))
    assert pool.say(0, Transferred(record.request + 5, 3.5, 0.25)) == [], "forgotten long ago"
    assert history.member_s == {"compute": 1.5, "ring": 0.5, "rebalance": 0.75}
    assert (history.collect_s, history.first_waits, history.first_wait_s) == (0.5, 1, 0.0)


def test_a_prompt_that_waits_and_a_step_that_fails() -> None:
    pool = Pool("a", "b")
    pool.offer(1, owner=0)
    pool.offer(2, owner=1)
    pool.now_s += 3.0
    assert [one.times.wait_s for one in pool.protocol.status(pool.now_s).requests] == [0.0, None]
    pool.say(0, StepDone(1, TIMES, 1000))
    pool.say(1, StepFailed(1, "the KV pool is full"))
    first = pool.protocol.status(pool.now_s).requests[0]
    assert (first.times.failed_s, first.times.compute_s) == (3.0, 0.0)


def busy_history(prompts: int, members: int) -> PoolHistory:
    """Prompts that were streamed in two chunks."""
    history, group = PoolHistory(), tuple(range(members))
    layout, _ = lay_out({}, (range(5000),), group, Interleaving.ZIGZAG)
    for request in range(prompts):
        history.running[request] = PrefillRecord(request, 0, 10_000, 0, 100.0, room=2**62 + request)
        now_s = 100.0
        for sequence in (1, 2):
            step, now_s = history.record_order(RunChunk(sequence, request, layout, 0), now_s), now_s + 0.05
            for instance in step.members:
                step.record_times(instance, StepTimes(0.05, 0.01, 0.01), now_s)
            step.ended_s = now_s
            history.record_step_end(step)
        history.note_end(request, PrefillEnd.STREAMED, now_s)
    return history


def status_of(history: PoolHistory, requests: tuple[PrefillRecord, ...] = ()) -> PoolStatus:
    return PoolStatus(200.0, "model", (), requests, tuple(history.ended), 0, 0, 0, 0, 1.0, 0.0, ())


def test_a_status_is_of_bounded_size_and_what_has_ended_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    history, encoder = busy_history(100, 8), StatusEncoder()
    whole = encoder.encode(status_of(history))
    assert len(whole) < 2**20
    encoded = []
    monkeypatch.setattr(coordinator_server, "_encode", lambda record: encoded.append(record) or b"{}")
    assert encoder.encode(status_of(history)) == whole
    assert not encoded
    history.record_transferred(97, 3.0, 0.5)
    assert encoder.encode(status_of(history)) != whole
    assert [one.request for one in encoded] == [97]


def test_a_router_gets_the_latest_prompts_as_far_as_they_fit_and_all_rooms() -> None:
    history = busy_history(100, 8)
    answer = json.loads(StatusEncoder().encode(status_of(history), 50))
    assert [one["request"] for one in answer["recent"]] == list(range(50, 100))
    assert [one["room"] for one in answer["ended_rooms"]] == [2**62 + number for number in range(100)]
    assert dict(cached_rooms(answer)) == {2**62 + number: False for number in range(100)}
    for record in history.ended:
        record.steps = record.steps[:1] * 1000
    body = StatusEncoder().encode(status_of(history, tuple(history.ended)[:5]), 50)
    assert len(body) < MAX_STATUS_BYTES / 2
    answer = json.loads(body)
    assert 1 < len(answer["recent"]) < 50
    assert answer["recent"][-1]["request"] == 99
    assert {(len(one["steps"]), one["steps_left_out"]) for one in answer["recent"]} == {(100, 900)}
    assert len(answer["requests"]) == 5


def test_who_has_gone_is_still_known_by_name() -> None:
    pool = Pool("a", "b")
    pool.protocol.lose(1, "was killed", 7.0)
    assert pool.protocol.status(8.0).former_members == (FormerMember(1, "b", 7.0, "was killed"),)


@pytest.mark.parametrize("change", [{"model": "other"}, {"layers": 4}, {"page_tokens": 16}])
def test_others_are_refused_while_there_is_a_member(change: dict[str, object]) -> None:
    pool = Pool("a")
    refusal = pool.protocol.greet(hello("b", **change))
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith("the pool serves model (3 layers, pages of 1), b serves ")
    # Who comes again has gone, so it may be another one by now.
    assert isinstance(pool.protocol.greet(hello("a", **change)), NewMember)
    pool.protocol.lose(0, "test", pool.now_s)
    assert isinstance(pool.protocol.greet(hello("b", **change)), NewMember)


def test_a_prompt_that_waits_for_short_ones_goes_on_with_the_report_that_they_are_computed() -> None:
    busy = MemberReport(0.6, 100_000, short_per_s=1.0, short_slo_s=1.0, short_work_s=0.3, short_backlog_s=0.6)
    calm = busy._replace(backlog_s=0.0, short_backlog_s=0.0)
    pool = Pool("a", "b", settings=SETTINGS._replace(ttft_slo_s=60.0))
    for instance in (0, 1):
        pool.say(instance, ReportMessage(calm))
    (first, _) = (one.message for one in pool.offer())
    assert isinstance(first, ChunkOrder)
    for instance in (0, 1):  # short ones have come during the chunk
        assert pool.say(instance, ReportMessage(busy)) == []
    for instance in (0, 1):
        assert pool.say(instance, StepDone(first.chunk.sequence, TIMES, 1000)) == []
    assert pool.say(0, ReportMessage(calm)) == []
    chunks = pool.say(1, ReportMessage(calm))
    assert [type(one.message) for one in chunks] == [ChunkOrder, ChunkOrder]


def test_an_instance_that_joins_again_is_another_member() -> None:
    pool = Pool("a", "b")
    pool.offer(owner=1)
    pool.join(hello("a"))
    assert pool.protocol.members == (1, 2)
    (lost,) = pool.protocol.take_events().lost
    assert lost == (0, "has come again")


def test_a_member_without_messages_is_lost_and_a_beat_is_a_message() -> None:
    pool = Pool("a", "b")
    for _ in range(20):
        pool.now_s += 0.1
        pool.say(0, ReportMessage(MemberReport(0.5, 7)))
        pool.protocol.tick(pool.now_s)
    assert pool.protocol.members == (0,)
    (lost,) = pool.protocol.take_events().lost
    assert lost == (1, "has sent nothing for 1 s")
    (status,) = pool.protocol.status(pool.now_s).members
    assert (status.backlog_s, status.free_kv_tokens) == (0.5, 7)


def test_members_hear_that_the_coordinator_is_there() -> None:
    pool = Pool("a", "b")
    beats = sum(len(of_kind(pool.wait(0.1), Heartbeat)) for _ in range(30))
    assert 2 * 3 / 0.3 - 2 <= beats <= 2 * 3 / 0.25


def test_who_never_answers_for_a_failed_step_is_lost() -> None:
    pool = Pool("a", "b")
    pool.offer()
    pool.wait(60.0)
    assert pool.protocol.members == (0, 1), "a long step is no failure"
    pool.say(0, StepFailed(1, "the KV pool is full"))
    pool.wait(4.9)
    assert pool.protocol.members == (0, 1)
    pool.wait(0.2)
    assert pool.protocol.members == (0,)


def test_who_is_in_a_step_hears_that_another_one_has_failed() -> None:
    pool = Pool("a", "b")
    pool.offer()
    (told,) = pool.say(1, StepFailed(1, "the KV pool is full"))
    assert told == (0, GiveUp(1, (0,)))


def test_a_member_without_memory_for_its_part_gets_less() -> None:
    pool = Pool("a", "b")
    parts = [len(order.token_ids) for _, order in pool.offer() if isinstance(order, ChunkOrder)]
    assert parts == [200, 200]
    pool.say(0, StepFailed(1, "1 GiB is wanted", is_out_of_memory=True))
    again = [order for _, order in pool.say(1, StepDone(1, TIMES, 1000)) if isinstance(order, ChunkOrder)]
    assert len(again) == 2
    assert all(90 <= len(order.token_ids) <= 100 for order in again)


def test_members_get_each_others_addresses() -> None:
    addresses = [(PeerAddress("here", port), PeerAddress("there", port)) for port in (1, 2)]
    pool = Pool()
    for name, of_ranks in zip("ab", addresses, strict=True):
        pool.join(hello(name, addresses=of_ranks))
    for _, order in pool.offer():
        assert isinstance(order, ChunkOrder)
        assert order.peers == tuple(addresses[instance] for instance in order.chunk.layout.group)


def hang(pool: Pool, instance: int, seconds: float) -> None:
    """Its engine does nothing for so long, and the others go on; its threads do, too."""
    for tenth in range(round(10 * seconds)):
        for other in pool.protocol.members:
            pool.say(other, Alive(tenth / 10 if other == instance else 0.0))
        pool.wait(0.1)


def test_a_hung_member_gets_no_chunks_and_keeps_its_place_as_long_as_it_is_not_needed() -> None:
    pool = Pool("a", "b")
    hang(pool, 1, 4.5)
    assert pool.protocol.members == (0, 1)
    assert [member.is_ready for member in pool.protocol.status(pool.now_s).members] == [True, False]
    assert [type(one.message) for one in pool.offer()] == [ChunkOrder]
    pool = Pool("a", "b")
    hang(pool, 1, 4.5)
    hang(pool, 0, 0.0)
    pool.say(1, Alive(0.0))
    pool.wait(1.0)
    assert [one.instance for one in pool.offer(2)] == [0, 1]


def test_a_member_that_hangs_in_a_step_is_lost() -> None:
    pool = Pool("a", "b")
    pool.offer()
    # A chunk of 400 tokens takes two instances 2.05 s, as is believed; then the member timeout.
    hang(pool, 1, 5.0)
    assert pool.protocol.members == (0, 1)
    hang(pool, 1, 5.3)
    assert pool.protocol.members == (0,)
    (lost,) = pool.protocol.take_events().lost
    assert lost.instance == 1
    assert lost.reason.startswith("hangs: its engine has done nothing for 5.")


def test_a_member_that_hangs_with_others_kv_is_lost() -> None:
    pool = Pool("a", "b")
    pool.offer()
    for instance in (0, 1):
        pool.say(instance, StepDone(1, TIMES, 1000))
    pool.say(0, StepFailed(2, "instance 1: nothing has come", 1))
    pool.say(1, StepFailed(2, "given up"))
    hang(pool, 1, 3.0)
    assert pool.protocol.members == (0,)


def test_a_hung_member_is_lost_in_the_end() -> None:
    pool = Pool("a", "b")
    hang(pool, 1, SETTINGS.stuck_s - 0.2)
    assert pool.protocol.members == (0, 1)
    hang(pool, 1, SETTINGS.stuck_s + 0.3)
    assert pool.protocol.members == (0,)


def test_a_lost_member_in_a_step() -> None:
    pool = Pool("a", "b")
    pool.offer()
    pool.say(0, StepDone(1, TIMES, 1000))
    out = pool.protocol.lose(1, "test", pool.now_s)
    assert RollBack(1, 1, (0,)) in [one.message for one in out]
    assert all(one.instance == 0 for one in out)
    assert [one.reason for one in pool.protocol.take_events().lost] == ["test"]


def test_a_lost_owner_ends_its_requests() -> None:
    pool = Pool("a", "b")
    pool.offer()
    pool.protocol.lose(0, "test", pool.now_s)
    pool.say(1, StepDone(1, TIMES, 1000))
    (record,) = pool.protocol.take_events().ended
    assert record.outcome is PrefillEnd.OWNER_LOST


def test_cancelled_and_declined() -> None:
    pool = Pool("a", "b")
    pool.offer(1)
    pool.say(0, CancelMessage(1))
    pool.say(0, StepDone(1, TIMES, 1000))
    out = pool.say(1, StepDone(1, TIMES, 1000))
    assert Drop(1, (0, 1)) in [one.message for one in out]
    short = pool.say(1, OfferMessage(pool_request(1, 2), IDS[:4], 3, 0.0, None))
    assert len(of_kind(short, DeclineMessage)) == 1
    outcomes = [record.outcome for record in pool.protocol.take_events().ended]
    assert outcomes == [PrefillEnd.CANCELLED, "alone_is_best"]


def test_cancelled_while_it_is_collected() -> None:
    pool = Pool("a", "b")
    pool.offer()
    for instance in (0, 1):
        pool.say(instance, StepDone(1, TIMES, 1000))
    pool.say(0, CancelMessage(1))
    for instance in (0, 1):
        pool.say(instance, StepDone(2, TIMES, 1000))
    (record,) = pool.protocol.take_events().ended
    assert record.outcome is PrefillEnd.CANCELLED
    assert pool.protocol.status(pool.now_s).requests_collected == 0


@pytest.mark.parametrize(
    "message",
    [
        OfferMessage(pool_request(1, 1), IDS, 0, 0.0, None),
        OfferMessage(1, IDS, 400, 0.0, None),
        OfferMessage(1, array("i"), 0, 0.0, None),
        OfferMessage(77, IDS, 0, 0.0, None),
        CancelMessage(pool_request(1, 5)),
        Welcome(1, "ab", 1.0),
        hello(),
    ],
)
def test_what_makes_no_sense_is_its_senders_fault_alone(message: Message) -> None:
    pool = Pool("a", "b")
    pool.say(0, OfferMessage(77, IDS, 0, 0.0, None))
    with pytest.raises(PoolProtocolError):
        pool.say(0, message)
    assert pool.protocol.members == (0, 1)
    assert [one.request for one in pool.protocol.status(pool.now_s).requests] == [77]


def test_strangers_and_late_answers() -> None:
    pool = Pool("a", "b")
    assert pool.say(9, StepDone(1, TIMES, 1000)) == []
    assert pool.say(0, StepDone(1, TIMES, 1000)) == []
    assert pool.protocol.lose(9, "test", pool.now_s) == []


def test_what_members_measure_is_planned_with_in_place_of_a_prior() -> None:
    protocol = PoolProtocol(SETTINGS, PoolCosts(prior_candidates((1, 2)), is_prior=True))
    for number, name in enumerate(("a", "b")):
        assert isinstance(protocol.greet(hello(name)), NewMember)
        protocol.join(number, hello(name), 1.0)
    slow = MemberReport(0.0, 100_000, cost=MeasuredCost(0.5, 1e-3, 0.0))
    for number in (0, 1):
        protocol.take(number, ReportMessage(slow), 2.0)
    assert protocol._costs.candidates[0].cost.predict_s(0, 1000) == pytest.approx(1.5)
    core = protocol._pool
    assert core is not None
    planned_with = core.coordinator._schedule.planner.options.candidates
    assert planned_with[0].cost.predict_s(0, 1000) == pytest.approx(1.5)


def test_costs_follow_what_chunks_take() -> None:
    """The member that began last has waited for no one."""
    pool = Pool("a", "b")
    for request in range(1, 4):
        (first, _) = pool.offer(request)
        assert isinstance(first.message, ChunkOrder)
        sequence = first.message.chunk.sequence
        pool.wait(6.0)
        for instance, total_s in ((0, 4.0), (1, 6.0)):
            pool.say(instance, StepDone(sequence, StepTimes(total_s, 0.2, 0.1), 1000))
        for instance in (1, 0):
            pool.say(instance, StepDone(sequence + 1, TIMES, 1000))
    assert pool.protocol.status(pool.now_s).cost_scale == pytest.approx(4.0 / 2.05)

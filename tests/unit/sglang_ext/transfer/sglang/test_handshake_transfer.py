"""SGLang's sender and receiver over real endpoints: what the schedulers poll, and where the KV ends up.

One prefill rank with three heads, two decode ranks that hold them as two and one (and one of padding).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.shards import HeadLayout, KVShard, TokenSpan
from sglang_ext.transfer.endpoint.handshake_endpoint import HandshakeEndpoint
from sglang_ext.transfer.endpoint.invitations import DecodeRank
from sglang_ext.transfer.endpoint.outgoing_transfer import PartRows, SourceChunk
from sglang_ext.transfer.sglang.layout import cpu_head_layout
from sglang_ext.transfer.transports.registry import create_transport
from support.handshake_process import Pool, PoolShape, wait_until

pytestmark = pytest.mark.usefixtures("sglang_imported")


def refused_rooms_class() -> type[Any]:
    from sglang_ext.transfer.sglang.manager import RefusedRooms  # needs SGLang

    return RefusedRooms


KV_HEADS, LAYERS, PAGE = 3, 3, 4
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)  # SGLang's KVPoll
# A lease that outlasts what keeps this process, all ranks of which are threads, from running.
OPTIONS = HandshakeOptions(retry_s=0.05, heartbeat_s=0.1, lease_s=5.0)
ROOM = 77


class Rank:
    """One rank's manager without the parallel state that SGLang's constructor asks for."""

    def __init__(self, stack: ExitStack, rank: int, tp_size: int, seed: int) -> None:
        from sglang_ext.transfer.sglang.manager import HandshakeKVManager

        heads = cpu_head_layout(KV_HEADS, tp_size)
        shape = PoolShape(heads=heads.heads_per_rank, first_head=heads.first_head(rank), layers=LAYERS)
        self.pool = Pool(shape, seed)
        self.endpoint = HandshakeEndpoint(
            "127.0.0.1",
            create_transport("tcp", "127.0.0.1"),
            self.pool.layout,
            OPTIONS,
            decode_rank=DecodeRank(rank, heads),
        )
        stack.callback(self.endpoint.close)
        self.manager: Any = object.__new__(HandshakeKVManager)
        host, port = self.endpoint.address.split(":")
        self.info = {"rank_ip": host, "rank_port": port, "is_dummy": False}
        self.manager.__dict__.update(
            endpoint=self.endpoint,
            refused_rooms=refused_rooms_class()(self.endpoint, keep_s=5.0),
            heads=heads,
            attn_tp_rank=rank,
            pp_rank=0,
            pp_size=1,
            kv_args=SimpleNamespace(page_size=PAGE, kv_data_ptrs=[0] * 2 * LAYERS, num_draft_entries=0),
            request_status={},
            attempts={},
            failure_records={},
            failure_lock=threading.Lock(),
            transfer_infos={},
            req_to_decode_prefix_len={},
            addr_to_rooms_tracker=defaultdict(set),
            prefill_response_tracker={},
            required_prefill_response_num_table={},
            bootstrap_timeout=60.0,
            waiting_timeout=60.0,
            kv_item_lens_sum=1,
            state_item_lens_sum=0,
            is_dummy_cp_rank=False,
            enable_all_cp_ranks_for_transfer=False,
            _staging_outstanding=defaultdict(int),
            _deferred_ack_targets={},
            _deferred_ack_poisoned_rooms=set(),
            _kv_replica_factor=1,
            is_on_cpu=True,
        )

    def sender(self, room: int = ROOM) -> Any:
        from sglang_ext.transfer.sglang.sender import HandshakeKVSender

        return HandshakeKVSender(self.manager, "bootstrap", room)

    def receiver(self, *prefill: Rank, room: int = ROOM) -> Any:
        from sglang_ext.transfer.sglang.receiver import HandshakeKVReceiver

        receiver: Any = HandshakeKVReceiver(self.manager, "bootstrap", room)
        receiver.bootstrap_infos = [rank.info for rank in prefill]
        receiver.target_pp_ranks = [0]
        self.manager.update_status(room, WAITING)  # what `init` does when the bootstrap server has answered
        return receiver


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rank, Rank, Rank]]:
    from sglang.srt.disaggregation.common import conn

    monkeypatch.setattr(conn, "get_parallel", lambda: SimpleNamespace(num_dp_ranks=1))
    with ExitStack() as stack:
        yield Rank(stack, 0, 1, seed=1), Rank(stack, 0, 2, seed=2), Rank(stack, 1, 2, seed=3)


@pytest.mark.parametrize(
    ("kv_heads", "is_latent", "ranks", "is_taken"),
    [(8, False, 2, True), (1, False, 2, False), (8, True, 2, False), (1, False, 1, True)],
)
def test_a_draft_whose_heads_are_spread_otherwise_is_refused(
    kv_heads: int, is_latent: bool, ranks: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_ext.transfer.sglang import manager as module

    kind = module.AttentionArch.MLA if is_latent else module.AttentionArch.MHA
    draft = SimpleNamespace(
        attention_arch=kind, get_total_num_kv_heads=lambda: kv_heads, hf_text_config=SimpleNamespace()
    )
    monkeypatch.setattr(module.ModelConfig, "from_server_args", lambda *_, **__: draft)
    manager: Any = object.__new__(module.HandshakeKVManager)
    paths = SimpleNamespace(speculative_draft_model_path="draft", speculative_draft_model_revision=None)
    manager.__dict__.update(attn_tp_size=ranks, heads=HeadLayout(4, ranks, 4), is_on_cpu=False, server_args=paths)
    if is_taken:
        manager._check_draft()
        return
    with pytest.raises(ValueError, match=r"the draft model's . KV heads are spread over 2 ranks otherwise"):
        manager._check_draft()


def reaches(polled: Any, status: int) -> Callable[[], bool]:
    return lambda: bool(polled.poll() == status)


def rows(rank: Rank, layer: int, slots: list[int], first_head: int, head_count: int) -> Any:
    """Keys of model heads in a rank's pool."""
    first = first_head - rank.pool.layout.first_head
    return rank.pool.buffers[2 * layer][slots, first : first + head_count]


class ForwardStream:
    """A stream of decode's scheduler, and what is known of the work on it."""

    def __init__(self, *, is_idle: bool) -> None:
        self.is_idle = is_idle

    def query(self) -> bool:
        return self.is_idle


@pytest.mark.parametrize(
    ("is_on_cpu", "is_idle", "is_held"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_slots_are_held_while_a_forward_pass_is_under_way(
    ranks: tuple[Rank, Rank, Rank], monkeypatch: pytest.MonkeyPatch, is_on_cpu: bool, is_idle: bool, is_held: bool
) -> None:
    """A request that has finished may be in it once more, and write to slots that this one has got."""
    from sglang_ext.transfer.sglang import late_slots

    recorded: list[Any] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Any) -> None:
            recorded.append(stream)

        def synchronize(self) -> None: ...

    monkeypatch.setattr("torch.cuda.Event", Event)
    prefill, decode, _ = ranks
    decode.manager.is_on_cpu, decode.manager.late_slots_tokens = is_on_cpu, None
    receiver = decode.receiver(prefill)
    stream = ForwardStream(is_idle=is_idle)
    request = SimpleNamespace(kv_receiver=receiver, req=SimpleNamespace(origin_input_ids=[1, 2, 3]))
    queue = SimpleNamespace(scheduler=SimpleNamespace(forward_stream=stream))
    late_slots.announce(lambda *_: None, queue, request, 0)
    held: list[bool] = []
    expect = decode.endpoint.expect
    monkeypatch.setattr(
        decode.endpoint,
        "expect",
        lambda *given, unused: (held.append(unused is not None), expect(*given, unused=unused)),
    )
    receiver.send_metadata(np.array([0]), 1)
    assert held == [is_held]
    assert recorded == [stream] * is_held


@pytest.mark.full
def test_chunks_arrive_in_the_slots_of_both_decode_ranks(ranks: tuple[Rank, Rank, Rank]) -> None:
    prefill, *decode = ranks
    sender = prefill.sender()
    receivers = [rank.receiver(prefill) for rank in decode]
    assert sender.poll() == BOOTSTRAPPING
    receivers[0].send_metadata(np.array([5, 2, 7], np.int32), 3, [], decode_prefix_len=8)
    wait_until(lambda: prefill.endpoint.invitations(ROOM) != ())
    assert sender.poll() == BOOTSTRAPPING  # the other decode rank has not invited
    receivers[1].send_metadata(np.array([1, 9, 4], np.int32), 2, [], decode_prefix_len=8)
    wait_until(reaches(sender, WAITING))
    assert sender.pop_decode_prefix_len() == 8
    padding = decode[1].pool.buffers[0][:, 1].copy()

    sender.init(3, 4)
    sender.send(np.array([10, 3]), num_kv_tokens=8)
    for receiver in (*receivers, sender):
        wait_until(reaches(receiver, TRANSFERRING))
    sender.send(np.array([6]), [], num_kv_tokens=2)
    for receiver in (*receivers, sender):
        wait_until(reaches(receiver, SUCCESS))

    source = [*range(40, 44), *range(12, 16), *range(24, 28)]
    targets = ([*range(20, 24), *range(8, 12), *range(28, 32)], [*range(4, 8), *range(36, 40), *range(16, 20)])
    for layer in range(LAYERS):
        for rank, slots, (first, count) in zip(decode, targets, ((0, 2), (2, 1)), strict=True):
            np.testing.assert_array_equal(
                rows(rank, layer, slots, first, count), rows(prefill, layer, source, first, count)
            )
    np.testing.assert_array_equal(decode[1].pool.buffers[0][:, 1], padding)
    np.testing.assert_array_equal(decode[0].pool.aux[3], prefill.pool.aux[4])
    np.testing.assert_array_equal(decode[1].pool.aux[2], prefill.pool.aux[4])
    metric = sender.get_transfer_metric()
    assert metric.transfer_latency_s is not None
    for ended in (*receivers, sender):
        ended.clear()
    assert prefill.endpoint.invitations(ROOM) == ()
    assert all(rank.endpoint.receive_status(ROOM) is None for rank in decode)
    assert all(not rank.manager.request_status for rank in ranks)


def begun(prefill: Rank, decode: Sequence[Rank]) -> tuple[Any, list[Any]]:
    """A sender that has shaken hands for three pages behind two that decode has cached, and the receivers."""
    sender = prefill.sender()
    receivers = [rank.receiver(prefill) for rank in decode]
    for receiver in receivers:
        receiver.send_metadata(np.array([5, 2, 7], np.int32), 3, [], decode_prefix_len=8)
    wait_until(reaches(sender, WAITING))
    sender.init(3, 4)
    return sender, receivers


class EventOfAnEarlierBatch:
    """The device gets to it when `set` is called."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.waited_for = threading.Event()
        self.set = self._reached.set

    def synchronize(self) -> None:
        self.waited_for.set()
        assert self._reached.wait(10)


def test_a_cached_prefix_is_not_read_before_it_is_written(ranks: tuple[Rank, Rank, Rank]) -> None:
    """SGLang sends it before its batch; under overlap the batch before may still be writing it on the device."""
    prefill, *decode = ranks
    sender, receivers = begun(prefill, decode)
    written = EventOfAnEarlierBatch()
    sender._early_send_wait_event = written
    prefill.pool.buffers[0][40:48] = 0
    sender.send(np.array([10, 11]), num_kv_tokens=8)
    assert sender._early_send_wait_event is None  # it belongs to this chunk alone
    assert written.waited_for.wait(10)
    prefill.pool.buffers[0][40:48] = np.arange(prefill.pool.buffers[0][40:48].size).reshape(
        prefill.pool.buffers[0][40:48].shape
    )
    written.set()
    sender.send(np.array([6]), [], num_kv_tokens=2)
    for polled in (*receivers, sender):
        wait_until(reaches(polled, SUCCESS))
    source, target = [*range(40, 48), *range(24, 28)], [*range(20, 24), *range(8, 12), *range(28, 32)]
    np.testing.assert_array_equal(rows(decode[0], 0, target, 0, 2), rows(prefill, 0, source, 0, 2))


def test_what_left_with_its_batch_is_not_sent_again(ranks: tuple[Rank, Rank, Rank]) -> None:
    """Nor is the rest of the prompt's last page: only metadata are left."""
    prefill, *decode = ranks
    sender, receivers = begun(prefill, decode)
    slots = np.array([*range(40, 44), *range(12, 16), 24, 25], np.uint32)
    for stream in sender.stream(8, slots):
        stream.rest_ready()
        stream.close()
    wait_until(lambda: prefill.endpoint.totals().writes == 2)
    sender.send(np.array([10, 3, 6]), [], num_kv_tokens=10)
    for polled in (*receivers, sender):
        wait_until(reaches(polled, SUCCESS))
    assert prefill.endpoint.totals().writes == 4
    source, target = [*range(40, 44), *range(12, 16), *range(24, 28)], [*range(20, 24), *range(8, 12), *range(28, 32)]
    for layer in range(LAYERS):
        np.testing.assert_array_equal(rows(decode[0], layer, target, 0, 2), rows(prefill, layer, source, 0, 2))


def test_the_first_stage_of_each_rank_is_invited_last(ranks: tuple[Rank, Rank, Rank]) -> None:
    """SGLang names two ranks of three stages as rank 0's stages 2, 1, 0, and rank 1's."""
    receiver = ranks[1].receiver(ranks[0])
    receiver.bootstrap_infos = [{"rank_ip": "127.0.0.1", "rank_port": str(port)} for port in range(6)]
    receiver.target_pp_ranks = [0, 1, 2]
    invited, last = receiver._prefill_endpoints()
    assert invited == [f"127.0.0.1:{port}" for port in range(6)]
    assert last == ["127.0.0.1:2", "127.0.0.1:5"]


def test_chunks_of_a_pipeline_stage_leave_with_their_batch(ranks: tuple[Rank, Rank, Rank]) -> None:
    sender = ranks[0].sender()
    assert not sender.leaves_with_batch
    ranks[0].manager.pp_size = 2
    assert sender.leaves_with_batch


def test_a_later_stage_begins_what_it_has_never_polled(ranks: tuple[Rank, Rank, Rank]) -> None:
    """However long the prompt has waited for its turn."""
    prefill, *decode = ranks
    sender = prefill.sender()
    receivers = [rank.receiver(prefill) for rank in decode]
    prefill.manager.bootstrap_timeout = 0.0
    send_metadata(*receivers)
    wait_until(lambda: len(prefill.endpoint.invitations(ROOM)) == 2)
    sender.init(2, 0)
    assert sender.poll() in (WAITING, TRANSFERRING)
    sender.send(np.array([1, 2]), [], num_kv_tokens=8)
    for polled in (*receivers, sender):
        wait_until(reaches(polled, SUCCESS))


def test_a_prompt_that_decode_has_cached_needs_metadata_only(ranks: tuple[Rank, Rank, Rank]) -> None:
    prefill, *decode = ranks
    sender = prefill.sender()
    receivers = [rank.receiver(prefill) for rank in decode]
    for receiver in receivers:
        receiver.send_metadata(np.array([], np.int32), 1, [], decode_prefix_len=12)
    wait_until(reaches(sender, WAITING))
    assert sender.pop_decode_prefix_len() == 12
    sender.init(0, 0)
    sender.send(np.array([], np.int64), [], num_kv_tokens=0)
    for polled in (*receivers, sender):
        wait_until(reaches(polled, SUCCESS))
    np.testing.assert_array_equal(decode[1].pool.aux[1], prefill.pool.aux[0])


def send_metadata(*receivers: Any) -> None:
    for receiver in receivers:
        receiver.send_metadata(np.array([1, 2], np.int32), 1, [], decode_prefix_len=0)


def failure(ended: Any) -> str:
    from sglang.srt.disaggregation.common.conn import KVTransferError

    with pytest.raises(KVTransferError) as error:
        ended.failure_exception()
    return str(error.value)


def test_pages_that_do_not_match_fail_both_sides(ranks: tuple[Rank, Rank, Rank]) -> None:
    prefill, *decode = ranks
    sender = prefill.sender()
    receivers = [rank.receiver(prefill) for rank in decode]
    send_metadata(*receivers)
    wait_until(reaches(sender, WAITING))
    sender.init(3, 0)
    assert sender.poll() == FAILED
    assert "decode wants 8 tokens, prefill has 3 pages" in failure(sender)
    for receiver in receivers:
        wait_until(reaches(receiver, FAILED))


@pytest.mark.slow
@pytest.mark.parametrize("is_invited_first", [True, False])
def test_an_aborted_prefill_answers_invitations_whenever_they_come(
    ranks: tuple[Rank, Rank, Rank], is_invited_first: bool
) -> None:
    prefill, *decode = ranks
    sender = prefill.sender()
    receivers = [rank.receiver(prefill) for rank in decode]
    if is_invited_first:
        send_metadata(*receivers)
        wait_until(reaches(sender, WAITING))
    sender.abort()
    assert sender.poll() == FAILED
    if not is_invited_first:
        send_metadata(*receivers)
    for receiver in receivers:
        wait_until(reaches(receiver, FAILED))
        assert "aborted on the prefill instance" in failure(receiver)


def test_a_prefill_aborted_in_the_middle_releases_decodes_slots(ranks: tuple[Rank, Rank, Rank]) -> None:
    prefill, *decode = ranks
    sender = prefill.sender()
    receivers = [rank.receiver(prefill) for rank in decode]
    send_metadata(*receivers)
    wait_until(reaches(sender, WAITING))
    sender.init(2, 0)
    sender.send(np.array([3]), num_kv_tokens=4)
    for receiver in receivers:
        wait_until(reaches(receiver, TRANSFERRING))
    sender.abort()
    for rank, receiver in zip(decode, receivers, strict=True):
        wait_until(reaches(receiver, FAILED))
        assert "aborted on the prefill instance" in failure(receiver)
        receiver.ensure_abort_notified(force_arm=True)
        wait_until(lambda rank=rank: rank.manager.is_abort_release_safe(ROOM, 1))  # type: ignore[misc]
        rank.manager.clear_deferred_abort_state(ROOM)
        assert rank.endpoint.receive_status(ROOM) is None
        assert rank.endpoint.totals().unsettled_permits == 0


@pytest.mark.parametrize("has_slots", [True, False])
@pytest.mark.parametrize("is_sender_first", [True, False])
def test_an_aborted_decode_ends_the_prefill_that_waits_for_it(
    ranks: tuple[Rank, Rank, Rank], has_slots: bool, is_sender_first: bool
) -> None:
    prefill, one, two = ranks
    sender = prefill.sender() if is_sender_first else None
    receivers = [rank.receiver(prefill) for rank in (one, two)]
    if has_slots:
        send_metadata(*receivers)
    for receiver in receivers:
        receiver.abort()
        assert receiver.poll() == FAILED
        assert receiver.abort_notified
    assert one.manager.is_abort_release_safe(ROOM, 1)
    sender = sender or prefill.sender()
    wait_until(reaches(sender, FAILED))
    assert "decode has given the request up" in failure(sender)
    assert one.endpoint.totals().receiving == 0


@pytest.mark.slow
def test_one_failed_decode_rank_ends_the_transfer_to_the_other(ranks: tuple[Rank, Rank, Rank]) -> None:
    prefill, one, two = ranks
    sender = prefill.sender()
    receivers = [one.receiver(prefill), two.receiver(prefill)]
    send_metadata(*receivers)
    wait_until(reaches(sender, WAITING))
    sender.init(2, 0)
    sender.send(np.array([3]), num_kv_tokens=4)
    wait_until(reaches(receivers[1], TRANSFERRING))
    receivers[0].abort()
    wait_until(reaches(sender, FAILED))
    failure(sender)  # as the scheduler does
    wait_until(reaches(receivers[1], FAILED))


def test_a_node_that_is_lost_fails_its_requests_and_frees_their_slots(ranks: tuple[Rank, Rank, Rank]) -> None:
    prefill, decode, _ = ranks
    receiver = decode.receiver(prefill)
    send_metadata(receiver)
    decode.manager.fail(ROOM, "the health check has failed")  # what the heartbeat does
    assert receiver.poll() == FAILED
    assert "the health check has failed" in failure(receiver)
    assert decode.manager.is_abort_release_safe(ROOM, 1)


@pytest.mark.full
def test_a_decode_rank_that_vanishes_is_noticed_within_its_lease(ranks: tuple[Rank, Rank, Rank]) -> None:
    prefill, one, two = ranks
    sender = prefill.sender()
    send_metadata(one.receiver(prefill), two.receiver(prefill))
    wait_until(reaches(sender, WAITING))
    one.info.clear()
    one.endpoint._loop.close()  # no farewell
    sender.init(2, 0)
    wait_until(reaches(sender, FAILED))


def shared(ranks: tuple[Rank, Rank, Rank]) -> tuple[Any, list[Any], tuple[Any, ...]]:
    """A request that a long pool may compute, invited by both decode ranks, and where members send to."""
    prefill, *decode = ranks
    prefill.manager.shared_from_tokens = 8
    sender = prefill.sender()
    receivers = [rank.receiver(prefill) for rank in decode]
    for receiver in receivers:
        receiver.send_metadata(np.array([1, 2, 3], np.int32), 1, [], decode_prefix_len=0)
    wait_until(reaches(sender, WAITING))
    sender.init(3, 0)
    assert sender.can_be_shared
    destinations, targets = sender.share(4, np.arange(40, 44))
    assert [target.head_count for target in targets] == [2, 1]
    return sender, receivers, destinations


def check_shared(ranks: tuple[Rank, Rank, Rank], sender: Any, receivers: list[Any]) -> None:
    prefill, *decode = ranks
    wait_until(lambda: {polled.poll() for polled in (*receivers, sender)} == {SUCCESS})
    for rank, (first, count) in zip(decode, ((0, 2), (2, 1)), strict=True):
        for layer in range(LAYERS):
            have = rows(rank, layer, list(range(4, 16)), first, count)
            np.testing.assert_array_equal(have, rows(prefill, layer, list(range(40, 52)), first, count))
    for ended in (*receivers, sender):
        ended.clear()
    for rank in ranks:
        assert rank.manager.attempts == {}
        assert rank.endpoint.receive_status(ROOM) is None
        assert rank.endpoint.totals().unsettled_permits == 0


def test_what_is_being_sent_is_not_shared_any_more(ranks: tuple[Rank, Rank, Rank]) -> None:
    sender, receivers, _ = shared(ranks)
    sender.go_on_alone([range(4)])
    assert not sender.can_be_shared
    sender.send(np.array([10, 11, 12]), [], num_kv_tokens=12)
    check_shared(ranks, sender, receivers)
    short = ranks[0].sender(ROOM + 1)  # below the length from which on requests are shared
    receivers = [rank.receiver(ranks[0], room=ROOM + 1) for rank in ranks[1:]]
    for receiver in receivers:
        receiver.send_metadata(np.array([1], np.int32), 1, [], decode_prefix_len=0)
    wait_until(reaches(short, WAITING))
    short.init(1, 0)
    assert not short.can_be_shared


def test_members_send_a_part_of_a_request(ranks: tuple[Rank, Rank, Rank]) -> None:
    sender, receivers, destinations = shared(ranks)
    with ExitStack() as stack:
        helper = Rank(stack, 0, 1, seed=1)  # what it has computed is the same
        for destination, (first, count) in zip(destinations, ((0, 2), (2, 1)), strict=True):
            handle = helper.endpoint.open_sender(destination.room, destination.receiver, is_helper=True)
            shard = KVShard((TokenSpan(4, 10),), first, count, 0, LAYERS)
            chunk = handle.offer(SourceChunk(shard, np.arange(44, 50, dtype=np.uint32), None))
            handle.part(chunk, PartRows(0, LAYERS, 0, 6, False))
        sender.go_on_alone([range(10)])
        sender.send(np.array([10, 11, 12]), [], num_kv_tokens=12)
        check_shared(ranks, sender, receivers)


@pytest.mark.slow
@pytest.mark.parametrize("is_computed", [True, False])
def test_a_member_that_fails_leaves_the_request_to_its_owner(ranks: tuple[Rank, Rank, Rank], is_computed: bool) -> None:
    sender, receivers, destinations = shared(ranks)
    with ExitStack() as stack:
        helper = Rank(stack, 0, 1, seed=1)
        handle = helper.endpoint.open_sender(ROOM, destinations[0].receiver, is_helper=True)
        handle.offer(
            SourceChunk(KVShard((TokenSpan(4, 10),), 0, 2, 0, LAYERS), np.arange(44, 50, dtype=np.uint32), None)
        )
        if is_computed:
            sender.go_on_alone([range(10)])
            sender.send(np.array([10, 11, 12]), [], num_kv_tokens=12)
        handle.restart("a chunk has failed")
        for _ in range(20):
            assert FAILED not in [polled.poll() for polled in (*receivers, sender)]
            time.sleep(0.01)
    if not is_computed:
        sender.send_anew("a member has failed")
        sender.go_on_alone(())
        sender.send(np.array([10, 11, 12]), [], num_kv_tokens=12)
    else:
        sender.send_anew("the other decode rank misses rows, too")
    check_shared(ranks, sender, receivers)


@pytest.mark.slow
@pytest.mark.parametrize("is_decode", [True, False])
def test_a_request_is_aborted_between_two_attempts(ranks: tuple[Rank, Rank, Rank], is_decode: bool) -> None:
    sender, receivers, _ = shared(ranks)
    sender.send_anew("a member has failed")
    for rank in ranks[1:]:
        wait_until(lambda rank=rank: rank.endpoint.receive_status(ROOM).is_released)  # type: ignore[misc]
    if is_decode:
        for receiver in receivers:
            receiver.abort()
        wait_until(reaches(sender, FAILED))
    else:
        sender.abort()
        for receiver in receivers:
            wait_until(reaches(receiver, FAILED))
            receiver.ensure_abort_notified(force_arm=True)
    for rank in ranks[1:]:
        wait_until(lambda rank=rank: rank.manager.is_abort_release_safe(ROOM, 1))  # type: ignore[misc]
        assert rank.endpoint.totals().receiving == 0


def test_slots_of_a_later_attempt_are_not_free_while_a_sender_writes(
    ranks: tuple[Rank, Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode, _ = ranks
    sender, receivers, _ = shared(ranks)
    may_go_on = threading.Event()

    def held(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (may_go_on.wait(30), method(*arguments))[1]

    sender.send_anew("a member has failed")
    wait_until(lambda: [polled.poll() for polled in (*receivers, sender)] != [] and ROOM in decode.manager.attempts)
    monkeypatch.setattr(prefill.endpoint._transport, "write", held(prefill.endpoint._transport.write))
    monkeypatch.setattr(decode.endpoint._transport, "revoke", held(decode.endpoint._transport.revoke))
    sender.go_on_alone(())
    sender.send(np.array([10, 11, 12]), [], num_kv_tokens=12)
    wait_until(lambda: sender.poll() != FAILED and decode.endpoint.totals().unsettled_permits > 0)
    receivers[0].clear()  # the client has gone
    assert not decode.manager.is_abort_release_safe(ROOM, 1)
    may_go_on.set()
    wait_until(lambda: decode.manager.is_abort_release_safe(ROOM, 1))
    decode.manager.clear_deferred_abort_state(ROOM)
    assert decode.manager.attempts == {}

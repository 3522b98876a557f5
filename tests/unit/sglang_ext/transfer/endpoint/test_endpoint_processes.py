"""Real processes move KV through the handshake: every byte in its place, and nothing elsewhere, whatever dies."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random

import numpy as np
import pytest

from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.protocol import TransferOutcome
from sglang_ext.transfer.decide.shards import HeadLayout, KVShard, TokenSpan, plan_head_moves
from sglang_ext.transfer.endpoint.outgoing_transfer import PartRows
from sglang_ext.transfer.endpoint.transfer_status import Stage
from support.handshake_process import Pool, PoolShape, RankProcess, is_stage, wait_until
from support.mooncake_folder import needs_mooncake
from support.nixl_folder import needs_nixl

OPTIONS = HandshakeOptions(
    receive_backends=2, hold_idle_s=0.2, retry_s=0.05, heartbeat_s=0.1, lease_s=2.0, quarantine_s=1.0
)
SHAPE = PoolShape()
TRANSPORTS = ["tcp", "shared_memory"]
MOONCAKE = pytest.param("mooncake", marks=(pytest.mark.full, needs_mooncake))
FENCING = [*TRANSPORTS, MOONCAKE]
WITH_UNFENCED = [
    *FENCING,
    *(pytest.param(name, marks=(pytest.mark.full, needs_nixl)) for name in ("nixl", "packed_nixl")),
]
Start = Callable[..., RankProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(
            transport: str, shape: PoolShape = SHAPE, seed: int = 0, options: HandshakeOptions = OPTIONS
        ) -> RankProcess:
            return stack.enter_context(RankProcess(transport, shape, seed, options))

        yield begin


def slots_of(tokens: int, page_size: int, shape: PoolShape, random: Random) -> list[int]:
    """Token slots on random pages, as a pool that has been in use for long hands them out."""
    pages = random.sample(range(shape.slot_count // page_size), -(-tokens // page_size))
    return [page * page_size + offset for page in pages for offset in range(page_size)][:tokens]


def zigzag(tokens: int, rank: int, ranks: int) -> tuple[TokenSpan, ...]:
    """The two of 2 × ranks pieces that a rank holds; empty pieces are left out."""
    cuts = [tokens * index // (2 * ranks) for index in range(2 * ranks + 1)]
    spans = [TokenSpan(cuts[index], cuts[index + 1]) for index in (rank, 2 * ranks - 1 - rank)]
    return tuple(span for span in spans if span.token_count)


def positions(shard: KVShard) -> list[int]:
    return [token for span in shard.tokens for token in range(span.start, span.stop, span.step)]


class Sending:
    """One sender of one request to one receiver, whose shard is a single chunk."""

    def __init__(
        self, rank: RankProcess, receiver: str, transfer_id: int, shard: KVShard, slots: list[int], count: int
    ) -> None:
        self.rank, self.receiver, self.transfer_id, self.shard, self.slots = rank, receiver, transfer_id, shard, slots
        self.aux_slot = 3 if shard.has_aux else None
        rank.call("open", transfer_id, receiver, count)
        rank.call("offer", transfer_id, receiver, shard, slots, self.aux_slot, True)

    def layer(self, index: int) -> None:
        part = PartRows(self.shard.first_layer + index, 1, 0, self.shard.token_count, False)
        self.rank.call("part", self.transfer_id, self.receiver, 0, part)

    def rest(self, first_layer: int = 0) -> None:
        for index in range(first_layer, self.shard.layer_count):
            self.layer(index)
        if self.shard.has_aux:
            self.rank.call("part", self.transfer_id, self.receiver, 0, PartRows(0, 0, 0, 0, True))

    def is_at(self, stage: Stage) -> bool:
        return is_stage(self.rank.call("send_status", self.transfer_id, self.receiver), stage)

    def put_into(self, expected: Pool, target: PoolShape, target_slots: dict[int, int], aux_slot: int | None) -> None:
        """What the receiver's pool must look like."""
        source = self.rank.before
        head = slice(self.shard.first_head - target.first_head, None)
        head = slice(head.start, head.start + self.shard.head_count)
        source_head = self.shard.first_head - self.rank.shape.first_head
        for layer in range(self.shard.first_layer, self.shard.first_layer + self.shard.layer_count):
            for which in (0, 1):
                there = expected.buffers[2 * (layer - target.first_layer) + which]
                here = source.buffers[2 * (layer - self.rank.shape.first_layer) + which]
                for token, slot in zip(positions(self.shard), self.slots, strict=True):
                    there[target_slots[token], head] = here[slot, source_head : source_head + self.shard.head_count]
        if aux_slot is not None and self.shard.has_aux:
            expected.aux[aux_slot] = source.aux[3]


def assert_content(rank: RankProcess, expected: Pool) -> None:
    buffers, aux = rank.call("content")
    for have, want in zip(buffers, expected.buffers, strict=True):
        np.testing.assert_array_equal(have, want)
    np.testing.assert_array_equal(aux, expected.aux)


def assert_quiet(decode: RankProcess, backends: int = 2) -> None:
    """Every backend is free and no permit holds."""
    wait_until(lambda: decode.call("totals").unsettled_permits == 0, what="settling")
    totals = decode.call("totals")
    assert (totals.free_backends, totals.receiving, totals.receiving_early) == (backends, 0, 0)


@pytest.mark.full
@pytest.mark.parametrize("transport", WITH_UNFENCED)
@pytest.mark.parametrize("page_size", [1, 16])
def test_three_senders_and_half_the_backends(start: Start, transport: str, page_size: int) -> None:
    random = Random(page_size)
    decode = start(transport, seed=99)
    senders = [start(transport, seed=seed) for seed in (1, 2, 3, 4)]
    expected = Pool(decode.shape, 99)
    sendings, wanted = [], []
    slots = slots_of(64, page_size, decode.shape, random)
    for transfer_id, tokens in enumerate((33, 1, 30)):
        target_slots, slots = slots[:tokens], slots[tokens:]
        whole = KVShard((TokenSpan(0, tokens),), 0, 2, 0, 3)
        decode.call("expect", transfer_id, 0, target_slots, whole, transfer_id)
        wanted.append(transfer_id)
        group = senders if tokens > 1 else senders[:1]
        for rank, sender in enumerate(group):
            spans = zigzag(tokens, rank, len(group))
            shard = whole._replace(tokens=spans, has_aux=rank == 0)
            source_slots = slots_of(shard.token_count, page_size, sender.shape, random)
            sending = Sending(sender, decode.address, transfer_id, shard, source_slots, len(group))
            sending.put_into(expected, decode.shape, dict(enumerate(target_slots)), transfer_id)
            sendings.append(sending)
    for layer in range(3):
        for sending in sendings:
            sending.layer(layer)
    for sending in sendings:
        sending.rest(3)
    for transfer_id in wanted:
        wait_until(
            lambda transfer_id=transfer_id: is_stage(decode.call("receive_status", transfer_id), Stage.COMPLETE),
            what="the transfer",
        )  # type: ignore[misc]
    for sending in sendings:
        wait_until(lambda sending=sending: sending.is_at(Stage.COMPLETE), what="knowing it")  # type: ignore[misc]
    assert_content(decode, expected)
    assert_quiet(decode)
    results = [result for sender in senders for result in sender.call("records")]
    assert sum(result.written_bytes for result in results) == 64 * 3 * 2 * (32 + 16) + 3 * 24
    assert [record.senders for record in decode.call("records")].count(4) == 2


@pytest.mark.full
@pytest.mark.parametrize("transport", WITH_UNFENCED)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 4)])
def test_heads_find_their_ranks(start: Start, transport: str, prefill_tp: int, decode_tp: int) -> None:
    heads = 12
    prefill, decode = HeadLayout(heads, prefill_tp, heads), HeadLayout(heads, decode_tp, heads)

    def shape(layout: HeadLayout, rank: int) -> PoolShape:
        return PoolShape(slot_count=20, layers=2, heads=layout.heads_per_rank, first_head=layout.first_head(rank))

    sources = [start(transport, shape(prefill, rank), rank) for rank in range(prefill_tp)]
    targets = [start(transport, shape(decode, rank), 50 + rank) for rank in range(decode_tp)]
    expected = [Pool(rank.shape, 50 + index) for index, rank in enumerate(targets)]
    target_slots, source_slots = [7, 3, 19, 0, 11], [1, 2, 3, 9, 8]
    for rank, target in enumerate(targets):
        held = decode.heads(rank)
        whole = KVShard((TokenSpan(4, 9),), held.start, len(held), 0, 2)
        target.call("expect", 1, 4, target_slots, whole, None)
    for move in plan_head_moves(prefill, decode):
        shard = KVShard((TokenSpan(4, 9),), move.first_head, move.head_count, 0, 2)
        target = targets[move.decode_rank]
        sending = Sending(sources[move.prefill_rank], target.address, 1, shard, source_slots, 1)
        sending.put_into(
            expected[move.decode_rank], target.shape, dict(zip(range(4, 9), target_slots, strict=True)), None
        )
        sending.rest()
    for target, content in zip(targets, expected, strict=True):
        wait_until(lambda target=target: is_stage(target.call("receive_status", 1), Stage.COMPLETE))  # type: ignore[misc]
        assert_content(target, content)


WHOLE = KVShard((TokenSpan(0, 8),), 0, 2, 0, 3)
HALVES = [WHOLE._replace(tokens=(TokenSpan(first, 8, 2),)) for first in (0, 1)]


def start_pair(start: Start, transport: str) -> tuple[RankProcess, list[Sending]]:
    """A request of two senders, of which each has written its first layer."""
    decode, senders = start(transport, seed=99), [start(transport, seed=seed) for seed in (1, 2)]
    decode.call("expect", 1, 0, list(range(8)), WHOLE, None)
    sendings = [
        Sending(sender, decode.address, 1, half, [5, 4, 3, 2], 2) for sender, half in zip(senders, HALVES, strict=True)
    ]
    for sending in sendings:
        wait_until(lambda sending=sending: sending.is_at(Stage.TRANSFERRING))  # type: ignore[misc]
        sending.layer(0)
        wait_until(lambda sending=sending: sending.rank.call("totals").writes == 1)  # type: ignore[misc]
    return decode, sendings


def assert_next_request_is_fine(decode: RankProcess, sender: RankProcess, transfer_id: int = 2) -> None:
    """The slots of a failed request serve the next one."""
    buffers, aux = decode.call("content")
    expected = Pool(decode.shape, 0)
    expected.buffers, expected.aux = [buffer.copy() for buffer in buffers], aux.copy()
    decode.call("expect", transfer_id, 0, list(range(8)), WHOLE, None)
    sending = Sending(sender, decode.address, transfer_id, WHOLE, list(range(20, 28)), 1)
    sending.put_into(expected, decode.shape, {token: token for token in range(8)}, None)
    sending.rest()
    wait_until(lambda: is_stage(decode.call("receive_status", transfer_id), Stage.COMPLETE), what="the next request")
    assert_content(decode, expected)
    assert_quiet(decode)


@pytest.mark.slow
@pytest.mark.parametrize("transport", FENCING)
def test_killed_sender(start: Start, transport: str) -> None:
    decode, (victim, other) = start_pair(start, transport)
    victim.rank.kill()
    other.rest(1)
    wait_until(lambda: is_stage(decode.call("receive_status", 1), Stage.FAILED), what="noticing the loss")
    status = decode.call("receive_status", 1)
    assert status.outcome is TransferOutcome.PEER_LOST
    assert "silent" in status.reason
    wait_until(lambda: decode.call("receive_status", 1).is_released)
    assert_next_request_is_fine(decode, other.rank)


@pytest.mark.full
@pytest.mark.parametrize("transport", FENCING)
def test_stopped_sender_cannot_write_into_slots_of_the_next_request(start: Start, transport: str) -> None:
    decode, (victim, other) = start_pair(start, transport)
    victim.rank.signal(signal.SIGSTOP)
    wait_until(lambda: is_stage(decode.call("receive_status", 1), Stage.FAILED), what="noticing the loss")
    wait_until(lambda: decode.call("receive_status", 1).is_released)
    assert_next_request_is_fine(decode, other.rank)
    before, _ = decode.call("content")
    victim.rank.signal(signal.SIGCONT)
    victim.rest(1)
    wait_until(lambda: victim.is_at(Stage.FAILED), what="the sender's failure")
    time.sleep(0.2)
    after, _ = decode.call("content")
    for have, want in zip(after, before, strict=True):
        np.testing.assert_array_equal(have, want)
    assert_next_request_is_fine(decode, victim.rank, transfer_id=3)


@pytest.mark.slow
@pytest.mark.parametrize("transport", WITH_UNFENCED)
def test_killed_receiver(start: Start, transport: str) -> None:
    decode, sendings = start_pair(start, transport)
    decode.kill()
    for sending in sendings:
        wait_until(lambda sending=sending: sending.is_at(Stage.FAILED), what="noticing the loss")  # type: ignore[misc]
        status = sending.rank.call("send_status", 1, decode.address)
        assert status.is_released
        assert status.outcome is TransferOutcome.PEER_LOST
    again = start(transport, seed=98)
    assert_next_request_is_fine(again, sendings[0].rank)


@pytest.mark.full
@pytest.mark.parametrize("side", ["prefill", pytest.param("decode", marks=pytest.mark.full)])
def test_a_rank_that_is_stopped_while_idle_is_noticed(start: Start, side: str) -> None:
    """Of an instance with two ranks the second one is stopped, long after the last request."""
    decode, ranks = start("tcp", seed=99), [start("tcp", seed=seed) for seed in (1, 2)]
    decode.call("expect", 1, 0, list(range(8)), WHOLE, None, tuple(rank.address for rank in ranks))
    for rank, half in zip(ranks, HALVES, strict=True):
        Sending(rank, decode.address, 1, half, [5, 4, 3, 2], 2).rest()
    wait_until(lambda: is_stage(decode.call("receive_status", 1), Stage.COMPLETE))
    time.sleep(1.2 * OPTIONS.lease_s)
    assert [rank.call("totals").silent_peers for rank in (decode, *ranks)] == [0, 0, 0]
    stopped, watching = (ranks[1], [decode]) if side == "prefill" else (decode, ranks)
    stopped.signal(signal.SIGSTOP)
    for rank in watching:
        wait_until(lambda rank=rank: rank.call("totals").silent_peers == 1, what="noticing it")  # type: ignore[misc]
    stopped.signal(signal.SIGCONT)
    for rank in watching:
        wait_until(lambda rank=rank: rank.call("totals").silent_peers == 0, what="answering again")  # type: ignore[misc]
    assert_next_request_is_fine(decode, ranks[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_an_invited_rank_that_never_shakes_hands(start: Start, how: signal.Signals) -> None:
    """Its request fails after the lease, not after `stall_timeout_s`; one of two ranks is enough for that."""
    decode, victim, other = start("tcp", seed=99), start("tcp", seed=1), start("tcp", seed=2)
    victim.signal(how)
    decode.call("expect", 1, 0, list(range(8)), WHOLE, None, (other.address, victim.address))
    sending = Sending(other, decode.address, 1, HALVES[0], [5, 4, 3, 2], 2)
    sending.layer(0)
    wait_until(lambda: is_stage(decode.call("receive_status", 1), Stage.FAILED), what="noticing the loss")
    status = decode.call("receive_status", 1)
    assert status.outcome is TransferOutcome.PEER_LOST
    assert status.reason == f"lost {victim.address}: silent for {OPTIONS.lease_s:g} s"
    wait_until(lambda: decode.call("receive_status", 1).is_released)
    wait_until(lambda: sending.is_at(Stage.FAILED), what="telling the other rank")
    assert_next_request_is_fine(decode, other)


@pytest.mark.slow
def test_an_invited_rank_may_take_its_time(start: Start) -> None:
    """It computes for longer than any lease before it shakes hands, and is there all the time."""
    decode, prefill = start("tcp", seed=99), start("tcp", seed=1)
    decode.call("expect", 1, 0, list(range(8)), WHOLE, None, (prefill.address,))
    time.sleep(1.5 * OPTIONS.lease_s)
    assert is_stage(decode.call("receive_status", 1), Stage.WAITING)
    Sending(prefill, decode.address, 1, WHOLE, list(range(8)), 1).rest()
    wait_until(lambda: is_stage(decode.call("receive_status", 1), Stage.COMPLETE))


@pytest.mark.slow
@pytest.mark.parametrize("transport", WITH_UNFENCED)
def test_request_cancelled_by_decode(start: Start, transport: str) -> None:
    decode, sendings = start_pair(start, transport)
    decode.call("cancel", 1)
    for sending in sendings:
        wait_until(lambda sending=sending: sending.is_at(Stage.FAILED))  # type: ignore[misc]
        assert sending.rank.call("send_status", 1, decode.address).outcome is TransferOutcome.REMOTE_ABORT
    wait_until(lambda: decode.call("receive_status", 1).is_released)
    assert decode.call("receive_status", 1).outcome is TransferOutcome.ABORTED
    assert_next_request_is_fine(decode, sendings[0].rank)


@pytest.mark.slow
@pytest.mark.parametrize("transport", WITH_UNFENCED)
def test_request_aborted_by_one_sender(start: Start, transport: str) -> None:
    decode, (quitter, other) = start_pair(start, transport)
    quitter.rank.call("abort", 1, decode.address)
    wait_until(lambda: is_stage(decode.call("receive_status", 1), Stage.FAILED))
    assert decode.call("receive_status", 1).outcome is TransferOutcome.REMOTE_ABORT
    wait_until(lambda: other.is_at(Stage.FAILED), what="the other sender's end")
    wait_until(lambda: decode.call("receive_status", 1).is_released)
    assert_next_request_is_fine(decode, quitter.rank)

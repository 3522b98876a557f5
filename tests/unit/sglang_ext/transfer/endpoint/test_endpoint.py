"""Endpoints in one process: what callers are told, what peers are told, and many requests at a time."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.protocol import ReceiveRecord, TransferOutcome
from sglang_ext.transfer.decide.receive_request import Need, needed
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan
from sglang_ext.transfer.endpoint import handshake_endpoint as endpoint_module
from sglang_ext.transfer.endpoint.handshake_endpoint import HandshakeEndpoint
from sglang_ext.transfer.endpoint.outgoing_transfer import PartRows, SourceChunk
from sglang_ext.transfer.endpoint.transfer_status import SendResult, Stage
from sglang_ext.transfer.pool_layout import PoolLayout, RowCopy
from sglang_ext.transfer.transports.registry import create_transport
from sglang_ext.transfer.transports.tcp import TcpTransport
from sglang_ext.transfer.transports.transport import Transport
from support.handshake_process import Pool, PoolShape, is_stage, wait_until
from support.packed_transports import make_transport

OPTIONS = HandshakeOptions(
    receive_backends=2, hold_idle_s=0.2, retry_s=0.05, heartbeat_s=0.1, lease_s=5.0, quarantine_s=1.0
)
WHOLE = KVShard((TokenSpan(0, 4),), 0, 2, 0, 3)
ALL_LAYERS = PartRows(0, 3, 0, 4, False)
Make = Callable[..., HandshakeEndpoint]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def begin(
            pool: Pool, transport: str = "tcp", layout: PoolLayout | None = None, can_fence: bool = True
        ) -> HandshakeEndpoint:
            mover = create_transport(transport, "127.0.0.1")
            mover.can_fence = can_fence
            endpoint = HandshakeEndpoint("127.0.0.1", mover, layout or pool.layout, OPTIONS)
            stack.callback(endpoint.close)
            return endpoint

        yield begin


def need(transfer_id: int, slots: list[int], aux_slot: int | None = None, states: tuple[bytes, ...] = ()) -> Need:
    return needed(
        transfer_id,
        first_token=0,
        slots=array("I", slots),
        first_head=0,
        head_count=2,
        first_layer=0,
        layer_count=3,
        aux_slot=aux_slot,
        state_slots=states,
    )


def chunk(shard: KVShard, slots: list[int], aux_slot: int | None = None) -> SourceChunk:
    return SourceChunk(shard, np.array(slots, np.uint32), aux_slot, ())


def test_senders_may_come_before_the_slots(make: Make) -> None:
    source, target = Pool(PoolShape(), 1), Pool(PoolShape(), 2)
    prefill, decode = make(source), make(target)
    handle = prefill.open_sender(1, decode.address, 1)
    handle.offer(chunk(WHOLE, [3, 2, 1, 0]), is_last=True)
    handle.part(0, PartRows(0, 3, 0, 3, False))
    wait_until(lambda: handle.status.stage is Stage.WAITING)
    assert decode.totals().receiving_early == 1
    assert decode.receive_status(1) is None
    decode.expect(need(1, [7, 8, 9, 20]))
    wait_until(lambda: handle.status.stage is Stage.TRANSFERRING)
    handle.part(0, PartRows(0, 3, 3, 1, False))
    wait_until(lambda: is_stage(decode.receive_status(1), Stage.COMPLETE))
    wait_until(lambda: handle.status.stage is Stage.COMPLETE)
    np.testing.assert_array_equal(target.buffers[4][[7, 8, 9, 20]], source.buffers[4][[3, 2, 1, 0]])
    assert handle.result is not None
    assert (handle.result.record.parts, handle.result.written_bytes) == (2, 4 * 3 * 96)
    (received,), (sent,) = decode.drain_records(), prefill.drain_records()
    assert isinstance(received, ReceiveRecord)
    assert isinstance(sent, SendResult)
    assert decode.drain_records() == []
    totals = prefill.totals()
    assert (totals.writes, totals.failed_writes, totals.sending, totals.written_bytes) == (2, 0, 0, 4 * 3 * 96)
    decode.forget(1)
    assert decode.receive_status(1) is None


class Forward:
    """A forward pass under way at decode, which writes to slots that have been given to another request."""

    def __init__(self, error: str | None = None) -> None:
        self.is_done = threading.Event()
        self.has_waiter = threading.Event()
        self._error = error

    def synchronize(self) -> None:
        self.has_waiter.set()
        assert self.is_done.wait(60)
        if self._error is not None:
            raise RuntimeError(self._error)


def test_kv_is_not_written_before_what_wrote_to_its_slots_is_over(make: Make) -> None:
    """Prefill has the KV already, and decode's last forward pass for the request before is still under way."""
    source, target = Pool(PoolShape(), 1), Pool(PoolShape(), 2)
    prefill, decode = make(source), make(target)
    handle = prefill.open_sender(1, decode.address, 1)
    handle.offer(chunk(WHOLE, [3, 2, 1, 0]), is_last=True)
    handle.part(0, ALL_LAYERS)
    forward = Forward()
    decode.expect(need(1, [7, 8, 9, 20]), unused=forward)
    assert forward.has_waiter.wait(60)
    wait_until(lambda: handle.status.stage is Stage.WAITING)
    time.sleep(0.3)  # several reports
    assert handle.status.stage is Stage.WAITING
    target.buffers[4][[7, 8, 9, 20]] = 0
    forward.is_done.set()
    wait_until(lambda: is_stage(decode.receive_status(1), Stage.COMPLETE))
    np.testing.assert_array_equal(target.buffers[4][[7, 8, 9, 20]], source.buffers[4][[3, 2, 1, 0]])


def test_a_device_that_fails_under_the_slots_fails_the_request(make: Make) -> None:
    decode = make(Pool(PoolShape(), 2))
    forward = Forward("an illegal memory access was encountered\nCompile with ...")
    forward.is_done.set()
    decode.expect(need(1, [7, 8, 9, 20]), unused=forward)
    wait_until(lambda: (status := decode.receive_status(1)) is not None and status.is_released)
    status = decode.receive_status(1)
    assert status is not None
    assert (status.stage, status.reason) == (Stage.FAILED, "an illegal memory access was encountered")


def test_threads_that_wait_for_a_device_or_move_its_memory_are_prepared() -> None:
    """Each of them is on the rank's own GPU: a new thread is on GPU 0."""
    own = threading.local()
    source, target = Pool(PoolShape(), 1), Pool(PoolShape(), 2)
    on_device: dict[str, list[bool]] = {}

    def record(what: str) -> None:
        on_device.setdefault(what, []).append(getattr(own, "device", 0) == 3)

    class Event:
        def __init__(self, what: str) -> None:
            self._what = what

        def synchronize(self) -> None:
            record(self._what)

    class Recorded(TcpTransport):
        def revoke(self, permit: int) -> None:
            record("revoke")
            super().revoke(permit)

        def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
            record("write")
            return super().write(to, permit, copies)

    with ExitStack() as stack:
        prefill, decode = (
            HandshakeEndpoint(
                "127.0.0.1",
                Recorded("127.0.0.1"),
                pool.layout,
                OPTIONS,
                prepare_thread=lambda: setattr(own, "device", 3),
            )
            for pool in (source, target)
        )
        stack.callback(prefill.close)
        stack.callback(decode.close)
        decode.expect(need(1, [7, 8, 9, 20]), unused=Event("hold"))
        handle = prefill.open_sender(1, decode.address, 1)
        handle.offer(chunk(WHOLE, [3, 2, 1, 0]), is_last=True)
        handle.part(0, ALL_LAYERS, computed=Event("computed"))
        wait_until(lambda: is_stage(decode.receive_status(1), Stage.COMPLETE))
        wait_until(lambda: "revoke" in on_device)
    assert on_device.keys() == {"hold", "computed", "write", "revoke"}
    assert all(all(found) for found in on_device.values())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_many_requests_of_two_senders_each(make: Make, transport: str) -> None:
    shape = PoolShape(slot_count=160)
    sources, target = [Pool(shape, 1), Pool(shape, 2)], Pool(shape, 3)
    prefills, decode = [make(source, transport) for source in sources], make(target, transport)
    expected = Pool(shape, 3)
    transfers = range(40)
    for transfer_id in transfers:
        slots = [4 * transfer_id + offset for offset in (2, 0, 3, 1)]
        decode.expect(need(transfer_id, slots))
        for rank in (0, 1):
            shard = WHOLE._replace(tokens=(TokenSpan(rank, 4, 2),))
            handle = prefills[rank].open_sender(transfer_id, decode.address, 2)
            own = [4 * transfer_id + rank, 4 * transfer_id + 3 - rank]
            handle.offer(chunk(shard, own), is_last=True)
            handle.part(0, PartRows(0, 2, 0, 2, False))
            handle.part(0, PartRows(2, 1, 0, 2, False))
            for have, source in zip(expected.buffers, sources[rank].buffers, strict=True):
                have[slots[rank::2]] = source[own]
    for transfer_id in transfers:
        wait_until(lambda transfer_id=transfer_id: is_stage(decode.receive_status(transfer_id), Stage.COMPLETE))  # type: ignore[misc]
    for have, want in zip(target.buffers, expected.buffers, strict=True):
        np.testing.assert_array_equal(have, want)
    assert decode.totals().free_backends == 2


class GatedTransport:
    """What a transport writes, under which permit, once the gate is open."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.gate = threading.Event()
        self.written: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        assert self.gate.wait(30)
        written_bytes = self._inner.write(to, permit, copies)
        self.written.append((permit, written_bytes))
        return written_bytes


@pytest.mark.slow
@pytest.mark.parametrize("is_closing", [False, True])
def test_a_large_part_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch, is_closing: bool) -> None:
    """One thread writes 48 rows of one request, in turns of 8, and two rows of another, which came later."""
    turn_bytes = 8 * 96
    monkeypatch.setattr(endpoint_module, "_TURN_BYTES", turn_bytes)
    source, target = Pool(PoolShape(), 1), Pool(PoolShape(), 2)
    gated = GatedTransport(create_transport("tcp", "127.0.0.1"))
    prefill = HandshakeEndpoint("127.0.0.1", gated, source.layout, OPTIONS, write_threads=1)  # type: ignore[arg-type]
    decode = HandshakeEndpoint("127.0.0.1", create_transport("tcp", "127.0.0.1"), target.layout, OPTIONS)
    expected = [buffer.copy() for buffer in target.buffers]
    handles = []
    for transfer_id, tokens, slots in ((1, 16, list(range(16))), (2, 2, [20, 30])):
        decode.expect(need(transfer_id, slots))
        handle = prefill.open_sender(transfer_id, decode.address, 1)
        shard = WHOLE._replace(tokens=(TokenSpan(0, tokens),))
        handle.offer(chunk(shard, slots[::-1]), is_last=True)
        wait_until(lambda handle=handle: handle.status.stage is Stage.TRANSFERRING)  # type: ignore[misc]
        handle.part(0, PartRows(0, 3, 0, tokens, False))
        handles.append(handle)
        for have, source_buffer in zip(expected, source.buffers, strict=True):
            have[slots] = source_buffer[slots[::-1]]
    gated.gate.set()
    if is_closing:  # what is under way ends, one way or the other
        prefill.close()
        assert all(handle.status.is_released for handle in handles)
    else:
        wait_until(lambda: all(handle.status.stage is Stage.COMPLETE for handle in handles))
        permits = [permit for permit, _ in gated.written]
        large, small = permits[0], permits[1]
        assert permits == [large, small, *[large] * 5]
        assert all(0 < written_bytes <= turn_bytes for _, written_bytes in gated.written)
        totals = prefill.totals()
        assert (totals.writes, totals.written_bytes) == (2, 18 * 3 * 96)
        for have, want in zip(target.buffers, expected, strict=True):
            np.testing.assert_array_equal(have, want)
        prefill.close()
    decode.close()


@st.composite
def divided_requests(draw: st.DrawFn) -> tuple[list[KVShard], list[int]]:
    """What several senders hold of a request of two heads and three layers, and the slots that it goes to."""
    tokens = draw(st.integers(1, 30))
    shards = []
    cuts = sorted(draw(st.sets(st.integers(1, tokens), max_size=3)) | {0, tokens})
    for start, stop in pairwise(cuts):
        span = TokenSpan(start, stop)
        heads = draw(st.sampled_from([((0, 2),), ((0, 1), (1, 1))]))
        layers = draw(st.sampled_from([((0, 3),), ((0, 1), (1, 2))]))
        shards += [KVShard((span,), *head, *layer) for head in heads for layer in layers]
    return shards, draw(st.permutations(range(96)))[:tokens]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "shared_memory", "packed"])
def test_several_senders_of_any_part_each(transport: str) -> None:
    """Tokens, heads and layers are divided at random among three senders: against an assignment for each row."""
    shape = PoolShape()
    sources, target = [Pool(shape, seed) for seed in (1, 2, 3)], Pool(shape, 4)
    with ExitStack() as stack:
        prefills = [
            HandshakeEndpoint("127.0.0.1", make_transport(transport), source.layout, OPTIONS) for source in sources
        ]
        decode = HandshakeEndpoint("127.0.0.1", make_transport(transport), target.layout, OPTIONS)
        for endpoint in (decode, *prefills):
            stack.callback(endpoint.close)
        transfer_ids = count(1)

        @settings(max_examples=20, deadline=None)
        @given(divided_requests(), st.integers(0, 1 << 30))
        def run(drawn: tuple[list[KVShard], list[int]], seed: int) -> None:
            (shards, slots), random = drawn, Random(seed)  # no draw of hypothesis ends a transfer halfway
            transfer_id, expected = next(transfer_ids), [buffer.copy() for buffer in target.buffers]
            decode.expect(need(transfer_id, slots))
            senders: dict[int, list[KVShard]] = {}
            for shard in shards:
                senders.setdefault(random.randrange(3), []).append(shard)
            for rank, held in senders.items():
                handle = prefills[rank].open_sender(transfer_id, decode.address, len(senders))
                for shard in held:
                    own = random.sample(range(96), shard.token_count)
                    index = handle.offer(chunk(shard, own), is_last=shard is held[-1])
                    handle.part(index, PartRows(shard.first_layer, shard.layer_count, 0, shard.token_count, False))
                    heads = slice(shard.first_head, shard.first_head + shard.head_count)
                    (span,) = shard.tokens
                    for buffer in range(2 * shard.first_layer, 2 * (shard.first_layer + shard.layer_count)):
                        for token, slot in zip(range(span.start, span.stop), own, strict=True):
                            expected[buffer][slots[token], heads] = sources[rank].buffers[buffer][slot, heads]
            wait_until(lambda: is_stage(decode.receive_status(transfer_id), Stage.COMPLETE))
            for have, want in zip(target.buffers, expected, strict=True):
                np.testing.assert_array_equal(have, want)

        run()


def test_metadata_and_extra_state_come_with_the_last_chunk(make: Make) -> None:
    source, target = Pool(PoolShape(), 1), Pool(PoolShape(), 2)

    def with_state(pool: Pool) -> PoolLayout:
        plain = pool.layout
        return PoolLayout("float32", 0, plain.layers, 0, 2, plain.aux, (plain.aux,))

    prefill, decode = make(source, layout=with_state(source)), make(target, layout=with_state(target))
    decode.expect(need(1, [7, 8, 9, 20], 4, (np.array([0, 2], np.uint32).tobytes(),)))
    handle = prefill.open_sender(1, decode.address)
    handle.offer(chunk(WHOLE, [3, 2, 1, 0]))
    handle.part(0, ALL_LAYERS)
    state = np.array([3, 1], np.uint32)
    handle.offer(SourceChunk(KVShard((), 0, 0, 0, 0, True), np.zeros(0, np.uint32), 2, (state,)), is_last=True)
    handle.part(1, PartRows(0, 0, 0, 0, True))
    wait_until(lambda: is_stage(decode.receive_status(1), Stage.COMPLETE))
    np.testing.assert_array_equal(target.aux[[4, 0, 2]], source.aux[[2, 3, 1]])


@pytest.mark.parametrize(
    ("shape", "transport", "reason"),
    [
        (PoolShape(dtype="bfloat16"), "tcp", "KV is float32 here and bfloat16 at the peer"),
        (PoolShape(head_dim=4), "tcp", "another number of bytes"),
        (PoolShape(), "shared_memory", "receives over shared_memory, this instance sends over tcp"),
    ],
)
def test_instances_that_do_not_fit_each_other(make: Make, shape: PoolShape, transport: str, reason: str) -> None:
    prefill, decode = make(Pool(PoolShape(), 1)), make(Pool(shape, 2), transport)
    for transfer_id in (1, 2):  # the second is told at once
        decode.expect(need(transfer_id, [1, 2, 3, 4]))
        handle = prefill.open_sender(transfer_id, decode.address)
        handle.offer(chunk(WHOLE, [0, 1, 2, 3]), is_last=True)
        handle.part(0, ALL_LAYERS)
        wait_until(lambda handle=handle: handle.status.stage is Stage.FAILED)  # type: ignore[misc]
        assert reason in handle.status.reason
        wait_until(lambda transfer_id=transfer_id: is_stage(decode.receive_status(transfer_id), Stage.FAILED))  # type: ignore[misc]
        status = decode.receive_status(transfer_id)
        assert status is not None
        assert status.outcome is TransferOutcome.REMOTE_ABORT
        assert reason in status.reason


def test_an_ordinary_instance_offers_the_whole_request_and_brings_slots_with_its_parts(make: Make) -> None:
    source, target = Pool(PoolShape(), 1), Pool(PoolShape(), 2)
    prefill, decode = make(source), make(target)
    decode.expect(need(1, [7, 8, 9, 20], 4))
    handle = prefill.open_sender(1, decode.address, 1)
    handle.offer(SourceChunk(WHOLE._replace(has_aux=True), None, 2, None), is_last=True)
    with pytest.raises(ValueError, match="no slots"):
        handle.part(0, PartRows(0, 3, 0, 3, False))
    with pytest.raises(ValueError, match="another number"):
        handle.part(0, PartRows(0, 3, 0, 3, False), np.array([1], np.uint32))
    handle.part(0, PartRows(0, 3, 0, 3, False), np.array([30, 10, 20], np.uint32))
    handle.part(0, PartRows(0, 3, 3, 1, True), np.array([5], np.uint32), ())
    wait_until(lambda: is_stage(decode.receive_status(1), Stage.COMPLETE))
    for have, want in zip(target.buffers, source.buffers, strict=True):
        np.testing.assert_array_equal(have[[7, 8, 9, 20]], want[[30, 10, 20, 5]])
    np.testing.assert_array_equal(target.aux[4], source.aux[2])


def test_callers_are_told_what_makes_no_sense(make: Make) -> None:
    prefill = make(Pool(PoolShape(), 1))
    handle = prefill.open_sender(1, "127.0.0.1:1")
    with pytest.raises(ValueError, match="transfer 1 is being sent"):
        prefill.open_sender(1, "127.0.0.1:1")
    with pytest.raises(ValueError, match="3 slots for a chunk of 4 tokens"):
        handle.offer(chunk(WHOLE, [1, 2, 3]))
    with pytest.raises(ValueError, match="aux slot"):
        handle.offer(chunk(WHOLE, [1, 2, 3, 4], aux_slot=1))
    with pytest.raises(ValueError, match="empty"):
        handle.offer(chunk(WHOLE._replace(layer_count=0), [1, 2, 3, 4]))
    index = handle.offer(chunk(WHOLE, [1, 2, 3, 4]), is_last=True)
    assert index == 0
    with pytest.raises(ValueError, match="the last chunk"):
        handle.offer(chunk(WHOLE, [1, 2, 3, 4]))
    for rows in (PartRows(0, 4, 0, 4, False), PartRows(0, 1, 1, 4, False), PartRows(0, 1, -1, 4, False)):
        with pytest.raises(ValueError, match="outside of chunk 0"):
            handle.part(0, rows)
    handle.part(0, ALL_LAYERS)
    with pytest.raises(ValueError, match="more than the chunk"):
        handle.part(0, PartRows(0, 1, 0, 1, False))
    handle.abort("enough")
    handle.part(0, ALL_LAYERS)
    assert handle.status.stage is Stage.FAILED
    assert handle.status.is_released


def test_without_fences_slots_are_released_when_the_sender_has_stopped(make: Make) -> None:
    """As over RDMA: here the transport forgets how to bar a sender."""
    prefill, decode = make(Pool(PoolShape(), 1)), make(Pool(PoolShape(), 2), can_fence=False)
    decode.expect(need(1, [1, 2, 3, 4]))
    handle = prefill.open_sender(1, decode.address)
    handle.offer(chunk(WHOLE, [0, 1, 2, 3]), is_last=True)
    wait_until(lambda: handle.status.stage is Stage.TRANSFERRING)
    decode.cancel(1, "cancelled")
    status = decode.receive_status(1)
    assert status is not None
    assert not status.is_released
    wait_until(lambda: handle.status.stage is Stage.FAILED)

    def is_released() -> bool:
        now = decode.receive_status(1)
        return now is not None and now.is_released

    wait_until(is_released)


class SlowToBar:
    """A transport that has bytes of a write on their way until `arrived`: only then is a permit taken back."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.arrived = threading.Event()
        self.revoked: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def revoke(self, permit: int) -> None:
        assert self.arrived.wait(30)
        self._inner.revoke(permit)
        self.revoked.append(permit)


@pytest.mark.slow
def test_slots_are_not_released_while_bytes_of_a_sender_that_has_stopped_are_on_their_way() -> None:
    """As of one that has given a write up because it took too long."""
    prefill = HandshakeEndpoint("127.0.0.1", create_transport("tcp", "127.0.0.1"), Pool(PoolShape(), 1).layout, OPTIONS)
    mover = SlowToBar(create_transport("tcp", "127.0.0.1"))
    decode = HandshakeEndpoint("127.0.0.1", mover, Pool(PoolShape(), 2).layout, OPTIONS)  # type: ignore[arg-type]
    decode.expect(need(1, [1, 2, 3, 4]))
    handle = prefill.open_sender(1, decode.address)
    handle.offer(chunk(WHOLE, [0, 1, 2, 3]), is_last=True)
    wait_until(lambda: handle.status.stage is Stage.TRANSFERRING)
    handle.abort("enough")
    wait_until(lambda: handle.status.is_released)
    time.sleep(0.3)
    status = decode.receive_status(1)
    assert status is not None
    assert not status.is_released
    mover.arrived.set()
    wait_until(lambda: (now := decode.receive_status(1)) is not None and now.is_released)
    assert len(mover.revoked) >= 1
    assert decode.totals().unsettled_permits == 0
    prefill.close()
    decode.close()


@pytest.mark.slow
def test_an_instance_that_shuts_down_tells_its_peers(make: Make) -> None:
    prefill, decode = make(Pool(PoolShape(), 1)), make(Pool(PoolShape(), 2))
    other = make(Pool(PoolShape(), 3))
    decode.expect(need(1, [1, 2, 3, 4]))
    other.expect(need(2, [1, 2, 3, 4]))
    handles = [prefill.open_sender(1, decode.address), prefill.open_sender(2, other.address)]
    for handle in handles:
        handle.offer(chunk(WHOLE, [0, 1, 2, 3]), is_last=True)
        wait_until(lambda handle=handle: handle.status.stage is Stage.TRANSFERRING)  # type: ignore[misc]
    decode.close()
    wait_until(lambda: handles[0].status.stage is Stage.FAILED)
    assert handles[0].status.reason == "the instance shuts down"
    prefill.close()
    prefill.close()
    wait_until(lambda: is_stage(other.receive_status(2), Stage.FAILED))
    status = other.receive_status(2)
    assert status is not None
    assert status.reason.endswith("has stopped: the instance shuts down")
    with pytest.raises(ValueError, match="closed"):
        prefill.open_sender(3, other.address)


def test_a_stray_message_is_counted_and_ignored(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    decode = make(Pool(PoolShape(), 1))
    with zmq.Context() as context, context.socket(zmq.PUSH) as stray:
        stray.connect(f"tcp://{decode.address}")
        stray.send(b"GET / HTTP/1.1")
        wait_until(lambda: decode.totals().malformed_messages == 1)
    assert "not a handshake message" in caplog.text


def test_addresses_that_are_none_are_dropped_messages(make: Make) -> None:
    prefill = make(Pool(PoolShape(), 1))
    prefill.open_sender(1, "no address")
    wait_until(lambda: prefill.totals().dropped_messages > 0)


def test_prefill_learns_from_invitations_where_kv_shall_go(make: Make) -> None:
    source, target = Pool(PoolShape(), 1), Pool(PoolShape(), 2)
    prefill, decode = make(source), make(target)
    for transfer_id in (1, 2):
        decode.expect(
            need(transfer_id, [8 * transfer_id, 8 * transfer_id + 3, 8 * transfer_id + 1, 8 * transfer_id + 2]),
            invite=[prefill.address],
        )
        wait_until(lambda transfer_id=transfer_id: prefill.invitations(transfer_id) != ())  # type: ignore[misc]
    decode.cancel(2, "it is not wanted any more")
    (invitation,) = prefill.invitations(1)
    assert (invitation.receiver, invitation.whole, invitation.withdrawn) == (decode.address, WHOLE, None)
    wait_until(lambda: prefill.invitations(2)[0].withdrawn == "it is not wanted any more")
    handle = prefill.open_sender(1, invitation.receiver)
    handle.offer(chunk(invitation.whole, [0, 1, 2, 3]), is_last=True)
    handle.part(0, ALL_LAYERS)
    wait_until(lambda: is_stage(decode.receive_status(1), Stage.COMPLETE))
    np.testing.assert_array_equal(target.buffers[0][[8, 11, 9, 10]], source.buffers[0][:4])
    prefill.forget_invitations(1)
    assert prefill.invitations(1) == ()


def test_slots_are_taken_when_prefill_calls_for_them(make: Make) -> None:
    source, target = Pool(PoolShape(), 1), Pool(PoolShape(), 2)
    prefill, decode = make(source), make(target)
    decode.announce(need(1, []), [prefill.address])
    wait_until(lambda: bool(prefill.invitations(1)))
    assert [invitation.has_slots for invitation in prefill.invitations(1)] == [False]
    assert decode.slot_call(1) is None
    assert decode.receive_status(1) is None
    prefill.call_for_slots(1)
    wait_until(lambda: decode.slot_call(1) is not None)
    decode.expect(need(1, [7, 8, 9, 20]), [prefill.address])
    wait_until(lambda: prefill.invitations(1)[0].has_slots)
    handle = prefill.open_sender(1, prefill.invitations(1)[0].receiver, 1)
    handle.offer(chunk(WHOLE, [3, 2, 1, 0]), is_last=True)
    handle.part(0, ALL_LAYERS)
    wait_until(lambda: is_stage(decode.receive_status(1), Stage.COMPLETE))
    np.testing.assert_array_equal(target.buffers[4][[7, 8, 9, 20]], source.buffers[4][[3, 2, 1, 0]])


@pytest.mark.slow
def test_who_is_invited_last_knows_that_all_others_have_been(make: Make) -> None:
    first, second, third, decode = (make(Pool(PoolShape(), seed)) for seed in range(4))
    addresses = [first.address, second.address, third.address]
    for room in range(1, 40):
        decode.announce(need(room, []), addresses, [first.address])
        wait_until(lambda room=room: bool(first.invitations(room)))  # type: ignore[misc]
        assert second.invitations(room)
        assert third.invitations(room)
        decode.expect(need(room, [room, 2, 3, 4]), addresses, [first.address])
        wait_until(lambda room=room: first.invitations(room)[0].has_slots)  # type: ignore[misc]
        assert second.invitations(room)[0].has_slots
        assert third.invitations(room)[0].has_slots


@pytest.mark.slow
def test_who_is_invited_last_is_not_invited_while_another_is_away(make: Make) -> None:
    first, second, decode = (make(Pool(PoolShape(), seed)) for seed in range(3))
    away = second.address
    second.close()
    decode.expect(need(1, [1, 2, 3, 4]), [first.address, away], [first.address])
    time.sleep(4 * OPTIONS.retry_s)
    assert first.invitations(1) == ()
    decode.cancel(1, "gone")
    wait_until(lambda: bool(first.invitations(1)))
    assert [invitation.withdrawn for invitation in first.invitations(1)] == ["gone"]


def test_a_call_comes_before_the_invitation_is_repeated_or_with_it(make: Make) -> None:
    """Another decode rank of the request invites after the call: it is called, too."""
    prefill, first, second = (make(Pool(PoolShape(), seed)) for seed in (1, 2, 3))
    first.announce(need(1, []), [prefill.address])
    wait_until(lambda: bool(prefill.invitations(1)))
    prefill.call_for_slots(1)
    second.announce(need(1, []), [prefill.address])
    wait_until(lambda: second.slot_call(1) is not None)
    call = second.slot_call(1)
    assert call is not None
    assert (call.sender, call.given_up) == (prefill.address, None)


def test_a_request_without_slots_that_prefill_gives_up_fails_at_decode(make: Make) -> None:
    prefill, decode = make(Pool(PoolShape(), 1)), make(Pool(PoolShape(), 2))
    decode.announce(need(1, []), [prefill.address])
    wait_until(lambda: bool(prefill.invitations(1)))
    prefill.call_for_slots(1, given_up="aborted on the prefill instance")
    wait_until(lambda: decode.slot_call(1) is not None)
    call = decode.slot_call(1)
    assert call is not None
    assert call.given_up == "aborted on the prefill instance"


def test_a_request_without_slots_that_decode_gives_up_is_withdrawn(make: Make) -> None:
    prefill, decode = make(Pool(PoolShape(), 1)), make(Pool(PoolShape(), 2))
    decode.announce(need(1, []), [prefill.address])
    wait_until(lambda: bool(prefill.invitations(1)))
    decode.cancel(1, "given up")
    decode.expect(need(1, []), [prefill.address])
    wait_until(lambda: prefill.invitations(1)[0].withdrawn is not None)
    decode.forget(1)
    assert decode.receive_status(1) is None


@pytest.mark.full
def test_a_request_that_waits_for_its_turn_fails_when_prefill_is_lost(make: Make) -> None:
    prefill, decode = make(Pool(PoolShape(), 1)), make(Pool(PoolShape(), 2))
    decode.announce(need(1, []), [prefill.address])
    wait_until(lambda: bool(prefill.invitations(1)))
    prefill.close()
    wait_until(lambda: decode.slot_call(1) is not None)
    call = decode.slot_call(1)
    assert call is not None
    assert call.given_up is not None
    assert call.given_up.startswith(f"lost {prefill.address}")

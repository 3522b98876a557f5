"""A request's own instance among helpers: it sends what they do not, and everything when one of them fails."""

from __future__ import annotations

import signal
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ext.identifiers import TransferAttempt, TransferId
from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.protocol import TransferOutcome
from sglang_ext.transfer.decide.receive_request import Need, needed
from sglang_ext.transfer.decide.shards import KVShard, TokenSpan
from sglang_ext.transfer.endpoint.handshake_endpoint import HandshakeEndpoint
from sglang_ext.transfer.endpoint.outgoing_transfer import PartRows, SourceChunk
from sglang_ext.transfer.endpoint.owner_transfer import OwnerTransfer, Source, _without
from sglang_ext.transfer.endpoint.transfer_status import Stage, TransferStatus
from sglang_ext.transfer.pool_layout import plan_rows
from sglang_ext.transfer.transports.tcp import TcpTransport
from sglang_ext.transfer.transports.transport import TransferError
from support.handshake_process import Pool, PoolShape, RankProcess, wait_until
from support.running_time import running_s

OPTIONS = HandshakeOptions(retry_s=0.05, heartbeat_s=0.1, lease_s=1.0)
FIRST, COUNT = 2, 10  # the tokens that decode wants
TARGET_SLOTS = list(range(40, 40 + COUNT))
SOURCE_SLOTS = list(range(60, 60 + FIRST + COUNT))
SOURCE = Source(TokenSpan(FIRST, FIRST + COUNT), 0, 2, 3, 1)


class Side:
    """One instance; all prefill instances have computed the same KV."""

    def __init__(
        self,
        stack: ExitStack,
        seed: int,
        layers: slice = slice(None),
        window_layers: slice = slice(0),
        heads: range | None = None,
    ) -> None:
        shape = PoolShape() if heads is None else PoolShape(heads=len(heads), first_head=heads.start)
        self.pool = Pool(shape, seed)
        layout = self.pool.layout
        states = layout.layers[window_layers]
        layout = replace(layout, first_layer=layers.start or 0, layers=layout.layers[layers], states=states)
        layout = replace(layout, states_by_head=() if heads is None else (True,) * len(states))
        self.transport = TcpTransport("127.0.0.1")
        self.endpoint = HandshakeEndpoint("127.0.0.1", self.transport, layout, OPTIONS)
        stack.callback(self.endpoint.close)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side, Side]]:
    with ExitStack() as stack:
        yield Side(stack, 1), Side(stack, 1), Side(stack, 2)


def need(transfer_id: TransferId) -> Need:
    return needed(
        transfer_id,
        first_token=FIRST,
        slots=array("I", TARGET_SLOTS),
        first_head=0,
        head_count=2,
        first_layer=0,
        layer_count=3,
        aux_slot=3,
    )


def slots(start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(SOURCE_SLOTS[start:stop], np.uint32)


def status_of(decode: Side, transfer_id: TransferId) -> TransferStatus:
    status = decode.endpoint.receive_status(transfer_id)
    assert status is not None
    return status


def check_arrived(prefill: Side, decode: Side) -> None:
    for have, want in zip(decode.pool.buffers, prefill.pool.buffers, strict=True):
        np.testing.assert_array_equal(have[TARGET_SLOTS], want[SOURCE_SLOTS[FIRST:]])
    np.testing.assert_array_equal(decode.pool.aux[3], prefill.pool.aux[1])


def help_with(helper: Side, decode: Side, start: int, stop: int, *, computed_layers: int = 3) -> None:
    handle = helper.endpoint.open_sender(1, decode.endpoint.address, is_helper=True)
    shard = KVShard((TokenSpan(start, stop),), 0, 2, 0, 3)
    chunk = handle.offer(SourceChunk(shard, slots(start, stop), None), is_last=True)
    for layer in range(computed_layers):
        handle.part(chunk, PartRows(layer, 1, 0, stop - start, False))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_windows_come_with_the_metadata(is_restarted: bool) -> None:
    """Rows of layers with a window are items of their own; in another attempt they come again."""
    with ExitStack() as stack:
        prefill, decode = (Side(stack, seed, slice(0, 2), window_layers=slice(2, 3)) for seed in (1, 2))
        windows = [7, 9, 4], [11, 30, 12]  # where they are, and where they go

        def expect(transfer_id: TransferId) -> None:
            wanted = need(transfer_id)
            wanted = wanted._replace(
                whole=wanted.whole._replace(layer_count=2), state_slots=(np.array(windows[1], np.uint32).tobytes(),)
            )
            decode.endpoint.expect(wanted, [prefill.endpoint.address])

        expect(1)
        source = SOURCE._replace(layer_count=2)
        transfer = OwnerTransfer(prefill.endpoint, 1, decode.endpoint.address, source, 1, may_have_helpers=is_restarted)
        if is_restarted:
            transfer.restart("a helper has failed")
            wait_until(lambda: status_of(decode, 1).is_released)
            expect(TransferAttempt(1, 1))
        transfer.send(0, slots(0, 6), has_aux=False)
        states = (np.array(windows[0], np.uint32),)
        transfer.send(6, slots(6, 12), has_aux=True, state_slots=states)
        wait_until(lambda: transfer.poll().stage is Stage.COMPLETE)
        for have, want in zip(decode.pool.buffers[:4], prefill.pool.buffers[:4], strict=True):
            np.testing.assert_array_equal(have[TARGET_SLOTS], want[SOURCE_SLOTS[FIRST:]])
        for have, want in zip(decode.pool.buffers[4:], prefill.pool.buffers[4:], strict=True):
            np.testing.assert_array_equal(have[windows[1]], want[windows[0]])
        np.testing.assert_array_equal(decode.pool.aux[3], prefill.pool.aux[1])


@pytest.mark.parametrize("metadata_last", [False, True])
def test_each_rank_sends_its_heads_of_the_windows(metadata_last: bool) -> None:
    """Two ranks with a head each: nothing is complete before the windows of both have been written."""
    with ExitStack() as stack:
        ranks = [Side(stack, seed, slice(0, 2), slice(2, 3), heads=range(seed, seed + 1)) for seed in (0, 1)]
        decode = Side(stack, 2, slice(0, 2), slice(2, 3), heads=range(2))
        windows = [7, 9, 4], [11, 30, 12]
        wanted = need(1)
        wanted = wanted._replace(
            whole=wanted.whole._replace(layer_count=2), state_slots=(np.array(windows[1], np.uint32).tobytes(),)
        )
        decode.endpoint.expect(wanted, [side.endpoint.address for side in ranks])
        span = SOURCE.tokens
        transfers = [
            OwnerTransfer(
                *(side.endpoint, 1, decode.endpoint.address),
                *(Source(span, head, 1, 2, 1 if head == 0 else None, has_states=True), 2),
            )
            for head, side in enumerate(ranks)
        ]
        states = (np.array(windows[0], np.uint32),)
        order = transfers[::-1] if metadata_last else transfers
        order[0].send(0, slots(0, 12), has_aux=True, state_slots=states)
        order[1].send(0, slots(0, 12), has_aux=False)
        time.sleep(0.1)
        assert order[1].poll().stage is not Stage.COMPLETE  # all rows are there, its windows are not
        order[1].send(12, slots(12, 12), has_aux=True, state_slots=states)
        for transfer in transfers:
            wait_until(lambda transfer=transfer: transfer.poll().stage is Stage.COMPLETE)  # type: ignore[misc]
        for number, have in enumerate(decode.pool.buffers):
            mine, theirs = (TARGET_SLOTS, SOURCE_SLOTS[FIRST:]) if number < 4 else (windows[1], windows[0])
            for head, side in enumerate(ranks):
                np.testing.assert_array_equal(have[mine, head], side.pool.buffers[number][theirs, 0])


def test_it_sends_what_no_helper_does(sides: tuple[Side, Side, Side]) -> None:
    prefill, helper, decode = sides
    decode.endpoint.expect(need(1), [prefill.endpoint.address])
    transfer = OwnerTransfer(prefill.endpoint, 1, decode.endpoint.address, SOURCE, 1, may_have_helpers=True)
    transfer.offer_now(FIRST, slots(FIRST, 4))
    help_with(helper, decode, 4, 9)
    transfer.offer_rest([range(4), range(4, 9)])
    # In pieces that do not care who sends what.
    transfer.send(FIRST, slots(FIRST, 6), has_aux=False)
    transfer.send(6, slots(6, 12), has_aux=True)
    wait_until(lambda: transfer.poll().stage is Stage.COMPLETE)
    assert status_of(decode, 1).stage is Stage.COMPLETE
    check_arrived(prefill, decode)
    assert helper.endpoint.totals().written_bytes == 5 * 3 * 96
    assert prefill.endpoint.totals().written_bytes == 5 * 3 * 96 + 24


@pytest.mark.slow
@pytest.mark.parametrize("streamed_layers", [0, 1, 2])
def test_each_stage_of_a_pipeline_sends_its_layers(streamed_layers: int) -> None:
    """The first one has one layer and the metadata, the second the other two, some of which leave before the rest."""
    with ExitStack() as stack:
        first, second, decode = Side(stack, 1, slice(1)), Side(stack, 1, slice(1, None)), Side(stack, 2)
        decode.endpoint.expect(need(1), [first.endpoint.address, second.endpoint.address])
        sources = {
            first: SOURCE._replace(layer_count=1),
            second: SOURCE._replace(layer_count=2, aux_slot=None, first_layer=1),
        }
        transfers = []
        for stage, source in sources.items():
            transfer = OwnerTransfer(stage.endpoint, 1, decode.endpoint.address, source, 2)
            transfer.offer_rest()
            transfers.append(transfer)
        stream = transfers[1].stream(FIRST, slots(FIRST, 12))
        assert stream is not None
        for layer in range(streamed_layers):
            stream.layer_ready(layer)
        for transfer in transfers:
            transfer.send(FIRST, slots(FIRST, 12), has_aux=True)
        wait_until(lambda: all(transfer.poll().stage is Stage.COMPLETE for transfer in transfers))
        assert status_of(decode, 1).stage is Stage.COMPLETE
        check_arrived(first, decode)
        assert first.endpoint.totals().written_bytes == COUNT * 96 + 24
        assert second.endpoint.totals().written_bytes == COUNT * 2 * 96


@pytest.mark.slow
@pytest.mark.parametrize("has_sent", [True, False])
def test_everything_is_its_own_once_a_helper_has_failed(sides: tuple[Side, Side, Side], has_sent: bool) -> None:
    prefill, helper, decode = sides
    decode.endpoint.expect(need(1), [prefill.endpoint.address])
    transfer = OwnerTransfer(prefill.endpoint, 1, decode.endpoint.address, SOURCE, 1, may_have_helpers=True)
    help_with(helper, decode, 4, 9, computed_layers=2)
    if has_sent:
        transfer.offer_rest([range(4, 9)])
        transfer.send(FIRST, slots(FIRST, 12), has_aux=True)
    helper.endpoint.close()
    wait_until(lambda: status_of(decode, 1).is_released)
    assert status_of(decode, 1).outcome is TransferOutcome.RESTARTED
    wait_until(lambda: transfer.handle.status.outcome is TransferOutcome.RESTARTED)
    assert transfer.poll().stage is Stage.TRANSFERRING
    decode.endpoint.expect(need(TransferAttempt(1, 1)), [prefill.endpoint.address])
    if not has_sent:
        transfer.offer_rest([range(4, 9)])  # what was agreed upon before does not count
        transfer.send(FIRST, slots(FIRST, 12), has_aux=True)
    wait_until(lambda: transfer.poll().stage is Stage.COMPLETE)
    assert transfer.transfer_id == TransferAttempt(1, 1)
    check_arrived(prefill, decode)


def test_a_late_writer_does_not_write_into_the_next_attempt(sides: tuple[Side, Side, Side]) -> None:
    prefill, helper, decode = sides
    decode.endpoint.expect(need(1), [prefill.endpoint.address])
    transfer = OwnerTransfer(prefill.endpoint, 1, decode.endpoint.address, SOURCE, 1, may_have_helpers=True)
    permits: list[int] = []
    allow = decode.transport.allow
    decode.transport.allow = lambda permit: (permits.append(permit), allow(permit))[1]  # type: ignore[method-assign]
    help_with(helper, decode, 4, 9, computed_layers=0)
    wait_until(lambda: bool(permits))
    old = permits[0]
    transfer.restart("a test")
    wait_until(lambda: status_of(decode, 1).is_released)
    decode.endpoint.expect(need(TransferAttempt(1, 1)), [prefill.endpoint.address])
    transfer.send(FIRST, slots(FIRST, 12), has_aux=True)
    wait_until(lambda: transfer.poll().stage is Stage.COMPLETE)
    # A helper that was stopped all the time goes on with what it was about to do.
    shard = KVShard((TokenSpan(4, 9),), 0, 2, 0, 3)
    wrong, target = np.array([0, 1, 2, 3, 4], np.uint32), np.array(TARGET_SLOTS[2:7], np.uint32)
    rows = plan_rows(helper.pool.layout, decode.pool.layout, shard, wrong, target)
    with pytest.raises(TransferError):
        helper.transport.write(decode.transport.address, old, rows)
    check_arrived(prefill, decode)


@pytest.mark.slow
def test_a_restart_after_the_end_changes_nothing(sides: tuple[Side, Side, Side]) -> None:
    prefill, _, decode = sides
    decode.endpoint.expect(need(1), [prefill.endpoint.address])
    transfer = OwnerTransfer(prefill.endpoint, 1, decode.endpoint.address, SOURCE, 1)
    transfer.send(FIRST, slots(FIRST, 12), has_aux=True)
    wait_until(lambda: status_of(decode, 1).stage is Stage.COMPLETE)
    transfer.restart("too late")
    wait_until(lambda: transfer.poll().stage is Stage.COMPLETE)
    assert transfer.transfer_id == 1


def test_decode_may_give_up_between_two_attempts(sides: tuple[Side, Side, Side]) -> None:
    prefill, _, decode = sides
    decode.endpoint.expect(need(1), [prefill.endpoint.address])
    transfer = OwnerTransfer(prefill.endpoint, 1, decode.endpoint.address, SOURCE, 1)
    transfer.restart("a test")
    wait_until(lambda: status_of(decode, 1).is_released)
    decode.endpoint.cancel(TransferAttempt(1, 1), "not wanted")
    decode.endpoint.expect(need(TransferAttempt(1, 1)), [prefill.endpoint.address])
    wait_until(lambda: transfer.poll().stage is Stage.FAILED)
    assert "not wanted" in transfer.poll().reason


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_decode_is_lost_between_two_attempts(sides: tuple[Side, Side, Side], how: signal.Signals) -> None:
    """A real process. Nothing of it is awaited but its next invitation."""
    prefill, _, _ = sides
    with RankProcess("tcp", PoolShape(), 2, OPTIONS) as decode:
        shard = KVShard((TokenSpan(FIRST, FIRST + COUNT),), 0, 2, 0, 3)
        decode.call("expect", 1, FIRST, TARGET_SLOTS, shard, 3, (prefill.endpoint.address,))
        transfer = OwnerTransfer(prefill.endpoint, 1, decode.address, SOURCE, 1, may_have_helpers=True)
        wait_until(lambda: transfer.handle.status.stage is Stage.WAITING)
        transfer.restart("a test")
        wait_until(lambda: transfer.handle.machine.is_over)
        start_s = running_s()
        while running_s() - start_s < 1.5 * OPTIONS.lease_s:
            assert transfer.poll().stage is Stage.TRANSFERRING  # decode is there, and may ask at any time
            time.sleep(0.05)
        decode.signal(how)
        wait_until(lambda: transfer.poll().stage is Stage.FAILED, what="noticing the loss")
        assert running_s() - start_s < 10 * OPTIONS.lease_s
        status = transfer.poll()
        assert (status.outcome, status.is_released) == (TransferOutcome.PEER_LOST, True)
        assert status.reason == f"lost {decode.address}: silent for {OPTIONS.lease_s:g} s"


def test_it_does_not_wait_for_ever(sides: tuple[Side, Side, Side]) -> None:
    prefill, _, decode = sides
    now_s = [0.0]
    decode.endpoint.expect(need(1), [prefill.endpoint.address])
    transfer = OwnerTransfer(prefill.endpoint, 1, decode.endpoint.address, SOURCE, 1, clock=lambda: now_s[0])
    transfer.restart("a test")
    wait_until(lambda: status_of(decode, 1).is_released)
    assert transfer.poll().stage is Stage.TRANSFERRING
    now_s[0] = OPTIONS.stall_timeout_s
    assert transfer.poll().outcome is TransferOutcome.STALLED


@pytest.mark.slow
@given(st.integers(0, 30), st.integers(1, 30), st.lists(st.integers(0, 60), max_size=6))
def test_what_is_left(start: int, tokens: int, cuts: list[int]) -> None:
    cuts.sort()
    taken = [range(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    left = _without(TokenSpan(start, start + tokens), taken)
    gone = {position for part in taken for position in part}
    positions = [position for span in left for position in range(span.start, span.stop)]
    assert positions == [position for position in range(start, start + tokens) if position not in gone]
    assert all(span.token_count for span in left)


class DeviceThatComputes:
    """Has computed a layer when it is told so."""

    def __init__(self) -> None:
        self.has_come = threading.Event()

    def synchronize(self) -> None:
        assert self.has_come.wait(30.0)


def arrived(prefill: Side, decode: Side, layer: int, start: int, stop: int) -> bool:
    """Whether keys and values of a layer of these positions are at decode."""
    return all(
        np.array_equal(
            decode.pool.buffers[index][TARGET_SLOTS[start - FIRST : stop - FIRST]],
            prefill.pool.buffers[index][SOURCE_SLOTS[start:stop]],
        )
        for index in (2 * layer, 2 * layer + 1)
    )


def opened(prefill: Side, decode: Side) -> OwnerTransfer:
    decode.endpoint.expect(need(1), [prefill.endpoint.address])
    transfer = OwnerTransfer(prefill.endpoint, 1, decode.endpoint.address, SOURCE, 1)
    assert transfer.stream(FIRST, slots(FIRST, 8)) is None  # nothing is offered yet
    transfer.offer_rest()
    return transfer


def test_layers_arrive_while_later_ones_are_computed(sides: tuple[Side, Side, Side]) -> None:
    prefill, _, decode = sides
    transfer = opened(prefill, decode)
    stream = transfer.stream(0, slots(0, 8))
    assert stream is not None
    for layer in range(3):
        assert not arrived(prefill, decode, layer, FIRST, 8)
        stream.layer_ready(layer)
        wait_until(lambda layer=layer: arrived(prefill, decode, layer, FIRST, 8))  # type: ignore[misc]
    wait_until(lambda: prefill.endpoint.totals().writes == 3)
    assert transfer.stream(6, slots(6, 10)) is None  # some of it has left
    transfer.send(FIRST, slots(FIRST, 8), has_aux=False)
    transfer.send(8, slots(8, 12), has_aux=True)
    wait_until(lambda: transfer.poll().stage is Stage.COMPLETE)
    check_arrived(prefill, decode)
    assert prefill.endpoint.totals().written_bytes == COUNT * 3 * 96 + 24
    assert prefill.endpoint.totals().writes == 3 + 2


def test_a_layer_that_the_device_has_not_computed_is_not_read(sides: tuple[Side, Side, Side]) -> None:
    prefill, _, decode = sides
    transfer, device = opened(prefill, decode), DeviceThatComputes()
    stream = transfer.stream(FIRST, slots(FIRST, 12))
    assert stream is not None
    layer_0 = [prefill.pool.buffers[index][SOURCE_SLOTS].copy() for index in (0, 1)]
    for index in (0, 1):
        prefill.pool.buffers[index][SOURCE_SLOTS] = 0
    stream.layer_ready(0, device)
    wait_until(lambda: transfer.handle.status.stage is Stage.TRANSFERRING)
    stream.layer_ready(1)
    wait_until(lambda: arrived(prefill, decode, 1, FIRST, 12))
    assert prefill.endpoint.totals().writes == 1
    for index, rows in zip((0, 1), layer_0, strict=True):
        prefill.pool.buffers[index][SOURCE_SLOTS] = rows
    device.has_come.set()
    transfer.send(FIRST, slots(FIRST, 12), has_aux=True)
    wait_until(lambda: transfer.poll().stage is Stage.COMPLETE)
    check_arrived(prefill, decode)


REST = -1


@st.composite
def some_chunks(draw: st.DrawFn) -> list[tuple[int, int, tuple[int, ...] | None]]:
    """Of twelve tokens: first token, the one after the last, and layers that leave before, where they may."""
    stops = sorted({*draw(st.sets(st.integers(1, 11), max_size=5)), 12})
    layers = st.sampled_from([None, (), (0,), (0, 1), (0, 1, 2), (1,), (0, 0, 2), (REST,), (0, REST), (0, 1, 2, REST)])
    return [(start, stop, draw(layers)) for start, stop in zip([0, *stops], stops, strict=False)]


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some_chunks())
def test_whatever_has_left_by_layer_the_rest_follows(
    sides: tuple[Side, Side, Side], numbers: list[int], chunks: list[tuple[int, int, tuple[int, ...] | None]]
) -> None:
    """Chunks of any size, sent in pages of two tokens; streams that end at any layer, or are not there."""
    prefill, _, decode = sides
    for buffer in decode.pool.buffers:
        buffer[:] = 0
    numbers[0] = number = numbers[0] + 1
    decode.endpoint.expect(need(number), [prefill.endpoint.address])
    before_bytes = prefill.endpoint.totals().written_bytes
    transfer = OwnerTransfer(prefill.endpoint, number, decode.endpoint.address, SOURCE, 1)
    transfer.offer_rest()
    sent = 0
    for start, stop, layers in chunks:
        stream = None if layers is None else transfer.stream(start, slots(start, stop))
        for layer in layers or ():
            if stream is not None:
                stream.rest_ready() if layer == REST else stream.layer_ready(layer)
        until_token = 12 if stop == 12 else stop - stop % 2
        transfer.send(sent, slots(sent, until_token), has_aux=stop == 12)
        sent = until_token
        if stream is not None:
            stream.close()
    wait_until(lambda: transfer.poll().stage is Stage.COMPLETE)
    check_arrived(prefill, decode)
    assert prefill.endpoint.totals().written_bytes - before_bytes == COUNT * 3 * 96 + 24


@pytest.fixture
def numbers() -> list[int]:
    return [100]


def test_another_attempt_sends_what_left_by_layer_again(sides: tuple[Side, Side, Side]) -> None:
    prefill, _, decode = sides
    transfer_id = 1
    decode.endpoint.expect(need(transfer_id), [prefill.endpoint.address])
    transfer = OwnerTransfer(prefill.endpoint, 1, decode.endpoint.address, SOURCE, 1, may_have_helpers=True)
    transfer.offer_rest()
    stream = transfer.stream(FIRST, slots(FIRST, 12))
    assert stream is not None
    stream.layer_ready(0)
    transfer.restart("a helper has gone")
    wait_until(lambda: status_of(decode, 1).is_released)
    decode.endpoint.expect(need(TransferAttempt(1, 1)), [prefill.endpoint.address])
    wait_until(lambda: (transfer.poll(), transfer.transfer_id)[1] == TransferAttempt(1, 1))
    for layer in (1, 2):
        stream.layer_ready(layer)  # of the attempt that has ended
    transfer.send(FIRST, slots(FIRST, 12), has_aux=True)
    wait_until(lambda: transfer.poll().stage is Stage.COMPLETE)
    check_arrived(prefill, decode)

"""Whom a coordinator tells where KV has to go, and what the request's own instance hears of it."""

from __future__ import annotations

from array import array

from sglang_ext.long_pool.coordinator.pool_progress import StreamLedger
from sglang_ext.long_pool.decide.orders import RunChunk
from sglang_ext.long_pool.decide.sharding import Interleaving, lay_out
from sglang_ext.long_pool.messages import AddressedMessage, Destination, OfferMessage, Streamed
from sglang_ext.transfer.decide.shards import HeadLayout

WHERE = (Destination(77, "decode:1", 0, HeadLayout(2, 1, 2), 4),)
OFFER = OfferMessage(5, array("i", range(100)), 10, 0.0, None, WHERE)


def chunk(start: int, stop: int, group: tuple[int, ...], interleaving: Interleaving = Interleaving.ZIGZAG) -> RunChunk:
    layout, _ = lay_out({}, (range(start, stop),), group, interleaving)
    return RunChunk(start, 5, layout, 0)


def test_chunks_are_sent_as_long_as_nothing_fails() -> None:
    ledger = StreamLedger()
    ledger.offered(3, OFFER)
    assert ledger.ordered(chunk(10, 40, (3,))) == WHERE
    assert ledger.ordered(chunk(40, 99, (3, 1), Interleaving.STRIPED)) == WHERE
    assert ledger.take_messages() == [
        AddressedMessage(3, Streamed(5, 40, True)),
        AddressedMessage(3, Streamed(5, 99, True)),
    ]
    ledger.broken(5)
    ledger.broken(5)
    assert ledger.take_messages() == [AddressedMessage(3, Streamed(5, 99, False))]
    assert ledger.ordered(chunk(40, 99, (3, 1))) == ()
    assert ledger.take_messages() == []


def test_a_chunk_that_is_taken_back_before_it_was_sent_changes_nothing() -> None:
    ledger = StreamLedger()
    ledger.offered(3, OFFER)
    ledger.ordered(chunk(10, 40, (3,)))
    ledger.ordered(chunk(40, 99, (3, 1)))
    ledger.take_messages()
    ledger.taken_back(5)
    assert ledger.take_messages() == [AddressedMessage(3, Streamed(5, 40, True))]
    assert ledger.ordered(chunk(40, 70, (3, 1))) == WHERE
    assert ledger.take_messages() == [AddressedMessage(3, Streamed(5, 70, True))]
    ledger.broken(5)
    ledger.take_messages()
    ledger.taken_back(5)
    assert ledger.take_messages() == []


def test_a_member_that_sends_is_lost() -> None:
    ledger = StreamLedger()
    ledger.offered(3, OFFER)
    ledger.lost(1)
    assert ledger.ordered(chunk(10, 40, (3, 1))) == WHERE
    ledger.take_messages()
    ledger.lost(2)
    assert ledger.take_messages() == []
    ledger.lost(1)
    assert ledger.take_messages() == [AddressedMessage(3, Streamed(5, 40, False))]
    assert ledger.ordered(chunk(40, 50, (3,))) == ()


def test_what_decode_does_not_wait_for_or_has_ended_is_not_sent() -> None:
    ledger = StreamLedger()
    assert ledger.ordered(chunk(10, 40, (3,))) == ()
    ledger.offered(3, OFFER._replace(destinations=()))
    assert ledger.ordered(chunk(10, 40, (3,))) == ()
    ledger.offered(3, OFFER)
    ledger.ended(5)
    assert ledger.ordered(chunk(10, 40, (3,))) == ()
    ledger.broken(5)
    assert ledger.take_messages() == []

"""A member that is lost in a step: the others need not wait for it, and the store forgets what is over."""

from __future__ import annotations

from array import array
from datetime import timedelta

import torch.distributed as dist

from sglang_ext.policy.cdsp.orders import MemberReport
from sglang_ext.policy.cdsp.sp_cost import SpCandidate, SpCost
from sglang_ext.sequence_parallel.mesh_store import MeshStore
from sglang_ext.sequence_parallel.messages import PROTOCOL_VERSION, ChunkOrder, Hello, MeshBuilt, OfferMessage, StepDone
from sglang_ext.sequence_parallel.pool_cost import PoolCosts
from sglang_ext.sequence_parallel.pool_protocol import NewMember, PoolProtocol, PoolSettings
from sglang_ext.sequence_parallel.step_clock import StepTimes


def protocol_with_a_step() -> tuple[PoolProtocol, ChunkOrder]:
    """Two members in the middle of a chunk."""
    costs = PoolCosts([SpCandidate(size, SpCost(0.0, 0.01 / size, 0.0, 0.0)) for size in (1, 2)])
    protocol = PoolProtocol(PoolSettings(min_chunk_tokens=16), costs)
    for name in "ab":
        hello = Hello(PROTOCOL_VERSION, name, "node", "model", 3, 1, MemberReport(0.0, 100_000))
        answer = protocol.greet(hello)
        assert isinstance(answer, NewMember)
        protocol.join(answer.instance, hello, 0.0)
    protocol.tick(1.0)
    for instance in range(2):
        protocol.take(instance, MeshBuilt(2), 1.0)
    out = protocol.take(0, OfferMessage(1, array("i", range(400)), 0, 0.0, None), 1.0)
    orders = [one.message for one in out if isinstance(one.message, ChunkOrder)]
    assert len(orders) == 2
    return protocol, orders[0]


def test_who_still_computes_is_told() -> None:
    protocol, order = protocol_with_a_step()
    protocol.lose(1, "killed", 2.0)
    events = protocol.take_events()
    assert [tuple(one) for one in events.given_up] == [(order.chunk.epoch, order.chunk.sequence)]
    assert protocol.take_events().given_up == []


def test_no_member_computes_any_more() -> None:
    protocol, order = protocol_with_a_step()
    protocol.take(0, StepDone(order.chunk.sequence, StepTimes(0.5, 0.0, 0.0), 1000), 2.0)
    protocol.lose(1, "killed", 2.0)
    assert protocol.take_events().given_up == []


def test_the_store_forgets_epochs() -> None:
    store = MeshStore("127.0.0.1", 0)
    member = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    for epoch in range(1, 13):
        member.set(f"mesh/{epoch}/rank0/0/1", "address")
        store.give_up(epoch, 5)
    member.set("something/else", "")
    member.check(["something/else"])  # What this connection set before has arrived now.
    store.forget_before(12)
    kept = {key for key in member.list_keys() if key.startswith("mesh/")}
    assert kept == {
        *("mesh/11/rank0/0/1", "mesh/11/given_up/5"),
        *("mesh/12/rank0/0/1", "mesh/12/given_up/5"),
    }
    assert "something/else" in member.list_keys()

"""Tensors through mailboxes that are smaller than they are, in both directions at once, in any mixture of batches."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sglang_ext.long_pool.mesh.mailbox_mesh import MailboxMesh
from sglang_ext.long_pool.mesh.mesh import Mesh, MeshError, Pending
from sglang_ext.long_pool.mesh.nvshmem_memory import NvshmemMissingError, load_nvshmem
from support.symmetric_memory import SymmetricGroup

PIECE_BYTES = 64
NAMES = (5, 9, 2)  # instances


@pytest.fixture
def group() -> Iterator[SymmetricGroup]:
    one = SymmetricGroup(len(NAMES))
    yield one
    one.close()


def meshes(group: SymmetricGroup, timeout_s: float = 30.0) -> dict[int, MailboxMesh]:
    return {
        name: MailboxMesh(memory, NAMES, name, timeout_s, PIECE_BYTES)
        for name, memory in zip(NAMES, group.members, strict=True)
    }


def test_members_that_meet_wait_for_all_others(group: SymmetricGroup) -> None:
    members = meshes(group)
    with ThreadPoolExecutor(len(NAMES)) as threads:
        first, second = (threads.submit(members[name].meet) for name in NAMES[:2])
        time.sleep(0.1)
        assert not first.done()
        assert not second.done()
        members[NAMES[2]].meet()
        first.result(30)
        second.result(30)


@pytest.mark.parametrize("seed", range(20))
def test_random_sends_and_receives(group: SymmetricGroup, seed: int) -> None:
    """Rounds of messages between random pairs, each member's part of a round a batch of its own, in random order."""
    draw = random.Random(seed)
    members: dict[int, Mesh] = dict(meshes(group))
    wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
    pending: list[Pending] = []
    for _ in range(6):
        calls: dict[int, list[tuple[str, torch.Tensor, int]]] = {name: [] for name in NAMES}
        for _ in range(draw.randrange(1, 6)):
            source, target = draw.sample(NAMES, 2)
            sent = torch.randn(draw.choice((1, 15, 16, 17, 32, 33, 200)))
            received = torch.empty_like(sent)
            calls[source].append(("send", sent, target))
            calls[target].append(("receive", received, source))
            wanted.append((received, sent))
        for name, own in calls.items():
            with members[name].batch():
                pending += [getattr(members[name], kind)(tensor, other, 0) for kind, tensor, other in own]
    for call in pending:
        call.wait()
    for mesh in members.values():
        mesh.settle()
    for received, sent in wanted:
        assert torch.equal(received, sent)


def test_more_than_the_mailboxes_hold_in_both_directions(group: SymmetricGroup) -> None:
    members = meshes(group)
    sent = {name: torch.randn(1000) for name in NAMES[:2]}
    received = {name: torch.empty(1000) for name in NAMES[:2]}
    for name, other in (NAMES[:2], NAMES[1::-1]):
        with members[name].batch():
            members[name].send(sent[name], other, 0)
            members[name].receive(received[name], other, 0)
    for name, other in (NAMES[:2], NAMES[1::-1]):
        members[name].settle()
        assert torch.equal(received[name], sent[other])


def test_nothing_comes(group: SymmetricGroup) -> None:
    mesh = meshes(group, timeout_s=0.2)[5]
    mesh.receive(torch.empty(3), 9, 0)
    with pytest.raises(MeshError, match="nothing has come for"):
        mesh.settle()
    with pytest.raises(MeshError, match="given up"):
        mesh.send(torch.empty(3), 9, 0)


def test_given_up_while_a_member_waits(group: SymmetricGroup) -> None:
    mesh = meshes(group)[5]
    call = mesh.receive(torch.empty(3), 9, 0)
    mesh.interrupt()
    with pytest.raises(MeshError, match="given up"):
        call.wait()
    with pytest.raises(MeshError, match="given up"):
        mesh.settle()


def test_without_nvshmem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    with pytest.raises(NvshmemMissingError) as refusal:
        load_nvshmem()
    assert "install nvshmem4py-cu12 or nvshmem4py-cu13" in str(refusal.value)
    assert "\n" not in str(refusal.value)

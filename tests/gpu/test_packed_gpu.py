"""Short rows of a GPU's memory: gathered and scattered by address, and sent in one piece."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy, RowSet
from sglang_ext.transfer.transports.memory_regions import OutOfBoundsError
from sglang_ext.transfer.transports.packed import PackedTransport
from sglang_ext.transfer.transports.registry import create_transport
from sglang_ext.transfer.transports.tensor_rows import TensorRows, tensor_at
from sglang_ext.transfer.transports.transport import GpuBuffers
from support.one_sided import OneSidedTransport

pytestmark = pytest.mark.gpu

SLOTS, WIDTH, FIRST, LENGTH = 1000, 1024, 256, 512
DEVICE = torch.device("cuda", 0)


class DeviceMover(OneSidedTransport):
    """Copies pieces of this GPU's memory."""

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        for copy in copies:
            target, source = (
                tensor_at(address, copy.length_bytes, DEVICE) for address in (copy.target_address, copy.source_address)
            )
            target.copy_(source)
            self.pieces += 1
        torch.cuda.synchronize()
        return sum(copy.total_bytes for copy in copies)


def pool(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (SLOTS, WIDTH), dtype=torch.uint8, device=DEVICE, generator=generator)


def buffer_of(tensor: torch.Tensor) -> ItemBuffer:
    return ItemBuffer(tensor.data_ptr(), WIDTH, SLOTS)


def slots(seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.random.default_rng(seed).permutation(SLOTS)[:300].astype(np.uint32)


def copy_of(source: torch.Tensor, target: torch.Tensor) -> RowCopy:
    """Some heads of each row."""
    here, there = source.data_ptr() + FIRST, target.data_ptr() + FIRST
    return RowCopy(here, WIDTH, slots(1), there, WIDTH, slots(2), LENGTH)


def expected_of(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    expected = target.clone()
    to, at = (torch.from_numpy(slots(seed).astype(np.int64)).to(DEVICE) for seed in (2, 1))
    expected[to, FIRST : FIRST + LENGTH] = source[at, FIRST : FIRST + LENGTH]
    return expected


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
def test_rows_by_address(shift: int) -> None:
    source, target = pool(1), pool(2)
    expected = expected_of(source.roll(-shift, 1), target.roll(-shift, 1)).roll(shift, 1)
    rows, staging = TensorRows(DEVICE), torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    rows.add([buffer_of(source), buffer_of(target)])
    here, there = (RowSet(one.data_ptr() + FIRST + shift, WIDTH, LENGTH) for one in (source, target))
    stop = rows.gather([here], slots(1), staging, 64)
    assert stop == 64 + 300 * LENGTH
    assert rows.scatter([there], slots(2), staging, 64) == stop
    assert torch.equal(target, expected)
    with pytest.raises(OutOfBoundsError):
        rows.gather([here], np.array([SLOTS], np.uint32), staging, 0)


def test_scattered_rows_are_one_piece() -> None:
    source, target = pool(1), pool(2)
    expected = expected_of(source, target)
    movers: list[DeviceMover] = []

    def make_mover(staging: ItemBuffer) -> DeviceMover:
        movers.append(DeviceMover())
        return movers[-1]

    sender, receiver = (
        PackedTransport(DeviceMover(), make_mover, "127.0.0.1", DEVICE, None, block_bytes=1 << 20) for _ in range(2)
    )
    try:
        sender.register([buffer_of(source)])
        receiver.register([buffer_of(target)])
        receiver.allow(7)
        sender.write(receiver.address, 7, [copy_of(source, target)])
        assert torch.equal(target, expected)
        assert sum(mover.pieces for mover in movers) == 1
    finally:
        sender.close()
        receiver.close()


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs NIXL")
def test_scattered_rows_over_nixl() -> None:
    source, target = pool(1), pool(2)
    expected = expected_of(source, target)
    sender, receiver = (
        create_transport("nixl", "127.0.0.1", GpuBuffers(0, (buffer_of(one),))) for one in (source, target)
    )
    try:
        sender.register([buffer_of(source)])
        receiver.register([buffer_of(target)])
        receiver.allow(7)
        for _ in range(2):
            sender.write(receiver.address, 7, [copy_of(source, target)])
        assert torch.equal(target, expected)
    finally:
        sender.close()
        receiver.close()

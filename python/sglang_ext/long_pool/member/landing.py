"""Kept rows of other members come to the transfer endpoint of a rank, which receives as decode's does."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from sglang_ext.identifiers import BootstrapRoom
from sglang_ext.long_pool.messages import Destination
from sglang_ext.transfer.decide.receive_request import needed
from sglang_ext.transfer.decide.shards import HeadLayout
from sglang_ext.transfer.endpoint.handshake_endpoint import HandshakeEndpoint
from sglang_ext.transfer.endpoint.transfer_status import Stage


class Landing:
    """One rank of a member. All members of a pool spread heads alike, so a rank sends to the same rank of another."""

    def __init__(self, endpoint: HandshakeEndpoint, rank: int, heads: HeadLayout, layers: int) -> None:
        self.address: str = endpoint.address
        self._endpoint = endpoint
        self._rank = rank
        self._heads = heads
        self._layers = layers

    def destination(self, room: BootstrapRoom, receivers: Sequence[str]) -> Destination:
        """Return where this rank's rows of a pull go; `receivers` are the endpoints of the target's ranks. ValueError
        where it has none for this rank."""
        if len(receivers) <= self._rank:
            raise ValueError(f"the target has endpoints for {len(receivers)} ranks")
        return Destination(room, receivers[self._rank], self._rank, self._heads, 0)

    def expect(self, room: BootstrapRoom, slots: torch.Tensor) -> None:
        """The first tokens of a prompt shall come to these slots, int64. The room must be new here (ValueError)."""
        heads = self._heads.heads(self._rank)
        need = needed(
            room,
            first_token=0,
            slots=array("I", slots.cpu().numpy().astype(np.uint32).tobytes()),
            first_head=heads.start,
            head_count=len(heads),
            first_layer=0,
            layer_count=self._layers,
        )
        self._endpoint.expect(need)

    def is_complete(self, room: BootstrapRoom) -> bool:
        """Return whether all rows have come."""
        status = self._endpoint.receive_status(room)
        return status is not None and status.stage is Stage.COMPLETE

    def is_released(self, room: BootstrapRoom) -> bool:
        """Return whether no sender writes to its slots any more."""
        status = self._endpoint.receive_status(room)
        return status is None or status.is_released

    def cancel(self, room: BootstrapRoom) -> None:
        """The rows are not wanted any more."""
        self._endpoint.cancel(room, "the pull has been given up")

    def forget(self, room: BootstrapRoom) -> None:
        """It has ended."""
        self._endpoint.forget(room)

"""Members of a long pool in one process whose KV goes to a decode instance over real endpoints.

What the schedulers of SGLang do around them is done here in the same order: decode expects and expects again, the own
instance of a request shares it, goes on alone, computes what is missing and sends it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang_ext.identifiers import TransferId, next_attempt
from sglang_ext.long_pool.member.kv_streams import Target
from sglang_ext.long_pool.member.landing import Landing
from sglang_ext.long_pool.member.pool_member import Collected, Concluded, Outcome, PoolMember, Sendable
from sglang_ext.long_pool.member.ring_attention import as_tensor
from sglang_ext.long_pool.member.shard import KvPoolFullError
from sglang_ext.long_pool.messages import Destination
from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.protocol import TransferOutcome
from sglang_ext.transfer.decide.receive_request import Need, needed
from sglang_ext.transfer.decide.shards import HeadLayout, TokenSpan
from sglang_ext.transfer.endpoint.handshake_endpoint import HandshakeEndpoint
from sglang_ext.transfer.endpoint.owner_transfer import OwnerTransfer, Source
from sglang_ext.transfer.endpoint.transfer_status import Stage
from sglang_ext.transfer.pool_layout import ItemBuffer, PoolLayout
from sglang_ext.transfer.transports.registry import create_transport
from support.memory_pool import MemoryMember, MemoryMeshes, Wires, member_turn
from support.toy_engine import HEAD_SIZE, KV_HEADS, LAYERS, ToyEngine, ToyPool, kv_of

OPTIONS = HandshakeOptions(retry_s=0.05, heartbeat_s=0.1, lease_s=30.0, stall_timeout_s=20.0)
HEADS = HeadLayout(KV_HEADS, 1, KV_HEADS)


def endpoint_of(pool: ToyPool) -> HandshakeEndpoint:
    def buffer(memory: torch.Tensor) -> ItemBuffer:
        return ItemBuffer(memory.data_ptr(), KV_HEADS * HEAD_SIZE * 4, len(memory))

    layers = tuple((buffer(pool._k[layer]), buffer(pool._v[layer])) for layer in range(LAYERS))
    layout = PoolLayout("float32", 0, layers, 0, KV_HEADS)
    return HandshakeEndpoint("127.0.0.1", create_transport("tcp", "127.0.0.1"), layout, OPTIONS)


@dataclass
class Expected:
    """A request as decode waits for it."""

    need: Need
    room: TransferId
    prefill: str
    slots: torch.Tensor
    attempts: int = 1
    outcome: TransferOutcome | None = None
    kv: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class Decode:
    """One decode instance; `turn` is what its scheduler does in a round."""

    def __init__(self, tokens: int = 4096) -> None:
        self.pool = ToyPool(tokens)
        self.endpoint = endpoint_of(self.pool)
        self.requests: dict[int, Expected] = {}

    def expect(self, room: int, first_token: int, tokens: int, prefill: str) -> None:
        slots = self.pool.allocate(tokens - first_token)
        need = needed(
            room,
            first_token=first_token,
            slots=array("I", slots.tolist()),
            first_head=0,
            head_count=KV_HEADS,
            first_layer=0,
            layer_count=LAYERS,
        )
        self.requests[room] = Expected(need, room, prefill, slots)
        self.endpoint.expect(need, [prefill])

    def turn(self) -> None:
        for one in self.requests.values():
            status = self.endpoint.receive_status(one.room)
            if one.outcome is not None or status is None or status.outcome is None or not status.is_released:
                continue
            attempt = next_attempt(one.room) if status.outcome is TransferOutcome.RESTARTED else None
            if attempt is not None:
                one.room, one.attempts = attempt, one.attempts + 1
                self.endpoint.expect(one.need._replace(transfer_id=attempt), [one.prefill])
                continue
            one.outcome, one.kv = status.outcome, self.pool.kv(one.slots)
            self.pool.free(one.slots)


@dataclass
class _Sent:
    transfer: OwnerTransfer
    first_token: int
    slots: torch.Tensor | None = None  # of the whole prompt, once it is here


class StreamingMember(MemoryMember):
    """One instance that sends what it computes."""

    def __init__(
        self,
        instance: int,
        wires: Wires,
        pool: ToyPool,
        decode: Decode,
        on_layer: Callable[[int], None] = lambda layer: None,
    ) -> None:
        super().__init__(instance, wires, pool)
        self.decode = decode
        self.endpoint = endpoint_of(pool)
        engine = ToyEngine(pool, on_layer=on_layer)
        landing = Landing(self.endpoint, 0, HEADS, LAYERS)
        self.receivers = (landing.address,)
        self.member = PoolMember(engine, self.link, MemoryMeshes(wires), self._open, landing=landing)
        pool.kept = self.member.kept
        member_turn(self.member)  # joins
        self.sent: dict[int, _Sent] = {}
        self.ending: set[int] = set()  # requests that are on their way to decode, and not here
        self.queue: list[tuple[int, torch.Tensor]] = []  # requests that are computed here, and what is here of them
        self.logits: dict[int, torch.Tensor] = {}  # of those that were computed without being collected

    def offer_streamed(
        self,
        room: int,
        token_ids: tuple[int, ...],
        cached_tokens: int,
        first_token: int,
        *,
        is_expected: bool = True,
    ) -> None:
        """Decode has the first `first_token` tokens."""
        prefix = self.pool.allocate(cached_tokens)
        kv = kv_of(token_ids)
        for layer in range(LAYERS):
            self.pool.write(layer, prefix, kv[layer, :, :cached_tokens])
        if is_expected:
            self.decode.expect(room, first_token, len(token_ids), self.endpoint.address)
        source = Source(TokenSpan(first_token, len(token_ids)), 0, KV_HEADS, LAYERS, None)
        transfer = OwnerTransfer(*(self.endpoint, room, self.decode.endpoint.address, source, 1), may_have_helpers=True)
        transfer.offer_now(first_token, _slots(prefix[first_token:]))
        destination = Destination(room, self.decode.endpoint.address, 0, HEADS, first_token)
        request = self.member.offer(
            token_ids,
            cached_tokens,
            prefix,
            waited_s=0.0,
            slack_s=None,
            destinations=(destination,),
            targets=(Target(transfer.handle, 0, KV_HEADS, first_token),),
            namespace="toy",
        )
        self.offered[request] = token_ids, prefix
        self.sent[request] = _Sent(transfer, first_token)

    def turn(self) -> None:
        for outcome in member_turn(self.member):
            self.ended[outcome.request] = outcome
            self._go_on(outcome)
        waiting, self.queue = self.queue, []
        for request, here in waiting:
            self._compute(request, here)
        for request in list(self.ending):
            self._follow(request)
        for sent in self.sent.values():
            if sent.slots is not None and sent.transfer.poll().stage in (Stage.COMPLETE, Stage.FAILED):
                self.pool.free(sent.slots)
                sent.slots = None

    def close(self) -> None:
        self.endpoint.close()

    def _open(self, destination: Destination) -> Target:
        handle = self.endpoint.open_sender(destination.room, destination.receiver, is_helper=True)
        return Target(handle, 0, KV_HEADS, destination.first_token)

    def _follow(self, request: int) -> None:
        transfer = self.sent[request].transfer
        stage = transfer.poll().stage
        if stage in (Stage.COMPLETE, Stage.FAILED) or transfer.is_restarted:
            self.ending.discard(request)
            if transfer.is_restarted:
                self.member.stream_failed(request)
                return
            if stage is not Stage.COMPLETE:
                self.member.withdraw(request)
            elif self.member.transferred(request, 0.0, 0.0):
                return  # its outcome follows
            self.pool.free(self.offered[request][1])

    def _go_on(self, outcome: Outcome) -> None:
        if isinstance(outcome, Concluded):
            self.pool.free(self.offered[outcome.request][1])
            return
        if isinstance(outcome, Sendable):
            transfer = self.sent[outcome.request].transfer
            if transfer.is_restarted:
                self.member.stream_failed(outcome.request)
                return
            self.logits[outcome.request] = outcome.logits
            transfer.send_metadata(len(self.offered[outcome.request][0]), _slots(torch.empty(0, dtype=torch.int64)))
            self.ending.add(outcome.request)
            return
        if outcome.request in self.ending and self.sent[outcome.request].transfer.poll().stage is Stage.COMPLETE:
            return
        self.ending.discard(outcome.request)
        prefix = self.offered[outcome.request][1]
        sent, streamed = self.sent[outcome.request], outcome.streamed
        if streamed is None:
            sent.transfer.offer_rest([range(prefix.numel())])
        elif isinstance(outcome, Collected) and streamed.is_intact:
            sent.transfer.offer_rest([range(streamed.end_tokens)])
        else:
            sent.transfer.restart("members could not")
            sent.transfer.offer_rest(())
        here = torch.cat([prefix, outcome.slots]) if isinstance(outcome, Collected) else prefix
        self._compute(outcome.request, here)

    def _compute(self, request: int, here: torch.Tensor) -> None:
        """Compute and send what is missing of a prompt, once there is room."""
        token_ids, sent = self.offered[request][0], self.sent[request]
        try:
            missing = self.pool.allocate(len(token_ids) - here.numel())
        except KvPoolFullError:
            self.queue.append((request, here))
            return
        kv = kv_of(token_ids)
        for layer in range(LAYERS):
            self.pool.write(layer, missing, kv[layer, :, here.numel() :])
        sent.slots = torch.cat([here, missing])
        sent.transfer.send(sent.first_token, _slots(sent.slots[sent.first_token :]), has_aux=True)


def _slots(slots: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.asarray(slots.numpy(), np.uint32)


def check_kept(one: StreamingMember, prompts: Mapping[int, tuple[int, ...]]) -> None:
    """What a member keeps of each prompt is the prompt's KV."""
    for prompt, part in one.member.kept._parts.items():
        positions = as_tensor(part.rows.positions)
        assert positions.numel() > 0
        torch.testing.assert_close(
            one.pool.kv(part.rows.slots), kv_of(prompts[prompt])[:, :, positions], atol=1e-4, rtol=0
        )

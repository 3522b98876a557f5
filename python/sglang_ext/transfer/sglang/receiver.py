"""The decode side of one request: it fixes where the KV shall go, invites the prefill ranks, and waits for all of it.

Where one of several senders fails, an attempt ends; when no sender writes any more, the next one begins in the same
slots.
"""

from __future__ import annotations

import logging
import time
from array import array
from contextlib import suppress
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.utils.network import NetworkAddress

from sglang_ext.identifiers import TransferAttempt, TransferId, next_attempt
from sglang_ext.transfer.decide.protocol import TransferOutcome
from sglang_ext.transfer.decide.receive_request import Need, needed
from sglang_ext.transfer.endpoint.outgoing_transfer import DeviceEvent
from sglang_ext.transfer.endpoint.transfer_status import Stage
from sglang_ext.transfer.sglang.device_events import record_event
from sglang_ext.transfer.sglang.layout import state_slots, token_slots

logger = logging.getLogger(__name__)

_GIVEN_UP = "the request was given up on the decode instance"


class HandshakeKVReceiver(CommonKVReceiver):  # type: ignore[misc]  # SGLang is untyped
    """The receiver that SGLang's decode scheduler feeds and polls."""

    _is_expected = False  # whether the endpoint knows where the KV shall go
    _wanted: Need | None = None
    _awaits_call = False  # prefill knows of it, and calls before its turn
    forward_stream: Any = None  # of the scheduler, which computes on it

    def announce(self, prompt_tokens: int) -> None:
        """Prefill's ranks are known. A long prompt takes no slots before prefill has called for them."""
        min_tokens: int | None = self.kv_mgr.late_slots_tokens
        if min_tokens is None or prompt_tokens < min_tokens or self.conclude_state is not None:
            return
        if self.bootstrap_infos is not None:
            self._awaits_call = True
            self.kv_mgr.endpoint.announce(self._need(array("I"), 0, None), *self._prefill_endpoints())

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Pages `kv_indices` are ready for the tokens from `decode_prefix_len` on."""
        if self.bootstrap_infos is None:
            self.kv_mgr.fail(self.bootstrap_room, f"the bootstrap server {self.bootstrap_addr} does not know its ranks")
            return
        slots = array("I", token_slots(kv_indices, self.kv_mgr.kv_args.page_size).tobytes())
        if not self.kv_mgr.layer_count:
            slots = array("I")  # recurrent layers alone: the state comes with the metadata
        by_head, page_size = self.kv_mgr.windows_by_head, self.kv_mgr.kv_args.page_size
        states = tuple(kind.tobytes() for kind in state_slots(state_indices or (), by_head, page_size))
        self._wanted = self._need(slots, decode_prefix_len or 0, aux_index, states)
        if self._expect(self._slots_unused()):
            self._is_expected = True
            self.init_time = time.time()

    def clear(self) -> None:
        """The request has ended on this rank, or waits only for its slots to become free."""
        if self._is_expected and self.kv_mgr.request_status.get(self.bootstrap_room) != KVPoll.Success:
            self._give_up()
        super().clear()
        # While a sender may still write to its slots, the attempt shows it: see `is_abort_release_safe`.
        self.kv_mgr.forget_attempt(self.bootstrap_room)

    # ---- called by the common class ----

    def _register_kv_args(self) -> bool:
        """Nothing to register: a sender asks for the pool's layout when it needs it."""
        return self.bootstrap_infos is not None

    def _poll(self) -> KVPoll:
        if self.conclude_state is None and self._is_expected:
            self._advance()
        if self.conclude_state is None and self._awaits_call:
            call = self.kv_mgr.endpoint.slot_call(self.bootstrap_room)
            self._awaits_call = call is None
            if call is not None and call.given_up is not None:
                self.kv_mgr.fail(self.bootstrap_room, call.given_up)
        status = super()._poll()
        return KVPoll.Bootstrapping if self._awaits_call and status == KVPoll.WaitingForInput else status

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        self._give_up()

    # ---- internals ----

    @property
    def _room(self) -> TransferId:
        room: int = self.bootstrap_room
        attempt: TransferAttempt | None = self.kv_mgr.attempts.get(room)
        return room if attempt is None else attempt

    def _slots_unused(self) -> DeviceEvent | None:
        """Return the event behind which nothing here writes to slots that were taken just now; None: nothing does.

        With the overlap schedule the request that had them before may still be in a forward pass that is under way, and
        whose result for it is not used.
        """
        stream = self.forward_stream
        if self.kv_mgr.is_on_cpu or stream is None or stream.query():
            return None
        return record_event(stream)

    def _expect(self, unused: DeviceEvent | None = None) -> bool:
        """Wait for the KV of the present attempt; whether it can be had."""
        assert self._wanted is not None
        need = self._wanted._replace(transfer_id=self._room)
        try:
            self.kv_mgr.endpoint.expect(need, *self._prefill_endpoints(), unused=unused)
        except ValueError as error:
            self.kv_mgr.fail(self.bootstrap_room, str(error))
            return False
        return True

    def _give_up(self) -> None:
        endpoint = self.kv_mgr.endpoint
        endpoint.cancel(self._room, _GIVEN_UP)
        if not self._is_expected:
            self._refuse(self._room)
            return
        status = endpoint.receive_status(self._room)
        if status is not None and status.outcome is TransferOutcome.RESTARTED:
            attempt = next_attempt(self._room)
            if attempt is not None:
                endpoint.cancel(attempt, _GIVEN_UP)
                self._refuse(attempt)

    def _refuse(self, room: TransferId) -> None:
        """Prefill waits for an invitation: it gets one together with its withdrawal. A room that has been used before
        is refused, and no prefill rank waits for it."""
        endpoint = self.kv_mgr.endpoint
        with suppress(ValueError):
            endpoint.expect(self._need(array("I"), 0, None)._replace(transfer_id=room), *self._prefill_endpoints())
            endpoint.forget(room)

    def _need(
        self, slots: array[int], first_token: int, aux_index: int | None, state_slots: tuple[bytes, ...] = ()
    ) -> Need:
        manager = self.kv_mgr
        heads = manager.heads.heads(manager.attn_tp_rank)
        return needed(
            self.bootstrap_room,
            first_token=first_token,
            slots=slots,
            first_head=heads.start,
            head_count=len(heads),
            first_layer=0,
            layer_count=max(1, manager.layer_count),
            aux_slot=aux_index,
            state_slots=state_slots,
        )

    def _prefill_endpoints(self) -> tuple[list[str], list[str]]:
        """Return the endpoints of every prefill rank, and of the first pipeline stage, which decides what is begun."""
        endpoints = [
            NetworkAddress(info["rank_ip"], int(info["rank_port"])).to_host_port_str() for info in self.bootstrap_infos
        ]
        # SGLang asks for all stages of a rank, the last one first.
        stages = len(self.target_pp_ranks)
        return endpoints, endpoints[stages - 1 :: stages]

    def _advance(self) -> None:
        room = self.bootstrap_room
        status = self.kv_mgr.endpoint.receive_status(self._room)
        if status is None:
            return
        attempt = next_attempt(self._room) if status.outcome is TransferOutcome.RESTARTED else None
        if attempt is not None:
            if status.is_released:
                logger.warning("the KV of room %d is received again: %s", room, status.reason)
                self.kv_mgr.endpoint.forget(self._room)
                self.kv_mgr.attempts[room] = attempt
                self._expect()
        elif status.stage is Stage.FAILED:
            self.kv_mgr.fail(room, status.reason)
        elif status.stage is Stage.COMPLETE:
            self.kv_mgr.update_status(room, KVPoll.Success)
        elif status.stage is Stage.TRANSFERRING:
            self.kv_mgr.update_status(room, KVPoll.Transferring)

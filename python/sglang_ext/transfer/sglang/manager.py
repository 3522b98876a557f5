"""The KV manager of the handshake backend: one endpoint per rank, found through SGLang's bootstrap server.

SGLang's common manager registers a prefill rank with `rank_ip:rank_port`; here that is the address of the rank's
endpoint, so decode ranks learn from the bootstrap server whom to invite. Everything else between the ranks goes
over the endpoints, and over nothing of SGLang's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import get_ib_devices_for_gpu
from sglang.srt.environ import envs
from sglang.srt.utils.network import NetworkAddress

from sglang_ext.engine.options import options_from_environment
from sglang_ext.identifiers import TransferAttempt, TransferId
from sglang_ext.transfer.decide.options import HandshakeOptions
from sglang_ext.transfer.decide.shards import HeadLayout
from sglang_ext.transfer.decide.slot_calls import SlotCalls
from sglang_ext.transfer.endpoint.handshake_endpoint import HandshakeEndpoint
from sglang_ext.transfer.endpoint.invitations import DecodeRank
from sglang_ext.transfer.sglang.layout import (
    Mamba2Convolution,
    cpu_head_layout,
    gpu_head_layout,
    is_spread_alike,
    latent_layout,
    model_layers,
    pool_layout,
)
from sglang_ext.transfer.sglang.metrics import start_publishing
from sglang_ext.transfer.sglang.transfer_options import TransferOptions, model_conflict
from sglang_ext.transfer.transports.registry import create_transport
from sglang_ext.transfer.transports.transport import GpuBuffers


class HandshakeKVManager(CommonKVManager):  # type: ignore[misc]  # SGLang is untyped
    """Raises ValueError, in one line, for a model whose KV it does not transfer."""

    # Slots of a failed request are released when the endpoint reports that no prefill rank writes to them.
    supports_deferred_decode_kv_release = True
    reports_transfer_latency = True

    endpoint: HandshakeEndpoint
    refused_rooms: RefusedRooms
    heads: HeadLayout
    transport_name: str
    windows_by_head: tuple[bool, ...] = ()  # per kind of extra state: rows are cut by heads, as of other layers
    divides_states = False  # recurrent states, too: each rank of the other instance gets its pieces
    stream_layer_bytes: int | None = None  # of a chunk that leaves by layer, at least; None: none does
    late_slots_tokens: int | None = None  # decode: a prompt of this many tokens takes slots when prefill calls for them
    slot_calls: SlotCalls | None = None  # prefill, on the rank that decides
    _is_latent = False
    # From which length on members of a long pool may send parts of a prompt; None: they do not. Rows of windows in a
    # pool of their own come from the prompt's own instance.
    shared_from_tokens: int | None = None

    def __init__(
        self, args: Any, disaggregation_mode: DisaggregationMode, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        problem = model_conflict(args, server_args.pp_size)
        if problem is not None:
            raise ValueError(problem)
        self._is_latent = is_mla_backend
        config = ModelConfig.from_server_args(server_args)
        self._kv_heads = _kv_heads(config)
        self._convolution = _mamba2_convolution(config)
        self.is_on_cpu = server_args.device == "cpu"
        self.attempts: dict[int, TransferAttempt] = {}  # decode: of rooms that are being received again
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        if disaggregation_mode == DisaggregationMode.DECODE:
            self._open_endpoint()
            self._start_heartbeat_checker_thread()

    @property
    def layer_token_bytes(self) -> int:
        """Keys and values, or the latent row, of one token in one layer of the model; 0 without such layers."""
        each = max(1, model_layers(self.kv_args, is_latent=self._is_latent))
        of_model = len(self.kv_args.kv_item_lens) - self.kv_args.num_draft_entries
        token_bytes: int = sum(self.kv_args.kv_item_lens[:of_model:each]) // self.kv_args.page_size
        return token_bytes

    @property
    def layer_count(self) -> int:
        """Layers whose rows each rank of this stage sends by position: all of the model's that have no window, unless
        it is a prefill in stages. All of a draft model counts as one."""
        has_draft: bool = self.kv_args.num_draft_entries > 0
        return model_layers(self.kv_args, is_latent=self._is_latent) + has_draft

    @property
    def first_layer(self) -> int:
        """Return the first layer of this stage. A decode rank has all layers, and its arguments do not say so."""
        return int(getattr(self.kv_args, "prefill_start_layer", 0))

    def head_layout(self, tp_size: int) -> HeadLayout:
        """Return how an instance of this model with `tp_size` ranks spreads its heads."""
        if self._is_latent:
            return latent_layout(tp_size)
        return self._spread(self._kv_heads, tp_size)

    def _spread(self, kv_heads: int, tp_size: int) -> HeadLayout:
        return (cpu_head_layout if self.is_on_cpu else gpu_head_layout)(kv_heads, tp_size)

    def register_to_bootstrap(self) -> None:
        """Called by the common constructor of a prefill rank, once it knows its own place."""
        self._open_endpoint()
        super().register_to_bootstrap()

    def fail(self, room: int, reason: str) -> None:
        """End a request of this rank; the first reason stays."""
        with self.failure_lock:
            self.failure_records.setdefault(room, reason)
        self.update_status(room, KVPoll.Failed)

    # ---- decode: releasing slots of failed requests ----

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        status = self.endpoint.receive_status(self.attempts.get(bootstrap_room, bootstrap_room))
        return status is None or status.is_released

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        self.forget_attempt(bootstrap_room)

    def forget_attempt(self, room: int) -> None:
        """Forget how a request that has ended fared, once no prefill rank can write to its slots."""
        attempt = self.attempts.get(room, room)
        self.endpoint.forget(attempt)
        if self.endpoint.receive_status(attempt) is None:
            self.attempts.pop(room, None)

    # ---- internals ----

    def _open_endpoint(self) -> None:
        options = options_from_environment(os.environ)
        transfer = options.transfer if options is not None and options.transfer is not None else TransferOptions()
        cdsp = None if options is None else options.cdsp
        if cdsp is not None and not self.kv_args.state_data_ptrs:
            self.shared_from_tokens = cdsp.min_tokens
        self.heads = self.head_layout(self.attn_tp_size)
        stored_heads = getattr(self.kv_args, "kv_head_num", self.heads.heads_per_rank)
        if stored_heads != self.heads.heads_per_rank:
            raise ValueError(
                f"a rank stores {stored_heads} KV heads where {self.heads.heads_per_rank} were expected: the handshake "
                "backend does not know how this engine spreads them"
            )
        if self.kv_args.num_draft_entries:
            self._check_draft()
        self.transport_name = transfer.transport
        self.stream_layer_bytes = transfer.stream_layer_bytes
        layout = pool_layout(
            *(self.kv_args, self.heads, self.attn_tp_rank, self.first_layer),
            is_latent=self._is_latent,
            convolution=self._convolution,
        )
        self.windows_by_head = layout.cut_states
        self.divides_states = any(layout.parts_of_states)
        device_memory: GpuBuffers | None = None
        prepare_thread: Callable[[], object] | None = None
        if not self.is_on_cpu:
            buffers = tuple(buffer for group in (*layout.layers, *layout.states) for buffer in group)
            gpu = int(self.kv_args.gpu_id)
            device_memory = GpuBuffers(gpu, buffers, get_ib_devices_for_gpu(self.kv_args.ib_device, gpu) or "")
            # A new thread is on GPU 0: what waits there for another GPU would take memory of this one in every rank.
            prepare_thread = partial(torch.cuda.set_device, gpu)
            # Both sides must be devices.
            layout = replace(layout, kv_dtype=f"{layout.kv_dtype} on a GPU")
        timings = HandshakeOptions(
            receive_backends=transfer.receive_backends,
            stall_timeout_s=float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()),
        )
        self.endpoint = HandshakeEndpoint(
            self.local_ip,
            create_transport(transfer.transport, self.local_ip, device_memory),
            layout,
            timings,
            decode_rank=DecodeRank(self.attn_tp_rank, self.heads),
            prepare_thread=prepare_thread,
        )
        # The common constructor has bound a socket for messages that are not used here.
        self.server_socket.close(linger=0)
        self.rank_port = NetworkAddress.parse(self.endpoint.address).port
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.refused_rooms = RefusedRooms(self.endpoint, float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()))
            if self.attn_tp_rank == 0 and self.pp_rank == 0:
                # A coordinator plans with all prompts of a pool, also those whose turn is far away.
                self.slot_calls = SlotCalls(transfer.slots_lookahead_tokens if cdsp is None else None)
        else:
            self.late_slots_tokens = transfer.late_slots_tokens
        if self.server_args.enable_metrics:
            start_publishing(self.endpoint, transfer.receive_backends)

    def _check_draft(self) -> None:
        """Raise ValueError where rows of a draft model cannot be cut with those of the model."""
        if self.attn_tp_size == 1:
            return
        arguments = self.server_args
        draft = ModelConfig.from_server_args(
            arguments,
            model_path=arguments.speculative_draft_model_path,
            model_revision=arguments.speculative_draft_model_revision,
            is_draft_model=True,
        )
        is_latent = draft.attention_arch == AttentionArch.MLA
        ranks = self.attn_tp_size
        spread = latent_layout(ranks) if is_latent else self._spread(_kv_heads(draft), ranks)
        if not is_spread_alike(spread, self.heads):
            raise ValueError(
                f"the draft model's {spread.kv_heads} KV heads are spread over {ranks} ranks otherwise than the "
                f"model's {self.heads.kv_heads}, with which they travel: --transfer-backend handshake takes it with "
                "--tp-size 1"
            )

    def _resolve_rank_mapping(self, info: Any) -> None:
        """Every prefill rank, of each stage, is invited, and finds out from that which heads to send, if any."""
        super()._resolve_rank_mapping(info)
        info.target_tp_ranks = list(range(info.attn_tp_size))
        info.target_tp_rank = 0


def _kv_heads(config: ModelConfig) -> int:
    """The model's own number, without the padding that SGLang's CPU engine writes into a configuration."""
    padded: int = config.get_total_num_kv_heads()
    own: int | None = getattr(config.hf_text_config, "original_total_num_kv_heads", None)
    return padded if own is None else own


def _mamba2_convolution(config: ModelConfig) -> Mamba2Convolution | None:
    """Return the sizes of a model of Mamba 2, which has groups; None for another."""
    text = config.hf_text_config
    groups = getattr(text, "mamba_n_groups", None) or getattr(text, "n_groups", None)
    states = getattr(text, "mamba2_cache_params", None)
    if not groups or states is None:
        return None
    return Mamba2Convolution(states.shape.intermediate_size, int(groups), states.shape.ssm_state_size)


_LOOK_EVERY_S = 0.1
_MAX_ROOMS = 10_000


class _Refusal(NamedTuple):
    reason: str
    until_s: float


class RefusedRooms:
    """Requests that a prefill rank has given up, so that decode ranks that invite it later are notified at once.

    Without this, a request that is aborted on the prefill side before decode had memory for it would let decode wait
    for minutes. Watches, for `keep_s` after each refusal, for invitations that come too late. Thread-safe.
    """

    def __init__(self, endpoint: HandshakeEndpoint, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint = endpoint
        self._keep_s = keep_s
        self._clock = clock
        self._rooms: dict[TransferId, _Refusal] = {}  # oldest first
        self._lock = threading.Lock()
        self._is_wanted = threading.Event()
        threading.Thread(target=self._watch, name="kv-refused-rooms", daemon=True).start()

    def refuse(self, room: TransferId, reason: str) -> None:
        """Notify every decode rank that has invited for this room, or will."""
        with self._lock:
            self._rooms.pop(room, None)
            self._rooms[room] = _Refusal(reason, self._clock() + self._keep_s)
            while len(self._rooms) > _MAX_ROOMS:
                del self._rooms[next(iter(self._rooms))]
        self._notify(room, reason)
        self._is_wanted.set()

    def forget(self, room: TransferId) -> None:
        """A new request has this room."""
        with self._lock:
            self._rooms.pop(room, None)

    def _notify(self, room: TransferId, reason: str) -> None:
        self._endpoint.call_for_slots(room, given_up=reason)
        for invitation in self._endpoint.invitations(room):
            if invitation.withdrawn is None and invitation.has_slots:
                try:
                    handle = self._endpoint.open_sender(room, invitation.receiver)
                except ValueError:
                    continue  # a transfer to it is under way or ending, and says what becomes of it
                handle.abort(reason)
        self._endpoint.forget_invitations(room)

    def _watch(self) -> None:
        while True:
            self._is_wanted.wait()
            now_s = self._clock()
            with self._lock:
                for room, refusal in list(self._rooms.items()):
                    if refusal.until_s <= now_s:
                        del self._rooms[room]
                rooms = list(self._rooms.items())
                if not rooms:
                    self._is_wanted.clear()
            for room, refusal in rooms:
                self._notify(room, refusal.reason)
            time.sleep(_LOOK_EVERY_S)

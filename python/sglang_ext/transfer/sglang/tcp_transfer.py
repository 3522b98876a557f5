"""KV transfer backend `sglang_ext_tcp`: SGLang's mooncake protocol over this project's TCP engine.

SGLang's mooncake classes hold the prefill-decode protocol (registration, rooms, aborts, heartbeats, different
tensor-parallel sizes); what moves bytes is one engine object, which is replaced here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sglang.srt.disaggregation.base import KVArgs
from sglang.srt.disaggregation.mooncake.conn import (
    MooncakeKVBootstrapServer,
    MooncakeKVManager,
    MooncakeKVReceiver,
    MooncakeKVSender,
)
from sglang.srt.disaggregation.utils import KVClassType
from sglang.srt.utils.network import get_local_ip_auto

from sglang_ext.transfer.transports.tcp import TcpTransferEngine, TransferError

logger = logging.getLogger(__name__)

_FAILED = -1


class EngineAdapter:
    """The methods of SGLang's MooncakeTransferEngine that its PD backend calls, on a TcpTransferEngine."""

    def __init__(self, engine: TcpTransferEngine) -> None:
        self._engine = engine

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        for address, length_bytes in zip(ptrs, lengths, strict=True):
            self._engine.register(address, length_bytes)
        return 0

    def batch_deregister(self, ptrs: Sequence[int]) -> int:
        for address in ptrs:
            self._engine.unregister(address)
        return 0

    def batch_transfer_sync(
        self, session_id: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Copy `buffers[i]` to `peer_buffer_addresses[i]`; 0 when all arrived, negative otherwise."""
        return self._report(lambda: self._engine.write_blocks(session_id, buffers, peer_buffer_addresses, lengths))

    def send_probe(self, session_id: str) -> int:
        return self._report(lambda: self._engine.probe(session_id))

    def get_session_id(self) -> str:
        return self._engine.session_id

    def close(self) -> None:
        self._engine.close()

    @staticmethod
    def _report(action: Callable[[], None]) -> int:
        try:
            action()
        except TransferError as error:
            logger.error("%s", error)
            return _FAILED
        return 0


class TcpKVManager(MooncakeKVManager):  # type: ignore[misc]  # SGLang is untyped
    """Mooncake's manager on an engine of its own instead of the process-wide mooncake engine."""

    def init_engine(self) -> None:
        self.engine = EngineAdapter(TcpTransferEngine(get_local_ip_auto()))

    def teardown(self) -> None:
        super().teardown()
        self.engine.close()


class TcpKVSender(MooncakeKVSender):  # type: ignore[misc]  # SGLang is untyped
    # Host tensors of indices come in pinned memory behind a CUDA event, which a CPU engine does not have.
    supports_host_tensor_indices = False


CLASSES: dict[KVClassType, type] = {
    KVClassType.KVARGS: KVArgs,
    KVClassType.MANAGER: TcpKVManager,
    KVClassType.SENDER: TcpKVSender,
    KVClassType.RECEIVER: MooncakeKVReceiver,
    KVClassType.BOOTSTRAP_SERVER: MooncakeKVBootstrapServer,
}

"""The backend's classes by the kind that SGLang asks for."""

from __future__ import annotations

from sglang.srt.disaggregation.base import KVArgs
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.disaggregation.utils import KVClassType

from sglang_ext.sglang_plugin.handshake.manager import HandshakeKVManager
from sglang_ext.sglang_plugin.handshake.receiver import HandshakeKVReceiver
from sglang_ext.sglang_plugin.handshake.sender import HandshakeKVSender

CLASSES: dict[KVClassType, type] = {
    KVClassType.KVARGS: KVArgs,
    KVClassType.MANAGER: HandshakeKVManager,
    KVClassType.SENDER: HandshakeKVSender,
    KVClassType.RECEIVER: HandshakeKVReceiver,
    KVClassType.BOOTSTRAP_SERVER: CommonKVBootstrapServer,
}

"""KV transfer backend `sglang_ext_stand_in`: a prefill instance whose KV goes nowhere, to measure prefill alone.

SGLang has the classes for its warm-up requests, but no prefill instance that has these alone; and a request that names
SGLang's own stand-in (host 2.2.2.2) is kept out of the prefix cache, and on 0.5.17 loses its KV when it runs in chunks.
"""

from __future__ import annotations

from sglang.srt.disaggregation.base import KVArgs
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.disaggregation.fake import FakeKVManager, FakeKVReceiver, FakeKVSender
from sglang.srt.disaggregation.utils import KVClassType

CLASSES: dict[KVClassType, type] = {
    KVClassType.KVARGS: KVArgs,
    KVClassType.MANAGER: FakeKVManager,
    KVClassType.SENDER: FakeKVSender,
    KVClassType.RECEIVER: FakeKVReceiver,
    KVClassType.BOOTSTRAP_SERVER: CommonKVBootstrapServer,
}

"""Tell decode when a request is aborted on the prefill instance, so that it does not wait for KV in vain."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll


def tell_decode(result: None, sender: Any) -> None:
    """AFTER `CommonKVSender.abort()`: send the failure to every decode rank that registered for the room."""
    manager = sender.kv_mgr
    manager.send_kv_status_message(
        targets=manager._room_notify_targets(sender.bootstrap_room),
        bootstrap_room=sender.bootstrap_room,
        status=KVPoll.Failed,
        failure_reason="the request was aborted on the prefill instance",
    )

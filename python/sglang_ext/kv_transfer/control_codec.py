"""Control messages as bytes: a version, a kind, and msgpack of the record, checked against its types on arrival."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from sglang_ext.kv_transfer.invitations import Invitation, InvitationSeen
from sglang_ext.kv_transfer.pool_layout import PoolLayout
from sglang_ext.policy.handshake.messages import (
    ReceiverAbort,
    ReceiverClosed,
    ReceiverReport,
    SenderReport,
    SenderStopped,
)

VERSION = 2
_MAGIC = b"SXHS" + bytes([VERSION])


class LayoutRequest(NamedTuple):
    """Sender to receiver: where does your pool lie?"""

    sender: str


class LayoutReply(NamedTuple):
    """Receiver to sender. The layout holds as long as permits bear this epoch."""

    receiver: str
    receiver_epoch: int
    transport: str
    transport_address: str
    layout: PoolLayout


class CodecError(ValueError):
    """What arrived is no message of this protocol."""


ControlMessage: TypeAlias = (
    SenderReport
    | SenderStopped
    | ReceiverReport
    | ReceiverAbort
    | ReceiverClosed
    | LayoutRequest
    | LayoutReply
    | Invitation
    | InvitationSeen
)

_KINDS: dict[int, type[ControlMessage]] = {
    1: SenderReport,
    2: SenderStopped,
    3: ReceiverReport,
    4: ReceiverAbort,
    5: ReceiverClosed,
    6: LayoutRequest,
    7: LayoutReply,
    8: Invitation,
    9: InvitationSeen,
}
_NUMBERS: dict[type[ControlMessage], int] = {kind: number for number, kind in _KINDS.items()}
_DECODERS = {number: msgspec.msgpack.Decoder(kind) for number, kind in _KINDS.items()}
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: ControlMessage) -> bytes:
    """One frame."""
    return _MAGIC + bytes([_NUMBERS[type(message)]]) + _ENCODER.encode(message)


def decode(frame: bytes) -> ControlMessage:
    """Parse a frame. Raises CodecError."""
    if frame[:4] != _MAGIC[:4]:
        raise CodecError("not a handshake message of sglang-ext")
    if frame[:5] != _MAGIC:
        raise CodecError(f"a handshake message of another version than {VERSION}")
    decoder = _DECODERS.get(frame[5]) if len(frame) > 5 else None
    if decoder is None:
        raise CodecError("a handshake message of an unknown kind")
    try:
        message: ControlMessage = decoder.decode(frame[6:])
    except (msgspec.MsgspecError, ValueError) as error:
        raise CodecError(f"a malformed handshake message: {error}") from error
    return message

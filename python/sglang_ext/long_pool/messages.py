"""Messages between a coordinator and the members of its long pool.

A member sends a hello, reports, offers requests and answers orders. The coordinator sends the orders of
`long_pool.decide.orders`; what a member has to compute comes with its token ids.

    ["ReportMessage",[[0.0,4096,null],7]]⏎
    ["ChunkOrder",[[…],null,[],[]],2048]⏎ and 2048 bytes: 512 token ids

A message is one line of JSON: the name of its class, the values of its fields, and, if bytes follow the newline, their
number. Those are token ids or logits, as little-endian int32 or float32: as JSON a prompt of a million tokens would
hold up an event loop for a tenth of a second.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from io import BufferedReader
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec

from sglang_ext.identifiers import PoolRequest
from sglang_ext.long_pool.decide.coordination_settings import KV_TOKEN_BYTES
from sglang_ext.long_pool.decide.orders import (
    Borrow,
    Collect,
    DeclineReason,
    Drop,
    DropKept,
    GiveUp,
    Keep,
    MemberReport,
    RollBack,
    RunChunk,
)
from sglang_ext.long_pool.decide.row_pulls import Pull
from sglang_ext.long_pool.link_frames import PeerAddress
from sglang_ext.long_pool.step_clock import StepTimes
from sglang_ext.long_pool.wire_types import Count, Line, Logits, Positive, Seconds, TokenIds
from sglang_ext.transfer.decide.shards import HeadLayout

PROTOCOL_VERSION = 20
KEY_PROTOCOL = "long pool"  # what the proofs of a key hold for
MAX_LINE_BYTES = 2**24
FIRST_LINE_BYTES = 2**16  # of who has not proved yet that it knows the pool's key
MAX_PAYLOAD_BYTES = 2**27  # token ids of a prompt of 32 million tokens

Peers = tuple[tuple[PeerAddress, ...], ...]  # of each member of a step the addresses of its ranks


class Destination(NamedTuple):
    """A decode rank that waits for it."""

    room: Count
    receiver: Line  # address of its endpoint
    rank: Count
    heads: HeadLayout  # how its instance spreads them over ranks
    first_token: Count  # what comes before is cached there


class AddressedMessage(NamedTuple):
    """A message to a member."""

    instance: int
    message: ToMember


class MessageError(ValueError):
    """Bytes that are no message of this version, or not all of one."""


class VersionError(MessageError):
    """The first message of a member of another version."""


class Hello(NamedTuple):
    """Describes what a member says of itself first. All members of a pool must serve the same model in the same way."""

    version: int
    name: Line  # of the instance, unique in the pool: an instance that joins again under it has lost what it held
    node: Line
    model: Line  # what must be equal in all members, in one line
    layers: Positive
    page_tokens: Positive
    report: MemberReport
    min_tokens: Count = 0  # uncached tokens from which on it offers a prompt
    addresses: tuple[PeerAddress, ...] = ()  # where its ranks wait for those of other members
    receivers: tuple[Line, ...] = ()  # endpoints of its ranks to which kept rows can be sent; none: they cannot
    kv_token_bytes: Positive = KV_TOKEN_BYTES  # of one token on one rank


class KeyRequest(NamedTuple):
    """An instance offers to prove that it knows the pool's key, before its hello."""

    version: int
    opening: Line  # in hexadecimal digits, as the two below; see `shared_key`


class Challenge(NamedTuple):
    """The answer: the coordinator knows it."""

    challenge: Line


class Proof(NamedTuple):
    """The caller proves that it knows the key as well; its hello follows."""

    answer: Line


class Welcome(NamedTuple):
    """The answer to the hello: the number of the instance, in which pool, and the member timeout."""

    instance: int
    pool_id: Line  # of the coordinator's present run, in hexadecimal digits
    member_timeout_s: Seconds  # a member, or a coordinator, that sends nothing for this long is lost


class Refusal(NamedTuple):
    """The other answer, before the connection is closed."""

    reason: str


class Heartbeat(NamedTuple):
    """The coordinator is there."""


class ReportMessage(NamedTuple):
    """State of a member, and the last step that it has begun: later ones, on their way to it, are not in it."""

    report: MemberReport
    begun_step: Count = 0


class Alive(NamedTuple):
    """A member's heartbeat: how long ago its engine has done anything that can be seen."""

    silent_s: Seconds


class OfferMessage(NamedTuple):
    """A long prefill that came to this member."""

    request: PoolRequest
    token_ids: TokenIds  # int32; all that are to be in memory when the request is handed back
    cached_tokens: Count
    waited_s: Seconds
    slack_s: float | None  # until its deadline; None without one
    destinations: tuple[Destination, ...] = ()  # where members send what they compute; none: only to each other
    room: Count | None = None  # under which a router may have announced it
    fits_owner: bool = True  # this member could compute it by itself
    namespace: Line | None = None  # prompts share a prefix within one; None: its rows are not kept


class CancelMessage(NamedTuple):
    request: int


class StepDone(NamedTuple):
    sequence: int
    times: StepTimes
    free_kv_tokens: Count
    logits: Logits | None = None  # float32, of the prompt's last row; none where they are its own instance's


class StepFailed(NamedTuple):
    sequence: int
    reason: str
    unreachable: int | None = None  # the peer that could not be talked to, where it was one
    is_out_of_memory: bool = False  # of what a chunk needs besides KV
    free_kv_tokens: Count | None = None  # as it is after the step; None where that is not known
    is_unsent: bool = False  # nothing of it has been sent to decode from here


class StreamFailed(NamedTuple):
    """Describes what members have sent of a request of this member cannot be relied upon."""

    request: int


class KeptLost(NamedTuple):
    """This member has freed the rows that it kept of these prompts."""

    prompts: tuple[int, ...]


class Pulled(NamedTuple):
    """All rows of a pull have come to this member, its target, which keeps them."""

    pull: int


class PullFailed(NamedTuple):
    """The rows of a pull do not come to this member, or cannot be sent from it."""

    pull: int


class Transferred(NamedTuple):
    """All KV of a request of this member is at decode."""

    request: int
    transfer_s: Seconds  # from its offer to the pool on
    exposed_s: Seconds  # of that, after its last token had been computed


class ChunkOrder(NamedTuple):
    """A chunk, and the ids of the tokens that this member computes."""

    chunk: RunChunk
    token_ids: TokenIds  # int32
    destinations: tuple[Destination, ...] = ()  # where their KV goes
    peers: Peers = ()


class CollectOrder(NamedTuple):
    """A collect, and where its members are."""

    collect: Collect
    peers: Peers = ()


class PullOrder(NamedTuple):
    """A pull, and where its target's ranks receive."""

    pull: Pull
    receivers: tuple[Line, ...]


class Streamed(NamedTuple):
    """Informs a request's own instance: from the cached prefix to `end_tokens`, members send KV straight to decode; not
    `is_intact`: something of that has failed, and cannot be relied upon."""

    request: int
    end_tokens: Count
    is_intact: bool


class DeclineMessage(NamedTuple):
    """Informs a request's own instance: it computes the request by itself, with the part that is in its cache."""

    request: int
    reason: DeclineReason
    waited_s: Seconds  # since the prompt came to a router


class Computed(NamedTuple):
    """Informs a request's own instance: all is computed, and members send all KV straight to decode."""

    request: int
    logits: Logits | None  # float32, of its last row; none where this instance has computed them


FromMember = (
    KeyRequest
    | Proof
    | Hello
    | ReportMessage
    | Alive
    | OfferMessage
    | CancelMessage
    | StepDone
    | StepFailed
    | StreamFailed
    | KeptLost
    | Pulled
    | PullFailed
    | Transferred
)
ToMember = (
    Challenge
    | Welcome
    | Refusal
    | Heartbeat
    | ChunkOrder
    | CollectOrder
    | PullOrder
    | GiveUp
    | Streamed
    | Computed
    | RollBack
    | Drop
    | Keep
    | Borrow
    | DropKept
    | DeclineMessage
)
Message = FromMember | ToMember


_SHOWN_BYTES = 80
_VERSIONED = (Hello.__name__, KeyRequest.__name__)


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The line of a message."""

    name: str
    values: msgspec.Raw
    payload_bytes: Count = 0  # that belong to it behind its newline


def encode(message: Message) -> bytes:
    """One line, with its newline, and the payload behind it."""
    payload = b""
    if isinstance(message, OfferMessage | ChunkOrder):
        payload = _little_endian(message.token_ids).tobytes()
    elif isinstance(message, StepDone | Computed) and message.logits is not None:
        payload = _little_endian(message.logits).tobytes()
    content = [type(message).__name__, message, *([len(payload)] if payload else [])]
    return _ENCODER.encode(content) + b"\n" + payload


def read_head(line: bytes) -> Head:
    """Return what a line says. Raises MessageError."""
    if len(line) > MAX_LINE_BYTES:
        raise MessageError(f"a line of more than {MAX_LINE_BYTES} bytes")
    try:
        head = _HEAD_DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _no_message(line, error) from None
    if head.payload_bytes > MAX_PAYLOAD_BYTES:
        raise MessageError(f"{head.payload_bytes} bytes of payload; at most {MAX_PAYLOAD_BYTES} are taken")
    return head


def decode(head: Head, payload: bytes = b"") -> Message:
    """The message of a line and its payload. Raises MessageError; VersionError for a hello of another version."""
    if len(payload) != head.payload_bytes:
        raise MessageError(f"{len(payload)} of {head.payload_bytes} bytes of payload")
    try:
        if head.name in _VERSIONED:
            _check_version(msgspec.json.decode(head.values, type=list))
        message: Message = _DECODERS[head.name].decode(head.values)
        if isinstance(message, OfferMessage | ChunkOrder):
            return message._replace(token_ids=_little_endian(array("i", payload)))
        if isinstance(message, StepDone | Computed):
            return message._replace(logits=_little_endian(array("f", payload)) if payload else None)
        return message
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
        if isinstance(error, VersionError):
            raise
        raise _no_message(bytes(head.values), error) from None


def read_message(stream: BufferedReader) -> Message | None:
    """The next message of a blocking stream; None at its end. Raises MessageError, and what the stream raises."""
    line = stream.readline(MAX_LINE_BYTES + 1)
    if not line:
        return None
    head = read_head(line)
    return decode(head, stream.read(head.payload_bytes) if head.payload_bytes else b"")


async def receive_message(
    stream: asyncio.StreamReader, max_payload_bytes: int = MAX_PAYLOAD_BYTES, max_line_bytes: int = MAX_LINE_BYTES
) -> Message | None:
    """The next message; None at the stream's end. Raises MessageError, and what the stream raises.

    The stream's own limit bounds what it holds besides: a line may be longer.
    """
    line = await _receive_line(stream, max_line_bytes)
    if not line:
        return None
    head = read_head(line)
    if not head.payload_bytes:
        return decode(head)
    if head.payload_bytes > max_payload_bytes:
        raise MessageError(f"{head.payload_bytes} bytes of payload; at most {max_payload_bytes} are taken here")
    try:
        return decode(head, await stream.readexactly(head.payload_bytes))
    except asyncio.IncompleteReadError as error:
        raise MessageError(f"{len(error.partial)} of {head.payload_bytes} bytes of payload") from None


async def _receive_line(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    line, is_whole = b"", False
    while not is_whole:
        try:
            part, is_whole = await stream.readuntil(b"\n"), True
        except asyncio.IncompleteReadError as error:
            part, is_whole = error.partial, True
        except asyncio.LimitOverrunError as error:
            part = await stream.readexactly(error.consumed)
        if len(line) + len(part) > max_bytes:
            raise MessageError(f"a line of more than {max_bytes} bytes")
        line += part
    return line


_Number = TypeVar("_Number", int, float)


def _check_version(values: list[Any]) -> None:
    if not values or values[0] != PROTOCOL_VERSION:
        raise VersionError(f"protocol version {values[0] if values else None} instead of {PROTOCOL_VERSION}")


def _no_message(line: bytes, error: Exception) -> MessageError:
    return MessageError(f"not a message of version {PROTOCOL_VERSION}: {line[:_SHOWN_BYTES]!r} ({error})")


def _little_endian(values: array[_Number]) -> array[_Number]:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values


def _as_json(value: object) -> list[int] | None:
    if isinstance(value, range):
        return [value.start, value.stop, value.step]
    if isinstance(value, array):
        return None  # sent behind the line
    raise NotImplementedError(f"{type(value).__name__} has no place in a message")


def _from_json(kind: Any, value: Any) -> Any:
    if kind is range:
        start, stop, step = msgspec.convert(value, tuple[int, int, int])
        if start < 0 or step < 1:
            raise ValueError(f"positions from {start} in steps of {step}")
        return range(start, stop, step)
    return array("b")  # what is behind the line is put in its place


_ENCODER = msgspec.json.Encoder(enc_hook=_as_json)
_HEAD_DECODER = msgspec.json.Decoder(Head)
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    kind.__name__: msgspec.json.Decoder(kind, dec_hook=_from_json) for kind in get_args(Message)
}

"""Messages between a coordinator and the members of its long pool.

A member sends a hello, reports, offers requests and answers orders. The coordinator sends the orders of
`long_pool.decide.orders`; what a member has to compute comes with its token ids.

    ["ReportMessage",[[0.0,4096,null],7]]⏎
    ["ChunkOrder",[[…],null,[],[]],2048]⏎ and 2048 bytes: 512 token ids

A message is one line of JSON. Where it has token ids or logits they follow it as little-endian int32 or float32, and
the line ends with the number of their bytes: as JSON a prompt of a million tokens would hold up an event loop for a
tenth of a second.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from array import array
from collections.abc import Callable, Sequence
from io import BufferedReader
from typing import Any, NamedTuple, TypeVar

from sglang_ext.identifiers import BootstrapRoom, PoolRequest
from sglang_ext.long_pool.decide.orders import (
    Collect,
    Decline,
    DeclineReason,
    Drop,
    GiveUp,
    MemberReport,
    RollBack,
    RunChunk,
)
from sglang_ext.long_pool.decide.sharding import ChunkLayout, KvMove, Positions
from sglang_ext.long_pool.link_frames import PeerAddress
from sglang_ext.long_pool.step_clock import StepTimes
from sglang_ext.transfer.decide.shards import HeadLayout

PROTOCOL_VERSION = 11
MAX_LINE_BYTES = 2**24
FIRST_LINE_BYTES = 2**16  # of who has not proved yet that it knows the pool's key
MAX_PAYLOAD_BYTES = 2**27  # token ids of a prompt of 32 million tokens

Peers = tuple[tuple[PeerAddress, ...], ...]  # of each member of a step the addresses of its ranks


class Destination(NamedTuple):
    """A decode rank that waits for it."""

    room: BootstrapRoom
    receiver: str  # address of its endpoint
    rank: int
    heads: HeadLayout  # how its instance spreads them over ranks
    first_token: int  # what comes before is cached there


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
    name: str  # of the instance, unique in the pool: an instance that joins again under it has lost what it held
    node: str
    model: str  # what must be equal in all members, in one line
    layers: int
    page_tokens: int
    report: MemberReport
    min_tokens: int = 0  # uncached tokens from which on it offers a prompt
    addresses: tuple[PeerAddress, ...] = ()  # where its ranks wait for those of other members


class KeyRequest(NamedTuple):
    """An instance offers to prove that it knows the pool's key, before its hello."""

    version: int
    nonce: str  # in hexadecimal digits


class Challenge(NamedTuple):
    """The answer: the coordinator knows it."""

    nonce: str
    code: str


class Proof(NamedTuple):
    """The caller proves that it knows the key as well; its hello follows."""

    code: str


class Welcome(NamedTuple):
    """The answer to the hello: the number of the instance, in which pool, and the member timeout."""

    instance: int
    pool_id: str  # of the coordinator's present run, in hexadecimal digits
    member_timeout_s: float  # a member, or a coordinator, that sends nothing for this long is lost


class Refusal(NamedTuple):
    """The other answer, before the connection is closed."""

    reason: str


class Heartbeat(NamedTuple):
    """The coordinator is there."""


class ReportMessage(NamedTuple):
    """State of a member, and the last step that it has begun: later ones, on their way to it, are not in it."""

    report: MemberReport
    begun_step: int = 0


class Alive(NamedTuple):
    """A member's heartbeat: how long ago its engine has done anything that can be seen."""

    silent_s: float


class OfferMessage(NamedTuple):
    """A long prefill that came to this member."""

    request: PoolRequest
    token_ids: array[int]  # int32; all that are to be in memory when the request is handed back
    cached_tokens: int
    waited_s: float
    slack_s: float | None  # until its deadline; None without one
    destinations: tuple[Destination, ...] = ()  # where members send what they compute; none: only to each other
    room: BootstrapRoom | None = None  # under which a router may have announced it
    fits_owner: bool = True  # this member could compute it by itself


class CancelMessage(NamedTuple):
    request: int


class StepDone(NamedTuple):
    sequence: int
    times: StepTimes
    free_kv_tokens: int
    logits: array[float] | None = None  # float32, of the prompt's last row; none where they are its own instance's


class StepFailed(NamedTuple):
    sequence: int
    reason: str
    unreachable: int | None = None  # the peer that could not be talked to, where it was one
    is_out_of_memory: bool = False  # of what a chunk needs besides KV
    free_kv_tokens: int | None = None  # as it is after the step; None where that is not known
    is_unsent: bool = False  # nothing of it has been sent to decode from here


class StreamFailed(NamedTuple):
    """Describes what members have sent of a request of this member cannot be relied upon."""

    request: int


class Transferred(NamedTuple):
    """All KV of a request of this member is at decode."""

    request: int
    transfer_s: float  # from its offer to the pool on
    exposed_s: float  # of that, after its last token had been computed


class ChunkOrder(NamedTuple):
    """A chunk, and the ids of the tokens that this member computes."""

    chunk: RunChunk
    token_ids: array[int]  # int32
    destinations: tuple[Destination, ...] = ()  # where their KV goes
    peers: Peers = ()


class CollectOrder(NamedTuple):
    """A collect, and where its members are."""

    collect: Collect
    peers: Peers = ()


class Streamed(NamedTuple):
    """Informs a request's own instance: from the cached prefix to `end_tokens`, members send KV straight to decode; not
    `is_intact`: something of that has failed, and cannot be relied upon."""

    request: int
    end_tokens: int
    is_intact: bool


class Computed(NamedTuple):
    """Informs a request's own instance: all is computed, and members send all KV straight to decode."""

    request: int
    logits: array[float] | None  # float32, of its last row; none where this instance has computed them


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
    | Transferred
)
ToMember = (
    Challenge
    | Welcome
    | Refusal
    | Heartbeat
    | ChunkOrder
    | CollectOrder
    | GiveUp
    | Streamed
    | Computed
    | RollBack
    | Drop
    | Decline
)
Message = FromMember | ToMember


def encode(message: Message) -> bytes:
    """One line, with its newline, and the payload behind it."""
    payload = b""
    if isinstance(message, OfferMessage | ChunkOrder):
        payload = _little_endian(message.token_ids).tobytes()
    elif isinstance(message, StepDone | Computed) and message.logits is not None:
        payload = _little_endian(message.logits).tobytes()
    # A record is a tuple, which JSON has as a list; only ranges, layouts of heads and what is sent behind need help.
    content = [type(message).__name__, message, *([len(payload)] if payload else [])]
    return json.dumps(content, default=_as_json, separators=(",", ":")).encode() + b"\n" + payload


class Head(NamedTuple):
    """The line of a message, and how many bytes belong to it behind its newline."""

    line: bytes  # its beginning, for errors
    name: str
    values: Any
    payload_bytes: int


def read_head(line: bytes) -> Head:
    """Return what a line says. Raises MessageError."""
    if len(line) > MAX_LINE_BYTES:
        raise MessageError(f"a line of more than {MAX_LINE_BYTES} bytes")
    try:
        name, values, *rest = json.loads(line, parse_constant=_refuse_constant)
        (payload_bytes,) = map(_count, rest or (0,))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _no_message(line, error) from None
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise MessageError(f"{payload_bytes} bytes of payload; at most {MAX_PAYLOAD_BYTES} are taken")
    return Head(line[:_SHOWN_BYTES], name, values, payload_bytes)


def decode(head: Head, payload: bytes = b"") -> Message:
    """The message of a line and its payload. Raises MessageError; VersionError for a hello of another version."""
    if len(payload) != head.payload_bytes:
        raise MessageError(f"{len(payload)} of {head.payload_bytes} bytes of payload")
    try:
        return _DECODERS[head.name](head.values, payload)
    except VersionError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise _no_message(head.line, error) from None


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


_SHOWN_BYTES = 80
_Number = TypeVar("_Number", int, float)


def _no_message(line: bytes, error: Exception) -> MessageError:
    return MessageError(f"not a message of version {PROTOCOL_VERSION}: {line[:_SHOWN_BYTES]!r} ({error})")


def _little_endian(values: array[_Number]) -> array[_Number]:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values


def _token_ids(payload: bytes) -> array[int]:
    return _little_endian(array("i", payload))


def _logits(payload: bytes) -> array[float] | None:
    return _little_endian(array("f", payload)) if payload else None


def _as_json(value: object) -> list[int] | None:
    if isinstance(value, range):
        return [value.start, value.stop, value.step]
    if isinstance(value, HeadLayout):
        return [value.kv_heads, value.tp_size, value.stored_kv_heads]
    if isinstance(value, array):
        return None  # sent behind the line
    raise TypeError(f"{type(value).__name__} has no place in a message")


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _number(value: Any, at_least: float = 0.0) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= at_least):
        raise ValueError(f"{number} is not a finite number of at least {at_least:g}")
    return number


def _count(value: Any, at_least: int = 0) -> int:
    count = int(value)
    if count < at_least:
        raise ValueError(f"{count} is less than {at_least}")
    return count


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{value!r} is no line of text")
    return value


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, values))


def _positions(values: Sequence[Any]) -> Positions:
    return tuple(_range(*_ints(value)) for value in values)


def _range(start: int, stop: int, step: int) -> range:
    if start < 0 or step < 1:
        raise ValueError(f"positions from {start} in steps of {step}")
    return range(start, stop, step)


def _moves(values: Sequence[Any]) -> tuple[KvMove, ...]:
    return tuple(
        KvMove(int(source), int(target), int(segment), int(tokens), _positions(positions))
        for source, target, segment, tokens, positions in values
    )


def _chunk(values: Sequence[Any]) -> RunChunk:
    sequence, request, (group, moves, history, new), first_tag, is_last = values
    layout = ChunkLayout(_ints(group), _moves(moves), tuple(map(_positions, history)), tuple(map(_positions, new)))
    return RunChunk(int(sequence), int(request), layout, int(first_tag), bool(is_last))


def _report(values: Sequence[Any]) -> MemberReport:
    backlog_s, free_kv_tokens, max_chunk_tokens = values
    bound = None if max_chunk_tokens is None else _count(max_chunk_tokens, 1)
    return MemberReport(_number(backlog_s), _count(free_kv_tokens), bound)


def _version(value: Any) -> int:
    if value != PROTOCOL_VERSION:
        raise VersionError(f"protocol version {value} instead of {PROTOCOL_VERSION}")
    return int(value)


def _addresses(values: Sequence[Any]) -> tuple[PeerAddress, ...]:
    return tuple(PeerAddress(_text(host), _count(port)) for host, port in values)


def _peers(values: Sequence[Any]) -> Peers:
    return tuple(map(_addresses, values))


def _hello(values: Sequence[Any]) -> Hello:
    _version(values[0])
    version, name, node, model, layers, page_tokens, report, min_tokens, addresses = values
    return Hello(
        int(version),
        _text(name),
        _text(node),
        _text(model),
        _count(layers, 1),
        _count(page_tokens, 1),
        _report(report),
        _count(min_tokens),
        _addresses(addresses),
    )


def _offer(values: Sequence[Any], payload: bytes) -> OfferMessage:
    request, _, cached_tokens, waited_s, slack_s, destinations, room, fits_owner = values
    slack = None if slack_s is None else _number(slack_s, -math.inf)
    return OfferMessage(
        int(request),
        _token_ids(payload),
        _count(cached_tokens),
        _number(waited_s),
        slack,
        _destinations(destinations),
        None if room is None else _count(room),
        bool(fits_owner),
    )


def _destinations(values: Sequence[Any]) -> tuple[Destination, ...]:
    return tuple(
        Destination(_count(room), _text(receiver), _count(rank), HeadLayout(*_ints(heads)), _count(first_token))
        for room, receiver, rank, heads, first_token in values
    )


def _collect(values: Sequence[Any]) -> Collect:
    sequence, request, owner, members, moves, first_tag, is_last = values
    where = (int(owner), _ints(members), _moves(moves), int(first_tag))
    return Collect(int(sequence), int(request), *where, bool(is_last))


_DECODERS: dict[str, Callable[[Sequence[Any], bytes], Message]] = {
    "Hello": lambda v, _: _hello(v),
    "KeyRequest": lambda v, _: KeyRequest(_version(v[0]), _text(v[1])),
    "Challenge": lambda v, _: Challenge(_text(v[0]), _text(v[1])),
    "Proof": lambda v, _: Proof(_text(v[0])),
    "Welcome": lambda v, _: Welcome(int(v[0]), _text(v[1]), _number(v[2])),
    "Refusal": lambda v, _: Refusal(str(v[0])),
    "Heartbeat": lambda v, _: Heartbeat(),
    "ReportMessage": lambda v, _: ReportMessage(_report(v[0]), _count(v[1])),
    "Alive": lambda v, _: Alive(_number(v[0])),
    "OfferMessage": _offer,
    "CancelMessage": lambda v, _: CancelMessage(int(v[0])),
    "StepDone": lambda v, payload: StepDone(int(v[0]), StepTimes(*map(_number, v[1])), _count(v[2]), _logits(payload)),
    "StepFailed": lambda v, _: StepFailed(
        int(v[0]),
        str(v[1]),
        None if v[2] is None else int(v[2]),
        bool(v[3]),
        None if v[4] is None else _count(v[4]),
        bool(v[5]),
    ),
    "StreamFailed": lambda v, _: StreamFailed(int(v[0])),
    "Transferred": lambda v, _: Transferred(int(v[0]), _number(v[1]), _number(v[2])),
    "ChunkOrder": lambda v, payload: ChunkOrder(_chunk(v[0]), _token_ids(payload), _destinations(v[2]), _peers(v[3])),
    "CollectOrder": lambda v, _: CollectOrder(_collect(v[0]), _peers(v[1])),
    "GiveUp": lambda v, _: GiveUp(int(v[0]), _ints(v[1])),
    "Streamed": lambda v, _: Streamed(int(v[0]), _count(v[1]), bool(v[2])),
    "Computed": lambda v, payload: Computed(int(v[0]), _logits(payload)),
    "RollBack": lambda v, _: RollBack(int(v[0]), int(v[1]), _ints(v[2])),
    "Drop": lambda v, _: Drop(int(v[0]), _ints(v[1])),
    "Decline": lambda v, _: Decline(int(v[0]), int(v[1]), DeclineReason(v[2])),
}

"""ZeroMQ's wire protocol, ZMTP 3.0 without security, as far as a subscriber and a dealer need it.

Events are read on the router's own event loop: without ZeroMQ's threads, and a lost connection is seen at once, which a
SUB socket hides.
"""

from __future__ import annotations

from enum import Enum

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = _SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_READY = b"\x05READY"
_PING, _PONG = b"\x04PING", b"\x04PONG"
_TTL_BYTES = 2
_MAX_CONTEXT_BYTES = 16
_MAX_FRAMES = 16
MAX_FRAME_BYTES = 64 << 20


class ZmtpError(ValueError):
    """The peer does not speak ZMTP 3, or sends what no publisher would."""


class SocketKind(Enum):
    """The kind of socket that this side is."""

    SUB = b"SUB"
    DEALER = b"DEALER"


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return one frame."""
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body


def ready(kind: SocketKind) -> bytes:
    """Return the command with which this side ends the handshake."""
    properties = b""
    for name, value in ((b"Socket-Type", kind.value), (b"Identity", b"")):
        properties += bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
    return frame(_READY + properties, _COMMAND)


def subscription(topic: bytes) -> bytes:
    """Return the message with which a subscriber asks for all whose first frame begins with `topic`."""
    return frame(b"\x01" + topic)


def message(*parts: bytes) -> bytes:
    """Return a message of these frames."""
    return b"".join(frame(part, _MORE) for part in parts[:-1]) + frame(parts[-1])


class ZmtpReader:
    """Takes a peer's bytes as they come, and returns its messages; `replies` is what it must be answered."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.is_greeted = False
        self.is_ready = False  # the handshake is over: messages may be sent
        self.replies = b""
        self._max_frame_bytes = max_frame_bytes
        self._buffer = b""
        self._parts: list[bytes] = []  # of a message whose last frame has not come

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Return the messages that are whole now, as their frames. Raises ZmtpError."""
        buffer = self._buffer + data if self._buffer else data
        at, end = 0, len(buffer)
        messages: list[list[bytes]] = []
        if not self.is_greeted:
            self._check_signature(buffer)
            if end < len(GREETING):
                self._buffer = buffer
                return messages
            self._check_greeting(buffer)
            self.is_greeted = True
            at = len(GREETING)
        while end - at >= 2:
            flags = buffer[at]
            if flags & _LONG:
                if end - at < 9:
                    break
                size, body = int.from_bytes(buffer[at + 1 : at + 9], "big"), at + 9
            else:
                size, body = buffer[at + 1], at + 2
            if size > self._max_frame_bytes:
                raise ZmtpError(f"a frame of {size} bytes is longer than {self._max_frame_bytes}")
            if end - body < size:
                break
            at = body + size
            part = buffer[body:at]
            if flags & _COMMAND:
                self._on_command(part)
                continue
            self._parts.append(part)
            if not flags & _MORE:
                messages.append(self._parts)
                self._parts = []
            elif len(self._parts) > _MAX_FRAMES:
                raise ZmtpError(f"a message of more than {_MAX_FRAMES} frames")
        self._buffer = buffer[at:]
        return messages

    def _check_signature(self, buffer: bytes) -> None:
        if buffer[:1] not in (b"", b"\xff") or (len(buffer) > 9 and buffer[9] != 0x7F):
            raise ZmtpError("the peer does not speak ZeroMQ's protocol")

    def _check_greeting(self, buffer: bytes) -> None:
        if buffer[10] < 3:
            raise ZmtpError(f"the peer speaks version {buffer[10]} of ZeroMQ's protocol, which is older than 3")
        mechanism = buffer[12:32].rstrip(b"\0")
        if mechanism != b"NULL":
            raise ZmtpError(f"the peer wants security {mechanism.decode('latin-1')}, only NULL is known")

    def _on_command(self, body: bytes) -> None:
        if body.startswith(_READY):
            self.is_ready = True
        elif body.startswith(_PING):
            context = body[len(_PING) + _TTL_BYTES :][:_MAX_CONTEXT_BYTES]
            self.replies += frame(_PONG + context, _COMMAND)
        elif body.startswith(b"\x05ERROR"):
            raise ZmtpError(f"the peer refuses: {body[7:].decode('latin-1')}")

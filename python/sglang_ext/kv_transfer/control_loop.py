"""The one thread that owns the control channel: receives, keeps time, and sends what others put into its outbox."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from sglang_ext.kv_transfer.control_channel import ControlChannel
from sglang_ext.kv_transfer.control_codec import CodecError, ControlMessage, decode, encode

logger = logging.getLogger(__name__)


class ControlLoop:
    """Calls `on_message` for each message and `on_tick` every `tick_s` unless `is_idle()`, in its thread.

    Listens on `host` from construction on; handles nothing before `start`. `send` may be called from any thread.
    """

    def __init__(
        self,
        host: str,
        tick_s: float,
        *,
        on_message: Callable[[ControlMessage], None],
        on_tick: Callable[[], None],
        is_idle: Callable[[], bool],
    ) -> None:
        self._channel = ControlChannel(host)
        self.address = self._channel.address
        self.malformed_messages = 0
        self._tick_s = tick_s
        self._on_message = on_message
        self._on_tick = on_tick
        self._is_idle = is_idle
        self._outbox: deque[tuple[str, ControlMessage]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-handshake", daemon=True)

    @property
    def dropped_messages(self) -> int:
        """Messages that could not be queued for their peer."""
        return self._channel.dropped_messages

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def send(self, to: str, message: ControlMessage) -> None:
        """Messages to one peer leave in the order of these calls; they may be lost."""
        self._outbox.append((to, message))
        if threading.current_thread() is not self._thread:
            self._channel.wake()

    def close(self) -> None:
        """Send what is in the outbox and stop."""
        self._is_closed = True
        self._channel.wake()
        self._thread.join()

    def _run(self) -> None:
        next_tick_s = time.monotonic()
        while True:
            for frame in self._channel.receive(self._pause_s()):
                self._handle(frame)
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + self._tick_s
                self._guard(self._on_tick)
            is_closed = self._is_closed
            while self._outbox:
                to, message = self._outbox.popleft()
                self._channel.send(to, encode(message))
            if is_closed:
                self._channel.close()
                return

    def _pause_s(self) -> float | None:
        if self._outbox or self._is_closed:
            return 0.0
        return None if self._is_idle() else self._tick_s

    def _handle(self, frame: bytes) -> None:
        try:
            message = decode(frame)
        except CodecError as error:
            self.malformed_messages += 1
            logger.warning("ignored %s", error)
            return
        self._guard(partial(self._on_message, message))

    @staticmethod
    def _guard(handler: Callable[[], None]) -> None:
        """One request's trouble must not end the transfers of all others."""
        try:
            handler()
        except Exception:
            logger.exception("a handshake message or timer could not be handled")

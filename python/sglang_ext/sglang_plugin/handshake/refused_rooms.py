"""Requests that a prefill rank has given up, so that decode ranks that invite it later are told at once.

Without this, a request that is aborted on the prefill side before decode had memory for it would let decode wait
for minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from sglang_ext.identifiers import TransferId
from sglang_ext.kv_transfer.endpoint import HandshakeEndpoint

_LOOK_EVERY_S = 0.1
_MAX_ROOMS = 10_000


class _Refusal(NamedTuple):
    reason: str
    until_s: float


class RefusedRooms:
    """Watches, for `keep_s` after each refusal, for invitations that come too late. Thread-safe."""

    def __init__(self, endpoint: HandshakeEndpoint, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint = endpoint
        self._keep_s = keep_s
        self._clock = clock
        self._rooms: dict[TransferId, _Refusal] = {}  # oldest first
        self._lock = threading.Lock()
        self._is_wanted = threading.Event()
        threading.Thread(target=self._watch, name="kv-refused-rooms", daemon=True).start()

    def refuse(self, room: TransferId, reason: str) -> None:
        """Tell every decode rank that has invited for this room, and those that will."""
        with self._lock:
            self._rooms.pop(room, None)
            self._rooms[room] = _Refusal(reason, self._clock() + self._keep_s)
            while len(self._rooms) > _MAX_ROOMS:
                del self._rooms[next(iter(self._rooms))]
        self._tell(room, reason)
        self._is_wanted.set()

    def forget(self, room: TransferId) -> None:
        """A new request has this room."""
        with self._lock:
            self._rooms.pop(room, None)

    def _tell(self, room: TransferId, reason: str) -> None:
        for invitation in self._endpoint.invitations(room):
            if invitation.withdrawn is None:
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
                self._tell(room, refusal.reason)
            time.sleep(_LOOK_EVERY_S)

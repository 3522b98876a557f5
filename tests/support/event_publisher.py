"""A publisher of KV events as SGLang's: batches by a PUB socket, what it keeps of them by a ROUTER socket."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


def stored(keys: list[int], medium: str = "GPU") -> dict[str, Any]:
    """Return the event that these blocks of 16 tokens are held now."""
    return {
        "type": "BlockStored",
        "block_hashes": keys,
        "parent_block_hash": None,
        "token_ids": list(range(16 * len(keys))),
        "block_size": 16,
        "lora_id": None,
        "medium": medium,
    }


def removed(keys: list[int], medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": keys, "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


class EventPublisher:
    """One rank's publisher on ports of its own; `restart` begins again on the same ports, with number 0."""

    def __init__(self, kept: int = 10_000, has_replay: bool = True) -> None:
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self.number = 0
        self.replays = 0  # that were asked for
        self.port = self.replay_port = 0
        self._has_replay = has_replay
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._bind()

    def _bind(self) -> None:
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for name, bound in (("port", self._publisher), ("replay_port", self._router)):
            known = getattr(self, name)
            if known:
                bound.bind(f"tcp://127.0.0.1:{known}")
            else:
                setattr(self, name, bound.bind_to_random_port("tcp://127.0.0.1"))
        self._is_stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def publish(self, *events: dict[str, Any], is_lost: bool = False) -> None:
        """Publish a batch, which is kept for replays and may be lost on its way."""
        self.publish_bytes(msgspec.msgpack.encode([time.time(), list(events), 0]), is_lost)

    def publish_bytes(self, payload: bytes, is_lost: bool = False) -> None:
        with self._lock:
            number, self.number = self.number, self.number + 1
            self.kept.append((number, payload))
        if not is_lost:
            self._publisher.send_multipart((b"", number.to_bytes(8, "big"), payload))

    def restart(self) -> None:
        self.stop()
        self.kept.clear()
        self.number = 0
        self._bind()

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()
        self._publisher.close(linger=0)
        self._router.close(linger=0)
        self._context.term()

    def _serve(self) -> None:
        while not self._is_stopping:
            if not self._router.poll(20):
                continue
            client, _, first = self._router.recv_multipart()
            self.replays += 1
            with self._lock:
                kept = [batch for batch in self.kept if batch[0] >= int.from_bytes(first, "big")]
            for number, payload in kept:
                self._router.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
            self._router.send_multipart((client, b"", b"", END, b""))

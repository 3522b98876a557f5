"""A bounded number of receive backends, each free, or held by one request and busy or idle there.

free ──take──▶ busy ──put_back──▶ idle ──take by the holder──▶ busy
 ▲              │                  │  └──take by another, after hold_idle_s──▶ busy (held by the other)
 └───drop───────┴───release────────┘
"""

from __future__ import annotations

from sglang_ext.identifiers import TransferId


class BackendPool:
    """`count` backends, or no limit: then every request gets None as often as it likes."""

    def __init__(self, count: int | None, hold_idle_s: float | None) -> None:
        self._is_unlimited = count is None
        self._hold_idle_s = hold_idle_s
        self._free = list(reversed(range(count or 0)))
        self._holder: dict[int, TransferId] = {}  # backend → transfer_id
        self._idle_since_s: dict[int, float] = {}  # held and not busy, longest idle first

    @property
    def free_count(self) -> int:
        """Backends that no request holds; 0 where there is no limit."""
        return len(self._free)

    @property
    def has_spare(self) -> bool:
        """Return whether any request could be served now or later without a backend becoming idle first."""
        return self._is_unlimited or bool(self._free or self._idle_since_s)

    def held_by(self, transfer_id: TransferId) -> tuple[int, ...]:
        """Backends of a request, busy and idle."""
        return tuple(backend for backend, holder in self._holder.items() if holder == transfer_id)

    def can_take(self, transfer_id: TransferId, now_s: float) -> bool:
        """Return whether `take` would find a backend."""
        return self._is_unlimited or self._find(transfer_id, now_s) is not None

    def take(self, transfer_id: TransferId, now_s: float) -> int | None:
        """Make a backend busy for `transfer_id`: its own, a free one, or one idle for too long elsewhere.

        None where there is no limit. Raises ValueError when `can_take` is false.
        """
        if self._is_unlimited:
            return None
        backend = self._find(transfer_id, now_s)
        if backend is None:
            raise ValueError(f"no backend for transfer {transfer_id}")
        self._idle_since_s.pop(backend, None)
        if self._free and self._free[-1] == backend:
            self._free.pop()
        self._holder[backend] = transfer_id
        return backend

    def put_back(self, backend: int | None, now_s: float) -> None:
        """A busy backend has received its chunk; its request keeps it."""
        if backend is not None:
            self._idle_since_s[backend] = now_s

    def drop(self, backend: int | None) -> None:
        """A busy backend becomes free."""
        if backend is not None:
            del self._holder[backend]
            self._free.append(backend)

    def release(self, transfer_id: TransferId) -> None:
        """The idle backends of a request become free."""
        for backend in self.held_by(transfer_id):
            if self._idle_since_s.pop(backend, None) is not None:
                self.drop(backend)

    def trim(self, transfer_id: TransferId, keep: int) -> None:
        """Idle backends of a request become free until it holds no more than `keep`."""
        surplus = len(self.held_by(transfer_id)) - keep
        for backend in self.held_by(transfer_id):
            if surplus <= 0:
                return
            if self._idle_since_s.pop(backend, None) is not None:
                self.drop(backend)
                surplus -= 1

    def _find(self, transfer_id: TransferId, now_s: float) -> int | None:
        for backend in self._idle_since_s:
            if self._holder[backend] == transfer_id:
                return backend
        if self._free:
            return self._free[-1]
        if self._hold_idle_s is not None:
            for backend, since_s in self._idle_since_s.items():
                if now_s - since_s >= self._hold_idle_s:
                    return backend
        return None

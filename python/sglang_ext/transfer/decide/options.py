"""The time limits and the number of backends of the handshake, resolved once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import isfinite


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeOptions:
    """Raises ValueError, in one line that names the option, for a value that makes no sense."""

    receive_backends: int | None = field(
        default=None,
        metadata={
            "help": "Chunks received at a time, one backend (buffers, communicator) each. "
            "Default: no limit, for transports that need no buffers."
        },
    )
    hold_idle_s: float | None = field(
        default=1.0,
        metadata={
            "help": "A request keeps its backends until it is complete, but a backend that was idle for this long goes "
            "to a request that waits. None: it keeps them, as the Tetris paper has it."
        },
    )
    retry_s: float = field(default=0.2, metadata={"help": "Retransmit what has not been answered after this."})
    heartbeat_s: float = field(default=1.0, metadata={"help": "Send a report at least this often."})
    lease_s: float = field(default=10.0, metadata={"help": "A peer that sends nothing for this long is lost."})
    quarantine_s: float = field(
        default=60.0,
        metadata={
            "help": "Slots that a lost sender may still write to are kept for this long after the loss, where the "
            "transport cannot bar it from writing. At least the longest time that one write may take."
        },
    )
    stall_timeout_s: float = field(
        default=300.0,
        metadata={"help": "A request in which nothing moves for this long, and not for want of a backend, fails."},
    )
    max_early_requests: int = field(
        default=4096, metadata={"help": "Requests that may shake hands before this instance has slots for them."}
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            name = option.name
            if value is None:
                if option.default is not None and name != "hold_idle_s":
                    raise ValueError(f"{name} must be a number")
            elif not isfinite(value):
                raise ValueError(f"{name} must be finite")
            elif value < 0 or (value == 0 and name not in ("hold_idle_s", "quarantine_s")):
                raise ValueError(f"{name} must be positive")
        if self.heartbeat_s < self.retry_s:
            raise ValueError("heartbeat_s must not be shorter than retry_s")
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                "lease_s must be at least two heartbeats (heartbeat_s), or every lost message is a lost peer"
            )

    @property
    def memory_s(self) -> float:
        """Return how long an ended request is remembered: until its last sender has given up asking for the outcome."""
        return 2 * self.lease_s

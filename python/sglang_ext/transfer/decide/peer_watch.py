"""Decides which peers answer, also while nothing is sent to them. Without I/O.

A sender's reports and a receiver's answers show that both are there while a request moves. Between two attempts, before
the handshake and while an instance is idle nothing does: a rank that is stopped or gone would hold a request until
`stall_timeout_s`, or the next request would find out. So peers that were needed recently are probed. A peer is lost
when it left a probe unanswered for `lease_s`, not when it was quiet: this process may itself have been stopped.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_ext.transfer.decide.options import HandshakeOptions

_IDLE_PROBES_PER_LEASE = 3


class _Watch:
    """One peer."""

    def __init__(self, now_s: float) -> None:
        self.needed_s = now_s  # by a request that waits for it
        self.noted_s = now_s
        self.probed_s: float | None = None
        self.unanswered_since_s: float | None = None  # the first probe that has not been answered
        self.epoch: int | None = None
        self.is_known_silent = False


class PeerWatches:
    """The peers of one endpoint, by address.

    `on_timer` wants to be called at least every `retry_s`, after what has arrived was handed over, unless `is_idle`.
    """

    def __init__(self, options: HandshakeOptions) -> None:
        self._options = options
        self._watches: dict[str, _Watch] = {}

    @property
    def is_idle(self) -> bool:
        """Return whether no peer is watched."""
        return not self._watches

    def need(self, address: str, now_s: float) -> None:
        """It may be needed: it is watched for twice `stall_timeout_s` from now on."""
        self._watches.setdefault(address, _Watch(now_s)).noted_s = now_s

    def on_alive(self, address: str, epoch: int, now_s: float) -> None:
        """A probe has been answered. A late answer counts: the peer goes on."""
        watch = self._watches.get(address)
        if watch is not None:
            watch.epoch = epoch
            watch.unanswered_since_s = None

    def on_timer(self, now_s: float) -> Iterator[str]:
        """Whom to probe now."""
        for address, watch in list(self._watches.items()):
            if now_s - max(watch.noted_s, watch.needed_s) >= 2 * self._options.stall_timeout_s:
                del self._watches[address]
                continue
            is_needed = now_s - watch.needed_s < self._options.heartbeat_s
            interval_s = self._options.heartbeat_s if is_needed else self._options.lease_s / _IDLE_PROBES_PER_LEASE
            if watch.probed_s is None or now_s - watch.probed_s >= interval_s:
                watch.probed_s = now_s
                if watch.unanswered_since_s is None:
                    watch.unanswered_since_s = now_s
                yield address

    def loss_reason(self, address: str, since_s: float, now_s: float, epoch: int | None = None) -> str | None:
        """One line that says why a request that has waited for this peer since then waits in vain, or None.

        A peer that is known to be silent gets another chance for a heartbeat. `epoch`: the incarnation that is meant.
        """
        watch = self._watches.setdefault(address, _Watch(now_s))
        watch.needed_s = now_s
        if epoch is not None and watch.epoch is not None and watch.epoch != epoch:
            return f"{address} has been started again"
        if self._is_silent(watch, now_s) and now_s - since_s >= 2 * self._options.heartbeat_s:
            return f"lost {address}: silent for {self._options.lease_s:g} s"
        return None

    def silent_count(self, now_s: float) -> int:
        """Watched peers that do not answer."""
        return sum(self._is_silent(watch, now_s) for watch in self._watches.values())

    def changes(self, now_s: float) -> Iterator[tuple[str, bool]]:
        """Peers that have become silent (True) or answer again since the last call."""
        for address, watch in self._watches.items():
            is_silent = self._is_silent(watch, now_s)
            if is_silent != watch.is_known_silent:
                watch.is_known_silent = is_silent
                yield address, is_silent

    def _is_silent(self, watch: _Watch, now_s: float) -> bool:
        since_s = watch.unanswered_since_s
        return since_s is not None and now_s - since_s >= self._options.lease_s

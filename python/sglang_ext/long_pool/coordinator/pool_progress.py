"""Describes what a long pool has under way: ordered steps that are not all answered, and KV on its way straight to
decode."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_ext.long_pool.coordinator.pool_history import StepRecord
from sglang_ext.long_pool.decide.orders import Collect, RunChunk
from sglang_ext.long_pool.messages import AddressedMessage, Destination, OfferMessage, Streamed


@dataclass(slots=True)
class OpenStep:
    """One of them."""

    order: RunChunk | Collect
    record: StepRecord
    waiting: set[int]  # members that have not answered
    failed_s: float | None = None  # when the first one has failed
    is_unsent: bool = True  # nothing of it has gone to decode, as far as has been answered


class OpenSteps:
    """All of them, by sequence."""

    def __init__(self) -> None:
        self._steps: dict[int, OpenStep] = {}

    def begin(self, order: RunChunk | Collect, record: StepRecord) -> None:
        """A step has been ordered."""
        self._steps[order.sequence] = OpenStep(order, record, set(record.members))

    def answer(self, sequence: int, instance: int, now_s: float, *, is_done: bool) -> OpenStep | None:
        """The step that a member has answered for, with `record.ended_s` where it was the last one to.

        None for an answer that is late, comes twice or from a member that was not asked.
        """
        step = self._steps.get(sequence)
        if step is None or instance not in step.waiting:
            return None
        step.waiting.discard(instance)
        if not is_done:
            self._fail(step, now_s)
        self._close(sequence, step, now_s)
        return step

    def lose(self, instance: int, now_s: float) -> list[OpenStep]:
        """A member has gone: the steps that it was in have failed, also where it had answered."""
        concerned = [(sequence, step) for sequence, step in self._steps.items() if instance in step.record.members]
        for sequence, step in concerned:
            step.waiting.discard(instance)
            self._fail(step, now_s)
            self._close(sequence, step, now_s)
        return [step for _, step in concerned]

    def stuck(self, failed_before_s: float) -> list[int]:
        """Members that have not answered for steps in which another one failed before this time."""
        late = (step for step in self._steps.values() if step.failed_s is not None and step.failed_s < failed_before_s)
        return [instance for step in late for instance in sorted(step.waiting)]

    def _fail(self, step: OpenStep, now_s: float) -> None:
        step.record.has_failed = True
        step.failed_s = now_s if step.failed_s is None else step.failed_s

    def _close(self, sequence: int, step: OpenStep, now_s: float) -> None:
        if not step.waiting:
            step.record.ended_s = now_s
            del self._steps[sequence]


@dataclass(slots=True)
class _Entry:
    owner: int
    destinations: tuple[Destination, ...]
    end_tokens: int
    end_before_tokens: int  # the last chunk
    is_intact: bool = True
    members: set[int] = field(default_factory=set)  # members that were ordered to send


class StreamLedger:
    """For all requests in the pool: where members send their KV straight to decode, and what they have sent.

    As long as nothing fails, members send each chunk as they compute it, and the request's own instance the rest. With
    the first chunk that fails once something of it may have been sent, or member that is lost, nothing more of this
    request is sent in this way: its own instance sends everything.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._out: list[AddressedMessage] = []

    def offered(self, owner: int, message: OfferMessage) -> None:
        """A request has come into the pool."""
        if message.destinations:
            self._entries[message.request] = _Entry(owner, message.destinations, *2 * (message.cached_tokens,))

    def ordered(self, order: RunChunk) -> tuple[Destination, ...]:
        """A chunk is ordered; where its members send it. Its owner is notified first (`take_messages`)."""
        entry = self._entries.get(order.request)
        if entry is None or not entry.is_intact:
            return ()
        entry.members.update(order.layout.group)
        entry.end_before_tokens = entry.end_tokens
        entry.end_tokens = 1 + max(part[-1] for positions in order.layout.new for part in positions)
        self._notify_owner(order.request, entry)
        return entry.destinations

    def taken_back(self, request: int) -> None:
        """The last chunk has failed before anything of it was sent: all is as before it."""
        entry = self._entries.get(request)
        if entry is not None and entry.is_intact:
            entry.end_tokens = entry.end_before_tokens
            self._notify_owner(request, entry)

    def broken(self, request: int) -> None:
        """A chunk has failed of which something may have been sent."""
        entry = self._entries.get(request)
        if entry is not None and entry.is_intact:
            entry.is_intact = False
            if entry.members:
                self._notify_owner(request, entry)

    def lost(self, instance: int) -> None:
        """A member has gone, with what it had not sent yet."""
        for request, entry in self._entries.items():
            if instance in entry.members:
                self.broken(request)

    def ended(self, request: int) -> None:
        """A request has left the pool."""
        self._entries.pop(request, None)

    def take_messages(self) -> list[AddressedMessage]:
        """Return what is to be sent before anything else."""
        out, self._out = self._out, []
        return out

    def _notify_owner(self, request: int, entry: _Entry) -> None:
        self._out.append(AddressedMessage(entry.owner, Streamed(request, entry.end_tokens, entry.is_intact)))

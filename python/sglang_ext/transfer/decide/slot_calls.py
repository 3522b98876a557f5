"""Decides when a prefill instance calls for decode's slots: shortly before the turn of a long prompt, not while it
queues.

    long prompt arrives ──▶ decode invites without slots ──▶ waits ──due──▶ called ──▶ decode takes slots, invites again

Decode's room still admits a request to prefill's own queue, so nothing is computed that decode cannot take. What a
long prompt does without is room at decode while more than `lookahead_tokens` are to be computed before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sglang_ext.identifiers import TransferId

ANSWER_S = 0.5
"""Time that decode has to take slots before the next prompt is called as well. It answers within an iteration where it
has room; where it has none, another decode instance may have some."""


class QueuedWork(NamedTuple):
    """A prompt that this instance will compute and needs no call: it is in the queue, or between two chunks."""

    arrival_s: float
    left_tokens: int


class LatePrompt(NamedTuple):
    """A prompt for which decode has no slots yet."""

    transfer_id: TransferId
    arrival_s: float
    prompt_tokens: int
    is_invited: bool = True  # a decode rank has invited without slots


class SlotCalls:
    """Describes which late prompts are called, in the order of their arrival. Clocks are the caller's.

    Only what arrived before a prompt counts as before it, so later arrivals do not move it away from its turn, and is
    called in the end. Without `lookahead_tokens` each is called as soon as decode knows of it.
    """

    def __init__(self, lookahead_tokens: int | None) -> None:
        self._lookahead_tokens = lookahead_tokens
        self._called_s: dict[TransferId, float] = {}

    def due(self, work: Iterable[QueuedWork], late: Sequence[LatePrompt], now_s: float) -> list[TransferId]:
        """Those to be called now, each once. `late`: all that wait for slots; others are forgotten."""
        self._called_s = {
            request.transfer_id: self._called_s[request.transfer_id]
            for request in late
            if request.transfer_id in self._called_s
        }
        queued = sorted(work)
        ahead_tokens, position, due = 0, 0, []
        for prompt in sorted(late, key=_arrival_s):
            while position < len(queued) and queued[position].arrival_s <= prompt.arrival_s:
                ahead_tokens += queued[position].left_tokens
                position += 1
            if self._lookahead_tokens is not None and ahead_tokens > self._lookahead_tokens:
                break
            called_s = self._called_s.get(prompt.transfer_id)
            if called_s is None and prompt.is_invited:
                self._called_s[prompt.transfer_id] = called_s = now_s
                due.append(prompt.transfer_id)
            if called_s is not None and now_s - called_s < ANSWER_S:
                ahead_tokens += prompt.prompt_tokens
        return due


def _arrival_s(prompt: LatePrompt) -> float:
    return prompt.arrival_s

"""The tenants of a router: the limits of each, and the account by which a request of its keys is let in or refused."""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import NamedTuple

from sglang_ext.types import PRIORITIES, TenantLimits
from sglang_ext_router.decide.budgets import Bucket, header_lines

NORMAL_RANK = PRIORITIES.index("normal")
FIRST_OUTPUT_TOKENS = 256.0  # of a reply without a bound, until the tenant's replies say more
LEARNING_SHARE = 0.05  # of the latest reply in the mean
MIN_RETRY_S = 1.0


class Exhausted(Enum):
    """The budget that a request was refused for."""

    REQUESTS = "requests"
    TOKENS = "tokens"


class BudgetRefusal(NamedTuple):
    """A request that exceeds a budget. `retry_s` is infinite where it exceeds what the budget ever holds."""

    budget: Exhausted
    limit: int
    retry_s: float


class TenantAccount:
    """One tenant at one router: what its requests may still use of this minute, and how long its replies are."""

    __slots__ = ("limits", "output_tokens", "requests", "tokens")

    def __init__(self, limits: TenantLimits, now_s: float, parts: int = 1) -> None:
        self.limits = limits
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.output_tokens = FIRST_OUTPUT_TOKENS  # mean of the replies so far
        self.change(limits, now_s, parts)

    def change(self, limits: TenantLimits, now_s: float, parts: int) -> None:
        """Take other limits, or another number of routers; what is used up stays used up."""
        self.limits = limits
        self.requests = _changed(self.requests, limits.requests_per_minute, now_s, parts)
        self.tokens = _changed(self.tokens, limits.tokens_per_minute, now_s, parts)

    @property
    def has_budgets(self) -> bool:
        """Return whether anything per minute is limited."""
        return self.requests is not None or self.tokens is not None

    def reply_tokens(self, max_new_tokens: int) -> int:
        """Return the tokens that a reply is expected to have: its bound or, without one (0), the mean so far."""
        return max_new_tokens or int(self.output_tokens)

    def reserve(self, tokens: int, now_s: float) -> BudgetRefusal | None:
        """Take one request and `tokens` from the budgets; nothing is taken where one of them lacks it."""
        requests, budget = self.requests, self.tokens
        if requests is not None and not requests.take(1, now_s):
            return BudgetRefusal(Exhausted.REQUESTS, round(requests.per_minute), _retry_s(requests, 1, now_s))
        if budget is not None and not budget.take(tokens, now_s):
            if requests is not None:
                requests.settle(1, 0)
            return BudgetRefusal(Exhausted.TOKENS, round(budget.per_minute), _retry_s(budget, tokens, now_s))
        return None

    def settle(self, reserved_tokens: int, used_tokens: int, *, was_admitted: bool = True) -> None:
        """A request has ended: what it did not use of its reservation is there again.

        One that was not admitted, as the queue was full or its time was over, does not count as a request either.
        """
        if self.requests is not None and not was_admitted:
            self.requests.settle(1, 0)
        if self.tokens is not None:
            self.tokens.settle(reserved_tokens, used_tokens)

    def learn_output(self, tokens: float) -> None:
        """A reply has ended; `tokens` of one sequence."""
        self.output_tokens += LEARNING_SHARE * (tokens - self.output_tokens)

    def header_lines(self, now_s: float, requests_elsewhere: float, tokens_elsewhere: float) -> bytes:
        """Return the header lines that show the budgets to clients; the other routers have the rest of them."""
        requests, tokens = self.requests, self.tokens
        lines = ""
        if requests is not None:
            requests.fill(now_s)
            lines = header_lines("requests", requests, requests_elsewhere)
        if tokens is not None:
            tokens.fill(now_s)
            lines += header_lines("tokens", tokens, tokens_elsewhere)
        return lines.encode()


def bounded_priority(asked: str | None, limits: TenantLimits) -> str | None:
    """Return the priority of a request: as asked, and no more urgent than the tenant's highest.

    None stays None, which is normal, where the tenant may have that.
    """
    if limits.max_priority == PRIORITIES[0]:
        return asked
    return asked if priority_rank(asked) >= PRIORITIES.index(limits.max_priority) else limits.max_priority


def priority_rank(priority: str | None) -> int:
    """Return the rank of a request's priority, 0 for the most urgent; one without a priority is normal."""
    return NORMAL_RANK if priority is None else PRIORITIES.index(priority)


def _changed(bucket: Bucket | None, per_minute: int, now_s: float, parts: int) -> Bucket | None:
    if not per_minute:
        return None
    if bucket is None:
        return Bucket(per_minute, now_s, parts)
    if (bucket.per_minute, bucket.parts) != (per_minute, parts):
        bucket.change(per_minute, parts, now_s)
    return bucket


def _retry_s(bucket: Bucket, units: float, now_s: float) -> float:
    wait_s = bucket.wait_s(units, now_s)
    return wait_s if wait_s == inf else max(MIN_RETRY_S, wait_s)

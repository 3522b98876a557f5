"""The tenants of one router process: who a key belongs to, and the account of each request.

    find -> limit_priority -> charge -> record_route -> settle

`find` names the tenant of a key, `charge` reserves what a request is expected to use, or refuses it, `record_route`
takes what is cached out of its work, and `settle` replaces the reservation by what was used, and counts it. Decisions
are those of `decide/tenants.py`. The routers of a group divide budgets and concurrency (`message`, `take`, `share`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from sglang_ext.tenants_file import RATE_LIMIT_CODE, TOO_LARGE_CODE, TenantKeys
from sglang_ext.types import DEFAULT_TENANT
from sglang_ext_router.decide.admission import AdmissionQueue, Claim, Demand, fair_shares
from sglang_ext_router.decide.budget_exchange import BudgetExchange
from sglang_ext_router.decide.budgets import Bucket
from sglang_ext_router.decide.tenants import (
    BudgetRefusal,
    Exhausted,
    TenantAccount,
    bounded_priority,
    priority_rank,
)
from sglang_ext_router.tenants.usage import FLUSH_S, UsageCount, UsageKey, UsageLedger, read_usage_rows, utc_day

if TYPE_CHECKING:
    from sglang_ext_router.config import RouterConfig
    from sglang_ext_router.observe.metrics import RouterMetrics
    from sglang_ext_router.observe.request_record import RequestRecord
    from sglang_ext_router.request.prepared_request import ClientHeaders, PreparedRequest

LONELY_AFTER_S = 3.0  # without a message of another router of its group, a router takes itself to be the only one
NO_DEMAND = Demand(0, 0)
_UNITS = ("requests", "tokens")


class Charge:
    """One request in its tenant's account: what was reserved for it, and what it is refused for."""

    __slots__ = ("account", "claim", "estimated_tokens", "prompt_tokens", "refusal", "reply_headers")

    def __init__(self, account: TenantAccount, prompt_tokens: int, estimated_tokens: int) -> None:
        self.account = account
        self.prompt_tokens = prompt_tokens  # of all its prompts, estimated
        self.estimated_tokens = estimated_tokens  # of prompts and replies; reserved unless it is refused
        self.refusal: BudgetRefusal | None = None
        self.claim: Claim | None = None  # to a place, unless it is refused
        self.reply_headers = b""  # header lines for its client


class _Tally:
    """The usage of one tenant, model and length class that is not in the ledger yet."""

    __slots__ = ("output_tokens", "prompt_tokens", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.output_tokens = 0


class Tenants:
    """The accounts of all tenants, which follow the file."""

    def __init__(self, config: RouterConfig, origin: int, metrics: RouterMetrics, now_s: float) -> None:
        """Read the file; `origin` is this router's number in its group.

        Raise ApiKeyFileError or sqlite3.Error if the file or the database cannot be used.
        """
        self._keys = TenantKeys(config.tenants_file)
        self._metrics = metrics
        self._origin = origin
        self._is_in_group = bool(config.peer_port)
        self._processes = config.processes
        # Routers that divide the budgets: at first the configured ones, as their first messages take a moment.
        self._parts = max(len(config.peer), 2) if self._is_in_group else config.processes
        self._alone_from_s = now_s + LONELY_AFTER_S
        self._has_joined = not self._is_in_group  # its group, whose other routers leave it its part from then on
        self._concurrency: dict[str, int] = {}  # this router's share of it, of each tenant that has a limit
        self._demands: dict[int, dict[str, Demand]] = {}  # of the other routers
        self.accounts: dict[str, TenantAccount] = {}
        self._buckets: dict[str, Bucket] = {}
        self._take_limits(now_s)
        self.ledger = UsageLedger(config.usage_db, "0" if self._is_in_group else str(origin))
        self._exchange = BudgetExchange(self.ledger.origin)
        self._left_s: dict[str, float] = {}  # when this router's part of each budget was written last, before its start
        self._restore_levels(now_s)
        self._tallies: dict[tuple[str, str, str], _Tally] = {}  # of what ended since the last `collect_usage`
        self._save_due_s = 0.0
        self._saving: asyncio.Future[None] | None = None

    # -- keys -------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> str | None:
        """Return the name of the tenant that has this key; None if none has it."""
        return self._keys.find(key)

    def reload(self, now_s: float) -> None:
        """Read the file again if it has changed; where it cannot be used, log the reason and keep the tenants."""
        if self._keys.reload(now_s):
            self._take_limits(now_s)

    def sender_for(self, name: str, named: str) -> str | None:
        """Return the tenant of a request that names one; None where its own may not send for that one."""
        account = self.accounts.get(name)
        may = named == name or (account is not None and account.limits.sends_for_others and named in self.accounts)
        return named if may else None

    def _take_limits(self, now_s: float) -> None:
        accounts: dict[str, TenantAccount] = {}
        for name, limits in self._keys.limits.items():
            account = self.accounts.get(name)
            if account is None:
                account = TenantAccount(limits, now_s, self._parts)
            else:
                account.change(limits, now_s, self._parts)
            accounts[name] = account
        self.accounts = accounts
        self._find_buckets()

    def _find_buckets(self) -> None:
        self._buckets = {
            f"{name} {unit}": bucket
            for name, account in self.accounts.items()
            for unit, bucket in zip(_UNITS, (account.requests, account.tokens), strict=True)
            if bucket is not None
        }

    def _restore_levels(self, now_s: float) -> None:
        """Go on with the budgets as they were left. Without a database a router of a group begins without any.

        In a group a part fills again once this router has joined it.
        """
        left = self.ledger.read_levels(time.time())
        for name, bucket in self._buckets.items():
            if name in left:
                bucket.level, ago_s = left[name]
                bucket.fill_from(now_s - ago_s)
                self._left_s[name] = now_s - ago_s
            elif self._is_in_group:
                bucket.level = 0.0
            if self._is_in_group:
                bucket.fill_from(self._alone_from_s)

    def _join(self, now_s: float) -> None:
        """Fill the parts from now on, and with what was not filled in the meantime: since the other routers missed
        this one, they have divided its part."""
        self._has_joined = True
        for name, bucket in self._buckets.items():
            bucket.fill_from(max(self._left_s.get(name, now_s), now_s - LONELY_AFTER_S))

    # -- one request ------------------------------------------------------------------------------------

    def account(self, name: str) -> TenantAccount:
        """Return a tenant's account; that of the default tenant for a name that the file no longer has."""
        return self.accounts.get(name) or self.accounts[DEFAULT_TENANT]

    def limit_priority(self, name: str, headers: ClientHeaders) -> ClientHeaders:
        """Return the headers with a priority that is no more urgent than the tenant's highest."""
        priority = bounded_priority(headers.priority, self.account(name).limits)
        return headers if priority == headers.priority else headers._replace(priority=priority)

    def charge(self, name: str, request: PreparedRequest, now_s: float) -> Charge:
        """Reserve what a request is expected to use; its charge has a `refusal` where that is not there."""
        account = self.account(name)
        prompt_tokens = _all_prompt_tokens(request)
        estimated = prompt_tokens
        if not request.is_undivided:
            estimated += account.reply_tokens(request.prompt.max_new_tokens) * request.prompt.sequence_count
        charge = Charge(account, prompt_tokens, estimated)
        if account.has_budgets:
            charge.refusal = account.reserve(estimated, now_s)
            requests_elsewhere, tokens_elsewhere = self._elsewhere(account)
            charge.reply_headers = account.header_lines(now_s, requests_elsewhere, tokens_elsewhere)
        limits = account.limits
        if charge.refusal is None:
            rank = priority_rank(request.headers.priority)
            concurrency = self._concurrency.get(limits.name, limits.concurrency)
            charge.claim = Claim(limits.name, limits.weight, concurrency, rank, max(1, estimated))
        else:
            self._metrics.count_tenant_refusal(limits.name, charge.refusal.budget.value)
        return charge

    def record_route(self, charge: Charge, cached_tokens: int, admission: AdmissionQueue[Any]) -> None:
        """The instances of an admitted request are chosen: its tenant is not charged what they are believed to hold."""
        claim, work_tokens = charge.claim, max(1, charge.estimated_tokens - cached_tokens)
        if claim is not None and claim.work_tokens != work_tokens:
            admission.correct(claim, work_tokens)

    def settle(self, charge: Charge, record: RequestRecord, admission: AdmissionQueue[Any]) -> None:
        """A request has ended: count what it has used, which replaces its reservation."""
        prompt_tokens, output_tokens = _used(charge, record)
        used_tokens = prompt_tokens + output_tokens
        account, request, route = charge.account, record.request, record.route
        record.tenant, record.used_tokens = account.limits.name, (prompt_tokens, output_tokens)
        if request is not None and record.sent_s is not None and (used_tokens or record.outcome == "ok"):
            length_class = record.length_class
            key = (record.tenant, request.model.name, "none" if length_class is None else str.__str__(length_class))
            tally = self._tallies.get(key)
            if tally is None:
                self._tallies[key] = tally = _Tally()
            tally.requests += 1
            tally.prompt_tokens += prompt_tokens
            tally.output_tokens += output_tokens
        if charge.claim is not None:
            account.settle(charge.estimated_tokens, used_tokens, was_admitted=record.is_admitted)
            if record.is_admitted:
                cached_tokens = 0 if route is None else route.decision.cached_tokens
                admission.correct(charge.claim, max(0, used_tokens - cached_tokens))
            if record.outcome == "ok" and record.output_tokens is not None and request is not None:
                account.learn_output(record.output_tokens / request.prompt.sequence_count)

    def collect_usage(self, now_s: float) -> None:
        """Take what has ended since the last call into the ledger and the metrics."""
        if not self._tallies:
            return
        tallies, self._tallies = self._tallies, {}
        day = utc_day()
        for (name, model, length_class), tally in tallies.items():
            count = UsageCount(tally.requests, tally.prompt_tokens, tally.output_tokens)
            self._metrics.count_usage(name, model, length_class, *count)
            self.ledger.add(name, model, length_class, count, now_s, day)

    async def read_usage(
        self, first_day: str, last_day: str, tenant: str | None, now_s: float
    ) -> list[tuple[UsageKey, UsageCount]]:
        """Return what tenants, or one of them, have used at all routers. Raise sqlite3.Error as the ledger does."""
        self.collect_usage(now_s)
        return await asyncio.to_thread(self.ledger.read_totals, self.ledger.rows_to_save(), first_day, last_day, tenant)

    # -- several routers --------------------------------------------------------------------------------

    def message(self, admission: AdmissionQueue[Any], now_s: float) -> dict[str, Any]:
        """Return what the other routers are sent."""
        self.collect_usage(now_s)
        return {
            **self._exchange.message(self._buckets, now_s),
            "demands": {name: tuple(demand) for name, demand in admission.demands().items() if demand.total},
            "usage": [tuple(row) for row in self.ledger.rows_to_send(now_s)],
        }

    def take(self, peer: int, message: Mapping[str, Any]) -> None:
        """Take what another router has sent. ValueError, TypeError or LookupError where it cannot be read."""
        demands = {name: Demand(int(running), int(waits)) for name, (running, waits) in message["demands"].items()}
        rows = read_usage_rows(message["usage"])
        self._exchange.take(peer, message, self._buckets)
        self._demands[peer] = demands
        self.ledger.merge(rows)

    def share(self, peers: Collection[int], admission: AdmissionQueue[Any], now_s: float) -> None:
        """Divide budgets and concurrency with the routers that are there now."""
        if not peers and now_s < self._alone_from_s:
            return
        if not self._has_joined:
            self._join(now_s)
        parts = max(len(peers) + 1, self._processes)
        if parts != self._parts:
            self._parts = parts
            for account in self.accounts.values():
                account.change(account.limits, now_s, parts)
        self._exchange.share(self._buckets, peers, now_s)
        self._demands = {peer: self._demands[peer] for peer in peers if peer in self._demands}
        own = admission.demands()
        self._concurrency = {}
        for name, account in self.accounts.items():
            limit = account.limits.concurrency
            if limit:
                demands = {peer: demands.get(name, NO_DEMAND) for peer, demands in self._demands.items()}
                demands[self._origin] = own.get(name, NO_DEMAND)
                self._concurrency[name] = max(1, fair_shares(limit, demands)[self._origin])

    def _elsewhere(self, account: TenantAccount) -> tuple[float, float]:
        """Return what the other routers have of an account's budgets."""
        if self._parts == 1:
            return 0.0, 0.0
        requests, tokens = account.requests, account.tokens
        name = account.limits.name
        return (
            0.0 if requests is None else self._exchange.elsewhere(f"{name} {_UNITS[0]}", requests.capacity),
            0.0 if tokens is None else self._exchange.elsewhere(f"{name} {_UNITS[1]}", tokens.capacity),
        )

    # -- keeping ----------------------------------------------------------------------------------------

    def sweep(self, loop: asyncio.AbstractEventLoop, now_s: float) -> None:
        """Count what has ended; write usage and budgets, in a thread, once in `FLUSH_S`."""
        self.collect_usage(now_s)
        if now_s < self._save_due_s or (self._saving is not None and not self._saving.done()):
            return
        self._save_due_s = now_s + FLUSH_S
        self.ledger.forget_old(utc_day())
        rows, levels = self.ledger.rows_to_save(), self._levels(now_s)
        self._saving = loop.run_in_executor(None, self.ledger.save, rows, levels)

    async def stop(self, now_s: float) -> None:
        """Write what has not been written, and close the database."""
        if self._saving is not None:
            await self._saving
        self.collect_usage(now_s)
        await asyncio.to_thread(self.ledger.save, self.ledger.rows_to_save(), self._levels(now_s))
        self.ledger.close()

    def _levels(self, now_s: float) -> dict[str, float]:
        for bucket in self._buckets.values():
            bucket.fill(now_s)
        return {name: bucket.level for name, bucket in self._buckets.items()}


def refusal_text(charge: Charge, refusal: BudgetRefusal) -> tuple[str, str, int | None]:
    """Return the message and the code of a refusal, and after how many seconds its client may try again, if ever."""
    name, unit = charge.account.limits.name, refusal.budget.value
    per_minute = f"the {refusal.limit} {unit} per minute of the tenant {name}"
    if refusal.retry_s == float("inf"):
        message = f"the request needs about {charge.estimated_tokens} tokens, more than {per_minute}"
        return message, TOO_LARGE_CODE, None
    needs = f": it needs about {charge.estimated_tokens}" if refusal.budget is Exhausted.TOKENS else ""
    retry_s = max(1, -int(-refusal.retry_s // 1))
    return f"{per_minute} are used up{needs}; try again in {retry_s} s", RATE_LIMIT_CODE, retry_s


def _all_prompt_tokens(request: PreparedRequest) -> int:
    """Estimate the tokens of all prompts of a request; exact where they came as token ids."""
    prompt = request.prompt
    if prompt.known_tokens is not None and not prompt.texts:
        return max(prompt.known_tokens, request.prompt_tokens)
    if prompt.text_bytes > prompt.longest_bytes > 0:
        return request.prompt_tokens * prompt.text_bytes // prompt.longest_bytes
    return request.prompt_tokens


def _used(charge: Charge, record: RequestRecord) -> tuple[int, int]:
    """Return the tokens of prompts and replies that the instances report; where they report nothing, an estimate of
    what was sent to them.
    """
    if record.sent_s is None or (record.outcome == "error_before" and record.output_tokens is None):
        return 0, 0
    prompt_tokens = record.known_prompt_tokens
    return charge.prompt_tokens if prompt_tokens is None else prompt_tokens, record.output_tokens or 0

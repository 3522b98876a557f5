"""The tenants of one router process: who a key belongs to, and the account of each request.

    find -> limit_priority -> charge -> settle

`find` names the tenant of a key, `charge` reserves what a request is expected to use, or refuses it, and `settle`
replaces the reservation by what was used. Decisions are those of `decide/tenants.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_ext_router.decide.admission import AdmissionQueue, Claim
from sglang_ext_router.decide.budgets import BudgetState, shown_duration
from sglang_ext_router.decide.tenants import (
    DEFAULT_TENANT,
    BudgetRefusal,
    Exhausted,
    TenantAccount,
    bounded_priority,
    priority_rank,
)
from sglang_ext_router.http.api_keys import HASH_PREFIX_BYTES, ApiKeyFileError, WatchedFile
from sglang_ext_router.tenants.tenants_file import TenantsFile, read_tenants_file

if TYPE_CHECKING:
    from sglang_ext_router.observe.request_record import RequestRecord
    from sglang_ext_router.request.prepared_request import ClientHeaders, PreparedRequest
    from sglang_ext_router.request.routing import RoutePlanner

logger = logging.getLogger(__name__)

RATE_LIMIT_CODE = "rate_limit_exceeded"
TOO_LARGE_CODE = "request_too_large"
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


class Used(NamedTuple):
    """The tokens that a request has used, of its prompts and of its replies."""

    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Tenants:
    """The accounts of all tenants, which follow the file."""

    def __init__(self, path: str, now_s: float) -> None:
        """Read the file. Raise ApiKeyFileError if it cannot be used."""
        self._watched = WatchedFile(path)
        self._path = path
        self._by_prefix: dict[bytes, tuple[bytes, str]] = {}
        self._parts = 1  # routers that divide the budgets
        self.accounts: dict[str, TenantAccount] = {}
        self._take_file(read_tenants_file(path), now_s)

    # -- keys -------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> str | None:
        """Return the name of the tenant that has this key; None if none has it."""
        digest = hashlib.sha256(key).digest()
        known = self._by_prefix.get(digest[:HASH_PREFIX_BYTES])
        return known[1] if known is not None and hmac.compare_digest(known[0], digest) else None

    def reload(self, now_s: float) -> None:
        """Read the file again if it has changed; one that cannot be used is logged, and nothing changes."""
        if not self._watched.has_changed(now_s):
            return
        try:
            content = read_tenants_file(self._path)
        except ApiKeyFileError as error:
            logger.warning("the tenants stay what they were: %s", error)
            return
        self._take_file(content, now_s)
        logger.info("%d tenants with %d keys read from %s", len(content.limits), len(self._by_prefix), self._path)

    def _take_file(self, content: TenantsFile, now_s: float) -> None:
        self._by_prefix = {
            digest[:HASH_PREFIX_BYTES]: (digest, name) for digest, name in content.tenants_by_hash.items()
        }
        accounts: dict[str, TenantAccount] = {}
        for name, limits in content.limits.items():
            account = self.accounts.get(name)
            if account is None:
                account = TenantAccount(limits, now_s, self._parts)
            else:
                account.change(limits, now_s, self._parts)
            accounts[name] = account
        self.accounts = accounts

    # -- one request ------------------------------------------------------------------------------------

    def account(self, name: str) -> TenantAccount:
        """Return a tenant's account; that of the default tenant for a name that the file no longer has."""
        return self.accounts.get(name) or self.accounts[DEFAULT_TENANT]

    def limit_priority(self, name: str, headers: ClientHeaders) -> ClientHeaders:
        """Return the headers with a priority that is no more urgent than the tenant's highest."""
        priority = bounded_priority(headers.priority, self.account(name).limits)
        return headers if priority == headers.priority else headers._replace(priority=priority)

    def charge(self, name: str, request: PreparedRequest, planner: RoutePlanner, now_s: float) -> Charge:
        """Reserve what a request is expected to use; its charge has a `refusal` where that is not there."""
        account = self.account(name)
        prompt_tokens = _all_prompt_tokens(request)
        estimated = prompt_tokens
        if not request.is_undivided:
            estimated += account.reply_tokens(request.prompt.max_new_tokens) * request.prompt.sequence_count
        charge = Charge(account, prompt_tokens, estimated)
        if account.has_budgets:
            charge.refusal = account.reserve(estimated, now_s)
            charge.reply_headers = _rate_limit_headers(account.states(now_s))
        if charge.refusal is None:
            cached_tokens = planner.max_cached_tokens(request.model, request.prompt, request.prompt_tokens)
            limits, work_tokens = account.limits, max(1, estimated - cached_tokens)
            rank = priority_rank(request.headers.priority)
            charge.claim = Claim(limits.name, limits.weight, limits.concurrency, rank, work_tokens)
        return charge

    def settle(self, charge: Charge, record: RequestRecord, admission: AdmissionQueue[Any]) -> Used:
        """A request has ended: return what it has used, which replaces its reservation."""
        used = _used(charge, record)
        if charge.claim is not None:
            charge.account.settle(charge.estimated_tokens, used.tokens)
            if record.is_admitted:
                cached_tokens = 0 if record.route is None else record.route.decision.cached_tokens
                admission.correct(charge.claim, max(0, used.tokens - cached_tokens))
            request = record.request
            if record.outcome == "ok" and record.output_tokens is not None and request is not None:
                charge.account.learn_output(record.output_tokens / request.prompt.sequence_count)
        return used


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


def _used(charge: Charge, record: RequestRecord) -> Used:
    """Return what the instances report; where they report nothing, an estimate of what was sent to them."""
    if record.sent_s is None or (record.outcome == "error_before" and record.output_tokens is None):
        return Used(0, 0)
    prompt_tokens = record.known_prompt_tokens
    return Used(charge.prompt_tokens if prompt_tokens is None else prompt_tokens, record.output_tokens or 0)


def _rate_limit_headers(states: tuple[BudgetState | None, ...]) -> bytes:
    lines = []
    for unit, state in zip(_UNITS, states, strict=True):
        if state is not None:
            lines.append(
                f"x-ratelimit-limit-{unit}: {state.limit}\r\nx-ratelimit-remaining-{unit}: {state.remaining}\r\n"
                f"x-ratelimit-reset-{unit}: {shown_duration(state.reset_s)}\r\n"
            )
    return "".join(lines).encode()

"""Describes what the router remembers of one generation request.

Metrics, the access log, the live page, traces and the count of deadlines are all made from this record, and from
nothing else.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from sglang_ext.live.decide.view import SeenRequest
from sglang_ext.types import LengthClass
from sglang_ext_router.observe.access_log import AccessEntry
from sglang_ext_router.request.prepared_request import PreparedRequest
from sglang_ext_router.request.routing import Route

# A whole reply; the client left; an error before anything of an instance's reply was sent, or after.
RequestOutcome: TypeAlias = Literal["ok", "client_left", "error_before", "error_after"]
CLIENT_LEFT_STATUS = 499
QUEUE_TIMEOUT_STATUS = 408
# Statuses of requests that no instance could have served: they say nothing about a deadline.
_CLIENT_FAULT_STATUS = frozenset({400, 404, 413, 422})


class RequestRecord:
    """One request from its arrival to its end. Times are the event loop's, in seconds; None: it has not happened.

    `RequestFlow` and `Attempt` write what happened, `Relay` writes what the client was sent, and `close` derives the
    outcome. Until then the record can be read by `seen`, which the live page does.
    """

    def __init__(self, path: bytes, started_s: float) -> None:
        self.path = path
        self.peer = ""  # address and port of the client, where there is an access log
        self.request_id = b""  # as the client sees it: its own, or the one made of the latest attempt's room
        self.request: PreparedRequest | None = None  # once its body has been read
        self.started_s = started_s  # when it arrived
        self.admitted_s: float | None = None  # when there was a place for it among the running requests
        self.is_offered = False  # to the coordinator of the long pool
        self.placed_s: float | None = None  # when the coordinator answered
        self.evictions = 0  # times that it made room for a more urgent request
        self.is_taken_back = False  # from an instance that was about to compute a chunk
        self.queue_s = 0.0  # from its arrival until it was sent for the first time
        self.earlier: tuple[tuple[float, str], ...] = ()  # attempts that failed: when, and what
        # The latest attempt
        self.attempts = 1
        self.route: Route | None = None
        self.room_id = b""  # the request id made of its room
        self.sent_s: float | None = None
        self.prefilled_s: float | None = None  # prefill's reply was whole
        self.first_byte_s: float | None = None  # the client was sent the first byte of a reply's body
        self.first_token_s: float | None = None  # exact for streams; the end of prefill for others
        self.reply_end_s: float | None = None  # the last byte of the relayed reply came
        # What the instances report
        self.known_prompt_tokens: int | None = None  # read for the access log only
        self.output_tokens: int | None = None
        self.tenant = ""  # where there are tenants
        self.used_tokens: tuple[int, ...] | None = None  # of prompts and replies, as its tenant is charged
        self.error_status: int | None = None  # of an error within a stream of status 200
        # What the client was sent
        self.status = 0
        self.error = ""  # the router's own error message
        self.has_left = False  # the client left before it had its whole reply
        self.is_broken = False  # the reply ended differently from what its beginning promised
        # Set by `close`
        self.outcome: RequestOutcome | None = None
        self.ended_s: float | None = None

    def close(self, now_s: float) -> None:
        """Derive outcome, status and end: the client has its whole reply, or will not get it."""
        outcome: RequestOutcome = "ok"
        if self.has_left:
            outcome, self.status = "client_left", CLIENT_LEFT_STATUS
        elif self.is_broken or self.error_status is not None:
            outcome = "error_before" if self.first_byte_s is None else "error_after"
            if not self.is_broken and self.error_status is not None:
                self.status = self.error_status
        elif not 200 <= self.status < 400:
            outcome = "error_before"
        self.outcome = outcome
        self.ended_s = now_s if self.reply_end_s is None or outcome != "ok" else self.reply_end_s

    @property
    def is_admitted(self) -> bool:
        """Return whether there was a place for it among the running requests."""
        return self.admitted_s is not None

    @property
    def length_class(self) -> LengthClass | None:
        """The class in which the request was routed; only long prompts are offered to a coordinator before."""
        if self.route is not None:
            return self.route.decision.length_class
        return LengthClass.LONG if self.is_offered else None

    @property
    def lived_s(self) -> float:
        """Time from its arrival to its end."""
        return 0.0 if self.ended_s is None else self.ended_s - self.started_s

    def met_deadline(self) -> bool | None:
        """Return whether the first token came in time, once the record is closed; None if that is not to be counted.

        A request that never had a token has missed its deadline, unless the request itself was at fault, its client
        left before the deadline, or it was refused on arrival.
        """
        slo_s = None if self.request is None else self.request.headers.ttft_slo_s
        if slo_s is None:
            return None
        if not self.is_admitted:
            return False if self.status == QUEUE_TIMEOUT_STATUS else None
        token_s = self.first_token_s
        if token_s is not None and self.outcome != "error_before":
            return token_s - self.started_s <= slo_s
        if self.outcome == "client_left" and self.lived_s <= slo_s:
            return None
        if self.outcome == "error_before" and self.status in _CLIENT_FAULT_STATUS:
            return None
        return False

    def seen(self) -> SeenRequest:
        """Return the request as the live page and a trace show it."""
        request, route, length_class = self.request, self.route, self.length_class
        tokens = self.known_prompt_tokens
        if tokens is None:
            tokens = 0 if request is None else request.prompt_tokens
        return SeenRequest(
            self.request_id.decode("latin-1"),
            None if length_class is None else length_class.value,
            tokens,
            0 if route is None else route.decision.cached_tokens,
            self.output_tokens,
            None if route is None else route.prefill.name,
            None if route is None or route.decode is None else route.decode.name,
            self.started_s,
            self.sent_s,
            None,
            self.prefilled_s,
            self.first_token_s,
            self.ended_s,
            self.outcome,
            self.attempts,
        )

    def events(self) -> list[tuple[float, str]]:
        """Return what happened to the request, in order: seconds from its arrival, and the event."""
        request = self.request
        happened: list[tuple[float | None, str]] = [(self.started_s, f"arrived: {self.path.decode()}")]
        if request is not None:
            admitted = f"admitted: about {request.prompt_tokens} prompt tokens"
            happened.append((self.admitted_s, admitted + (", offered to the long pool" if self.is_offered else "")))
        happened.append((self.placed_s, "answered by the long pool's coordinator: it is the prompt's turn"))
        happened += self.earlier
        if self.route is not None:
            happened.append((self.sent_s, self._sent(self.route)))
        happened.append((self.prefilled_s, "prefilled"))
        happened.append((self.first_token_s, "first token"))
        happened.append((self.first_byte_s, "first byte sent to the client"))
        if self.ended_s is not None:
            error = f": {self.error}" if self.error else ""
            happened.append((self.ended_s, f"ended: {self.outcome}, status {self.status}{error}"))
        known = [(at_s - self.started_s, what) for at_s, what in happened if at_s is not None]
        known.sort(key=_when)
        return known

    def record_failure(self, now_s: float, leg: str, name: str) -> None:
        """The latest attempt has failed at an instance, and the request is to be tried again."""
        sent = () if self.route is None or self.sent_s is None else ((self.sent_s, self._sent(self.route)),)
        known = tuple(event for event in sent if event not in self.earlier)  # both legs may fail
        self.earlier = (*self.earlier, *known, (now_s, f"attempt {self.attempts} failed at {leg} {name}"))

    def record_migration(self, now_s: float, tokens: int) -> None:
        """The stream goes on on other instances behind `tokens` tokens that the client has."""
        self.earlier = (*self.earlier, (now_s, f"goes on behind {tokens} tokens"))

    def _sent(self, route: Route) -> str:
        decision, length_class = route.decision, self.length_class
        kind = "" if length_class is None else f"{length_class.value}, "
        held = f" ({decision.decode_cached_tokens} tokens there)" if decision.decode_cached_tokens else ""
        decode = "" if route.decode is None else f", then decode {route.decode.name}{held}"
        spilled = " (of the other pool)" if route.is_spilled else ""
        sent = f"sent: {kind}{decision.cached_tokens} tokens cached, prefill {route.prefill.name}{spilled}{decode}"
        return sent + f", room {self.room_id.decode()}, attempt {self.attempts}"

    def access_entry(self) -> AccessEntry:
        """Return the request's line in the access log, once the record is closed."""
        path, request_id, outcome = self.path.decode(), self.request_id.decode("latin-1"), self.outcome or "ok"
        request, route, length_class, started_s = self.request, self.route, self.length_class, self.started_s
        if request is None or not self.is_admitted:
            lived_s = self.lived_s
            return AccessEntry(
                path, self.status, outcome, lived_s, request_id, self.peer, tenant=self.tenant, error=self.error
            )
        used = self.used_tokens
        return AccessEntry(
            path,
            self.status,
            outcome,
            self.lived_s,
            request_id,
            self.peer,
            tenant=self.tenant,
            model=request.model.name,
            length_class=None if length_class is None else length_class.value,
            stream=request.prompt.is_stream,
            sequences=request.prompt.sequence_count,
            prompt_tokens_estimated=request.prompt_tokens,
            cached_tokens_estimated=None if route is None else route.decision.cached_tokens,
            decode_cached_tokens_estimated=None if route is None else route.decision.decode_cached_tokens or None,
            prompt_tokens=self.known_prompt_tokens,
            output_tokens=self.output_tokens,
            used_prompt_tokens=None if used is None else used[0],
            used_output_tokens=None if used is None else used[1],
            prefill=None if route is None else route.prefill.url,
            decode=None if route is None or route.decode is None else route.decode.url,
            attempts=self.attempts,
            queued_s=self.queue_s,
            prefilled_s=None if self.prefilled_s is None else self.prefilled_s - started_s,
            first_byte_s=None if self.first_byte_s is None else self.first_byte_s - started_s,
            error=self.error,
        )


def _when(event: tuple[float, str]) -> float:
    return event[0]

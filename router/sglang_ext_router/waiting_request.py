"""A request from its arrival to its admission: read, counted where its length class is in doubt, and put in the queue.

The way of a request through the router: `WaitingRequest.begin` makes a `PreparedRequest` of it, `start` an
`AdmittedRequest` once there is a place. That one sends an `Attempt` to two instances, again elsewhere if need be, and
what they answer goes through the `Relay` to the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_ext.policy.routing.admission import AdmissionOutcome
from sglang_ext.policy.routing.pd_actions import FailureReason
from sglang_ext_router.admitted_request import AdmittedRequest
from sglang_ext_router.prepared_request import PreparedRequest, read_headers
from sglang_ext_router.prompt import BadRequestError
from sglang_ext_router.relay import REASON_TEXT, Relay
from sglang_ext_router.services import Services

if TYPE_CHECKING:
    from sglang_ext_router.http1 import ClientConnection, Request


class WaitingRequest:
    """Its client connection's Call until it is admitted or refused."""

    __slots__ = ("_client", "_is_queued", "_relay", "_request", "_services", "_started_s", "_unread")

    def __init__(self, services: Services, client: ClientConnection, request: Request, now_s: float) -> None:
        self._services = services
        self._client = client
        self._unread = request
        self._started_s = now_s
        self._relay = Relay(client, request.is_http_11, services.reply_builder)
        self._request: PreparedRequest
        self._is_queued = False

    def begin(self) -> None:
        """Read the request, and offer it for admission once its size is known."""
        services = self._services
        try:
            headers = read_headers(self._unread.headers, services.authorization)
            self._relay.request_id = headers.request_id
            self._request = request = PreparedRequest(self._unread, headers, self._started_s)
        except BadRequestError as error:
            self._refuse(400, str(error), "bad_request", error.param)
            return
        sequences, most = request.prompt.sequence_count, services.config.max_sequences_per_request
        if sequences > most:
            field = "n" if request.prompt.samples_per_prompt > most else None
            message = f"the request makes {sequences} sequences (prompts × n), more than the {most} that are allowed"
            self._refuse(400, message, "too_many_sequences", field)
            return
        planner = services.planner
        if services.tokeniser is not None and planner.needs_exact_count(request.prompt):
            services.metrics.tokenised += 1
            services.tokeniser.count(request.prompt.texts, self._on_counted)
        else:
            self._offer(planner.estimate_tokens(request.prompt))

    def _on_counted(self, counts: list[int] | None) -> None:
        if not self._relay.is_open:  # left in the meantime
            return
        planner = self._services.planner
        if counts:
            # The chat template's own tokens are what the estimator adds to an empty prompt.
            self._offer(max(counts) + int(planner.estimator.overhead_tokens))
        else:
            self._offer(planner.estimate_tokens(self._request.prompt))

    def _offer(self, tokens: int) -> None:
        """Refuse what cannot fit anywhere, then wait for a place."""
        services, request = self._services, self._request
        request.prompt_tokens = max(1, tokens)
        registry, is_alone = services.registry, request.scores.is_prefill_only
        limit = registry.longest_prefill_tokens if is_alone else registry.longest_prompt_tokens
        if limit is not None and tokens > limit:
            kind = "prefill" if is_alone else "decode"
            message = f"the prompt has about {tokens} tokens, more than the {limit} that a {kind} instance can hold"
            self._refuse(400, message, "too_long")
            return
        if request.scores.entries_per_token:
            try:
                request.scores.check_size(request.prompt.known_tokens or tokens * request.prompt.sequence_count)
            except BadRequestError as error:
                self._refuse(400, str(error), "too_long", error.param)
                return
        slo_s = request.headers.ttft_slo_s
        deadline_s = None if slo_s is None else self._started_s + slo_s
        outcome = services.admission.offer(self, self._started_s, deadline_s)
        if outcome is AdmissionOutcome.ADMITTED:
            self.start(self._started_s)
        elif outcome is AdmissionOutcome.QUEUED:
            self._is_queued = True
        else:
            self._refuse(429, "too many requests are waiting; try again later", "queue_full")

    def start(self, now_s: float) -> None:
        """There is a place: send the request."""
        self._is_queued = False
        admitted = AdmittedRequest(self._services, self._request, self._relay, now_s)
        self._client.call = admitted
        admitted.start()

    def on_queue_timeout(self) -> None:
        """It waited in the queue until its deadline or the queue's limit."""
        self._is_queued = False
        self._refuse(408, REASON_TEXT[FailureReason.QUEUE_TIMEOUT], "queue_timeout")

    def on_client_gone(self) -> None:
        """The client leaves before the request was sent to any instance."""
        self._relay.lose_client()
        metrics = self._services.metrics
        if self._is_queued:
            self._services.admission.remove(self)
            self._is_queued = False
        metrics.count(metrics.aborts, "client_gone")
        metrics.count_request(self._unread.path.decode(), "none", 499)

    def pause(self) -> None:
        """Nothing is being relayed."""

    def resume(self) -> None:
        """See pause."""

    def _refuse(self, status: int, message: str, reason: str, param: str | None = None) -> None:
        """Answer a request that is not admitted."""
        metrics = self._services.metrics
        metrics.count(metrics.refused, reason)
        metrics.count_request(self._unread.path.decode(), "none", status)
        self._relay.answer_error(status, message, param)

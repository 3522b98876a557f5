"""A request from its arrival to its admission: read, counted where its length class is in doubt, and put in the queue.

The way of a request through the router: `WaitingRequest.begin` makes a `PreparedRequest` of it, `start` an
`AdmittedRequest` once there is a place; a long one may be an `OfferedRequest` before. An `AdmittedRequest` sends an
`Attempt` to two instances, again elsewhere if need be, and what they answer goes through the `Relay` to the client.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from sglang_ext_router.decide.admission import AdmissionOutcome
from sglang_ext_router.decide.pd_actions import FailureReason
from sglang_ext_router.http.replies import MODEL_NOT_FOUND, shown_names, unknown_model
from sglang_ext_router.observe.access_log import AccessEntry, peer_of
from sglang_ext_router.observe.metrics import RequestOutcome
from sglang_ext_router.request.admitted_request import AdmittedRequest
from sglang_ext_router.request.body_reader import SMALL_BYTES, Outcome, is_read_at_once
from sglang_ext_router.request.offered_request import OfferedRequest
from sglang_ext_router.request.prepared_request import ClientHeaders, PreparedRequest, ReadBody, read_body, read_headers
from sglang_ext_router.request.prompt import BadRequestError
from sglang_ext_router.request.relay import REASON_TEXT, Relay
from sglang_ext_router.request.services import Services

if TYPE_CHECKING:
    from sglang_ext_router.http.http1 import ClientConnection
    from sglang_ext_router.http.request_parser import Request


class WaitingRequest:
    """Its client connection's Call until it is admitted or refused."""

    __slots__ = (
        "_client",
        "_headers",
        "_is_queued",
        "_reading",
        "_relay",
        "_request",
        "_services",
        "_started_s",
        "_unread",
    )

    def __init__(self, services: Services, client: ClientConnection, request: Request, now_s: float) -> None:
        self._services = services
        self._client = client
        self._unread = request
        self._started_s = now_s
        self._relay = Relay(client, request.is_http_11, services.reply_builder)
        if services.access_log is not None:
            self._relay.peer = peer_of(client.transport)
        self._request: PreparedRequest
        self._is_queued = False
        self._headers: ClientHeaders
        self._reading: Future[Outcome] | None = None

    def begin(self) -> None:
        """Read the request, and offer it for admission once its size is known."""
        services, unread = self._services, self._unread
        try:
            headers = read_headers(unread.headers, services.authorization, services.relays_authorization)
            if services.tracer is not None:
                headers = services.tracer.join(unread.headers, headers)
            self._relay.request_id = headers.request_id
            has_hints = headers.ttft_slo_s is not None or headers.priority is not None
            self._headers = headers
            if len(unread.body) <= SMALL_BYTES or is_read_at_once(unread.body, services.draw):
                self._take(read_body(unread.path, unread.body, unread.is_http_11, has_hints))
                return
        except BadRequestError as error:
            self._refuse(400, str(error), "bad_request", error.param)
            return
        read = services.body_reader.read
        self._reading = read(unread.path, unread.body, unread.is_http_11, has_hints, self._on_read)

    def _on_read(self, outcome: Outcome) -> None:
        """A large body has been read."""
        self._reading = None
        if not self._relay.is_open:  # left in the meantime
            return
        if outcome is None:
            self._refuse(503, "the body could not be read; try again later", "unreadable")
            return
        try:
            if isinstance(outcome, BadRequestError):
                raise outcome
            self._take(outcome)
        except BadRequestError as error:
            self._refuse(400, str(error), "bad_request", error.param)

    def _take(self, body: ReadBody) -> None:
        """What the request asks for is known: count its tokens where they are in doubt."""
        services = self._services
        model = services.registry.find_model(body.model)
        if model is None:
            self._refuse_model(body.model or "")
            return
        if body.target is not None and body.model and services.registry.names_adapter(body.model):
            # SGLang's own way of scoring knows no such names.
            message = (
                f"log-probabilities of the prompt by an adapter: name it in lora_path, not in model {body.model!r}"
            )
            self._refuse(400, message, "bad_request", "model")
            return
        request = PreparedRequest(self._unread, self._headers, body, model, self._started_s)
        self._request = request
        self._unread.body = b""  # the prepared request has what is needed of it
        sequences, most = request.prompt.sequence_count, services.config.max_sequences_per_request
        if sequences > most:
            field = "n" if request.prompt.samples_per_prompt > most else None
            message = f"the request makes {sequences} sequences (prompts × n), more than the {most} that are allowed"
            self._refuse(400, message, "too_many_sequences", field)
            return
        planner = services.planner
        tokeniser = model.tokeniser
        if tokeniser is not None and request.prompt.texts and planner.needs_exact_count(model, request.prompt):
            services.metrics.tokenised += 1
            tokeniser.count(request.prompt.texts, self._on_counted)
        else:
            self._offer(planner.estimate_tokens(model, request.prompt))

    def _on_counted(self, counts: list[int] | None) -> None:
        if not self._relay.is_open:  # left in the meantime
            return
        model = self._request.model
        if counts:
            # The chat template's own tokens are what the estimator adds to an empty prompt.
            self._offer(max(counts) + int(model.estimator.overhead_tokens))
        else:
            self._offer(self._services.planner.estimate_tokens(model, self._request.prompt))

    def _offer(self, tokens: int) -> None:
        """Refuse what cannot fit anywhere, then wait for a place."""
        services, request = self._services, self._request
        prompt, config = request.prompt, services.config
        request.prompt_tokens = max(1, tokens)
        if prompt.images or prompt.audios:  # an estimate: it counts for the class, and refuses nothing
            request.prompt_tokens += prompt.images * config.image_tokens + prompt.audios * config.audio_tokens
        model, is_alone = request.model, request.scores.is_prefill_only
        limit = model.longest_prefill_tokens if is_alone else model.longest_prompt_tokens
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

    def online_wait_s(self, now_s: float) -> float | None:
        """For how long it has waited, if for an online client."""
        return max(0.0, now_s - self._started_s) if self._request.is_online else None

    def keep_alive(self, now_s: float) -> None:
        """Keep a stream alive that waits in the queue."""
        if self._request.prompt.is_stream:
            self._relay.keep_alive(now_s, self._started_s, self._services.config.sse_keep_alive_secs)

    def start(self, now_s: float) -> None:
        """There is a place: send the request."""
        self._is_queued = False
        offers = self._services.pool_offers
        if offers is not None and offers.wants(self._request):
            offered = OfferedRequest(self._services, offers, self._client, self._request, self._relay)
            self._client.call = offered
            offered.start(now_s)
            return
        admitted = AdmittedRequest(self._services, self._request, self._relay, now_s)
        self._client.call = admitted
        admitted.start()

    def on_queue_timeout(self) -> None:
        """It waited in the queue until its deadline or the queue's limit."""
        self._is_queued = False
        if self._headers.ttft_slo_s is not None:
            self._services.metrics.unclassified_slo_missed += 1
        self._refuse(408, REASON_TEXT[FailureReason.QUEUE_TIMEOUT], "queue_timeout")

    def on_client_gone(self) -> None:
        """The client leaves before the request was sent to any instance."""
        self._relay.lose_client()
        if self._reading is not None:
            self._reading.cancel()
        metrics = self._services.metrics
        if self._is_queued:
            self._services.admission.remove(self)
            self._is_queued = False
        metrics.count(metrics.aborts, "client_gone")
        metrics.count_request(self._unread.path.decode(), "none", 499, "client_left")
        self._log(499, "client_left")

    def pause(self) -> None:
        """Nothing is being relayed."""

    def resume(self) -> None:
        """See pause."""

    def _refuse_model(self, name: str) -> None:
        """No model is meant for certain: name is empty where the client gave none."""
        names = self._services.registry.served_names()
        if not names or (name and not self._services.registry.is_complete):
            self._refuse(503, "no instance that is ready serves this model yet; try again later", "no_instance")
        elif name:
            self._refuse(404, unknown_model(name, names), "model_not_found", "model", MODEL_NOT_FOUND)
        else:
            self._refuse(400, f"name a model in `model`: {shown_names(names)}", "no_model", "model")

    def _refuse(
        self, status: int, message: str, reason: str, param: str | None = None, code: str | None = None
    ) -> None:
        """Answer a request that is not admitted."""
        metrics = self._services.metrics
        metrics.count(metrics.refused, reason)
        metrics.count_request(self._unread.path.decode(), "none", status, "error_before")
        self._relay.answer_error(status, message, param, code)
        self._log(status, "error_before")

    def _log(self, status: int, outcome: RequestOutcome) -> None:
        """Tell the access log what came of a request that was not admitted."""
        services, relay = self._services, self._relay
        if services.access_log is None:
            return
        waited_s = services.loop.time() - self._started_s
        services.access_log.add(
            AccessEntry(
                self._unread.path.decode(),
                status,
                outcome,
                waited_s,
                relay.request_id.decode("latin-1"),
                relay.peer,
                error=relay.error,
            )
        )

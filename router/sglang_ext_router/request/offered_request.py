"""A long request between its admission and its routing: the long pool's coordinator is asked which instance gets it.

Its client may leave meanwhile, and its time may be over; otherwise it becomes an `AdmittedRequest`, with the instance
that the coordinator has named or without one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sglang_ext.live.decide.view import SeenRequest
from sglang_ext.types import LengthClass
from sglang_ext_router.decide.pd_actions import FailureReason
from sglang_ext_router.instances.pool_offers import OfferOutcome, PoolOffers
from sglang_ext_router.observe.access_log import AccessEntry
from sglang_ext_router.observe.metrics import RequestOutcome
from sglang_ext_router.request.admitted_request import AdmittedRequest
from sglang_ext_router.request.prepared_request import PreparedRequest
from sglang_ext_router.request.relay import REASON_TEXT, Relay
from sglang_ext_router.request.routing import PoolPlace
from sglang_ext_router.request.services import Services

if TYPE_CHECKING:
    from sglang_ext_router.http.http1 import ClientConnection


class OfferedRequest:
    """Its client connection's Call, and one of those that run, until the coordinator has answered."""

    def __init__(
        self, services: Services, offers: PoolOffers, client: ClientConnection, request: PreparedRequest, relay: Relay
    ) -> None:
        self._services = services
        self._offers = offers
        self._client = client
        self._request = request
        self._relay = relay
        self.started_s = request.started_s
        self._asking: asyncio.Task[str] | None = None

    def start(self, now_s: float) -> None:
        """Ask."""
        self._services.running[self] = None
        self._asking = self._offers.ask(self._request, max(0.0, now_s - self.started_s), self._go_on)

    def _go_on(self, place: PoolPlace | None) -> None:
        """The coordinator has answered, or will not."""
        services = self._services
        del services.running[self]
        admitted = AdmittedRequest(services, self._request, self._relay, services.loop.time(), place)
        self._client.call = admitted
        admitted.start()
        if place is not None:
            is_used = admitted.seen().prefill == place.prefill.name
            self._offers.count(OfferOutcome.NAMED if is_used else OfferOutcome.UNUSABLE)

    # -- the client, and time ---------------------------------------------------------------------------

    def on_client_gone(self) -> None:
        """The client leaves: the prompt is withdrawn."""
        self._relay.lose_client()
        self._services.metrics.count(self._services.metrics.aborts, "client_gone")
        self._end(499, "client_left")

    def on_timeout(self) -> None:
        """Its time is over, or the router ends."""
        self._services.metrics.count(self._services.metrics.aborts, "timeout")
        if self._request.headers.ttft_slo_s is not None:
            self._services.metrics.unclassified_slo_missed += 1
        self._relay.answer_error(504, REASON_TEXT[FailureReason.TIMEOUT])
        self._end(504, "error_before")

    def _end(self, status: int, outcome: RequestOutcome) -> None:
        services, relay = self._services, self._relay
        if self._asking is not None:
            self._asking.cancel()
        path, now_s = self._request.path.decode(), services.loop.time()
        services.metrics.count_request(path, "none", status, outcome)
        if services.access_log is not None:
            request_id = relay.request_id.decode("latin-1")
            lived_s = now_s - self.started_s
            entry = AccessEntry(path, status, outcome, lived_s, request_id, relay.peer, error=relay.error)
            services.access_log.add(entry)
        services.on_ended(self, now_s)

    def check_progress(self, now_s: float) -> None:
        """Keep a stream alive that waits."""
        interval_s = self._services.config.sse_keep_alive_secs
        if interval_s and self._request.prompt.is_stream:
            self._relay.keep_alive(now_s, self.started_s, interval_s)

    def pause(self) -> None:
        """Nothing is being relayed."""

    def resume(self) -> None:
        """See pause."""

    # -- as others see it -------------------------------------------------------------------------------

    @property
    def online_class(self) -> tuple[str, LengthClass] | None:
        """Its model and length class if an online client waits for it."""
        return (self._request.model.name, LengthClass.LONG) if self._request.is_online else None

    def online_wait(self, now_s: float) -> tuple[str, float] | None:
        """It waits at no instance."""
        return None

    def seen(self) -> SeenRequest:
        """It as the live page shows it."""
        return SeenRequest(
            self._relay.request_id.decode("latin-1"),
            LengthClass.LONG.value,
            self._request.prompt_tokens,
            *(0, None, None, None, self.started_s, None, None, None, None, None, None),
            attempts=1,
        )

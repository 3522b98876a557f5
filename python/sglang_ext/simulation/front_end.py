"""A simulation of what clients see: the way to the scheduler's queue and back takes time that a profile measured.

These delays depend on a request's length alone and occupy no instance. So the requests are simulated as they reach the
queue, and the results are told from where the client stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_ext.costs.engine_profile import FrontEnd
from sglang_ext.simulation.records import SimRequest
from sglang_ext.simulation.run import Outcome, RunOptions, StageBuilder, simulate


def simulate_for_clients(
    front_end: FrontEnd | None,
    requests: Sequence[SimRequest],
    build_stage: StageBuilder,
    options: RunOptions,
    on_progress: Callable[[int], None] | None = None,
) -> Outcome:
    """`simulate` with the arrivals of requests as sent and first tokens as received; None delays nothing.

    Keys must be unique. Busy times, decode and pools stay as they are at the instances.
    """
    if front_end is None:
        return simulate(requests, build_stage, options, on_progress)
    sent_s = {request.key: request.arrival_s for request in requests}
    queued = sorted(
        (
            request._replace(arrival_s=request.arrival_s + front_end.entry_delay_s(request.prompt_tokens))
            for request in requests
        ),
        key=lambda request: request.arrival_s,
    )
    outcome = simulate(queued, build_stage, options, on_progress)

    def as_sent(request: SimRequest) -> SimRequest:
        return request._replace(arrival_s=sent_s[request.key])

    return replace(
        outcome,
        served=[
            one._replace(
                request=as_sent(one.request),
                first_token_s=one.first_token_s + front_end.return_delay_s(one.request.prompt_tokens),
            )
            for one in outcome.served
        ],
        refused=[as_sent(one) for one in outcome.refused],
        unfinished=[as_sent(one) for one in outcome.unfinished],
        finished=[one._replace(request=as_sent(one.request)) for one in outcome.finished],
        decode_refused=[as_sent(one) for one in outcome.decode_refused],
    )

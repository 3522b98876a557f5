"""When requests arrive: Poisson, in bursts, or turn by turn, from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from sglang_ext.simulation.records import Prefix, SimRequest
from sglang_ext.simulation.workload import Turn


def poisson_s(rate_per_s: float, random: Random) -> Iterator[float]:
    """Arrival times without end. The same seed at twice the rate gives the same pattern in half the time."""
    now_s = 0.0
    while True:
        now_s += random.expovariate(1.0) / rate_per_s
        yield now_s


def bursty_s(rate_per_s: float, shape: float, random: Random) -> Iterator[float]:
    """Arrival times with gamma-distributed gaps of this mean rate; below a shape of 1 they come in bursts.

    The gaps' coefficient of variation is 1 / sqrt(shape).
    """
    now_s = 0.0
    while True:
        now_s += random.gammavariate(shape, 1.0 / shape) / rate_per_s
        yield now_s


def drawn_requests(
    lengths: Sequence[tuple[int, int]], count: int, rate_per_s: float, seed: int, burst_shape: float = 1.0
) -> Iterator[SimRequest]:
    """Requests whose (prompt, output) tokens are drawn from `lengths` with replacement, at such arrivals.

    Lengths and times have random streams of their own, so that the lengths of a seed are the same at every rate.
    """
    gaps, draws = Random(f"arrivals {seed}"), Random(f"lengths {seed}")
    times_s = poisson_s(rate_per_s, gaps) if burst_shape == 1.0 else bursty_s(rate_per_s, burst_shape, gaps)
    for key in range(count):
        prompt_tokens, output_tokens = draws.choice(lengths)
        yield SimRequest(key, next(times_s), prompt_tokens, output_tokens)


SESSION_BLOCK_TOKENS = 64  # what two turns share is counted in blocks of this size
ANSWER_S_PER_TOKEN = 0.02  # a reader's time with an answer begins when it is written
_SESSION_BLOCKS = 1 << 32  # block ids of one session


def session_requests(
    sessions: Sequence[Sequence[Turn]], count: int, rate_per_s: float, seed: int, think_s: float, burst_shape: float
) -> list[SimRequest]:
    """Requests of sessions drawn with replacement, sorted by arrival, `rate_per_s` of them on average.

    Sessions begin Poisson, or in bursts. A turn arrives when the answer before it has been written, at 20 ms a token,
    and its reader has thought about it, exponentially distributed with mean `think_s`: whatever the simulated
    instances do, so that all systems get the same arrivals. A prompt begins with the session so far, blocks of which
    are its prefix. The first `count` arrivals are returned.
    """
    gaps, draws = Random(f"arrivals {seed}"), Random(f"sessions {seed}")
    sessions_per_s = rate_per_s * len(sessions) / sum(len(turns) for turns in sessions)
    starts_s = poisson_s(sessions_per_s, gaps) if burst_shape == 1.0 else bursty_s(sessions_per_s, burst_shape, gaps)
    arrivals: list[tuple[float, int, Turn]] = []
    # With as many sessions as requests, no later session begins before the last request that is returned.
    for session in range(count):
        now_s = next(starts_s)
        for turn in draws.choice(sessions):
            arrivals.append((now_s, session, turn))
            now_s += ANSWER_S_PER_TOKEN * turn.output_tokens + draws.expovariate(1.0 / think_s)
    arrivals.sort(key=lambda one: one[0])
    return [_session_request(key, *one) for key, one in enumerate(arrivals[:count])]


def _session_request(key: int, arrival_s: float, session: int, turn: Turn) -> SimRequest:
    prompt_tokens = turn.history_tokens + turn.new_tokens
    first = session * _SESSION_BLOCKS
    blocks = tuple(range(first, first + prompt_tokens // SESSION_BLOCK_TOKENS))
    return SimRequest(key, arrival_s, prompt_tokens, turn.output_tokens, 0, Prefix(SESSION_BLOCK_TOKENS, blocks))


def scaled(requests: Sequence[SimRequest], rate_per_s: float) -> list[SimRequest]:
    """The same requests with their arrival times stretched to this mean rate (Tetris, section 7.2).

    ValueError unless the first and the last arrive at different times.
    """
    first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
    if not last_s > first_s:
        raise ValueError("all requests arrive at once: no rate can be given to them")
    factor = (len(requests) - 1) / rate_per_s / (last_s - first_s)
    return [one._replace(arrival_s=(one.arrival_s - first_s) * factor) for one in requests]

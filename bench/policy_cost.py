"""Describes what each decision on the router's hot path costs: microseconds of one core, by the number of instances.

    python bench/policy_cost.py [--workers 2 16 128] [--seconds 0.05] [--repeats 5]

Each figure is processor time, the lowest mean of several repeats: what the code costs undisturbed. The last line is
`RESULT {json}`: figures in microseconds by policy and number of instances, and `request_us`, the sum over what one
short chat request (480 bytes, two blocks, two pools of that size) passes through.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from random import Random
from time import process_time
from timeit import Timer

from sglang_ext.types import DecodeLoad, PrefillLoad, Role
from sglang_ext_router.decide.admission import AdmissionQueue
from sglang_ext_router.decide.circuit_breaker import CircuitBreaker
from sglang_ext_router.decide.decode_choice import DECODE_POLICIES, decode_policy
from sglang_ext_router.decide.pd_actions import Leg
from sglang_ext_router.decide.pd_protocol import PDProtocol
from sglang_ext_router.decide.pool_choice import FixedBoundary, choose_pool, classes_of_role, is_in_doubt
from sglang_ext_router.decide.prefill_choice import PREFILL_POLICIES, prefill_policy
from sglang_ext_router.decide.prefix_index import BLOCK_BYTES, BLOCK_ENDS, PrefixIndex, block_hashes
from sglang_ext_router.decide.token_estimate import TokenEstimator
from support.compiled import use_compiled_modules
from support.result import BenchmarkRun

Decision = Callable[[], object]
PROMPT_BYTES = 480
SYSTEM_PROMPT_BYTES = 2048
DOCUMENT_BYTES = 100 * 1024
# What one request passes through with the default policies; the rest are alternatives and larger prompts.
PATH = (
    "hash prompt",
    "match prefixes",
    "token interval",
    "in doubt",
    "admission",
    "breakers",
    "pool",
    "prefill predicted_wait",
    "decode freeness",
    "record prefix",
    "protocol",
    "observe tokens",
)


def fixed_decisions() -> dict[str, Decision]:
    """Decisions whose cost does not depend on the number of instances."""
    random = Random(1)
    prompt, document = random.randbytes(PROMPT_BYTES), random.randbytes(DOCUMENT_BYTES)
    estimator = TokenEstimator()
    for _ in range(1000):
        size_bytes = random.randrange(100, 5000)
        estimator.observe(size_bytes, size_bytes // 4 + 20)
    boundary = FixedBoundary(512)
    queue: AdmissionQueue[int] = AdmissionQueue(1000, 1000, 60.0)

    def admit_and_release() -> None:
        queue.offer(1, 0.0)
        queue.release(1.0)

    def serve() -> None:
        protocol = PDProtocol(5, is_stream=True)
        protocol.start()
        protocol.on_leg_head(Leg.PREFILL, 0, 200)
        protocol.on_leg_complete(Leg.PREFILL, 0)
        protocol.on_leg_head(Leg.DECODE, 0, 200)
        protocol.on_first_body(Leg.DECODE, 0)
        protocol.on_leg_complete(Leg.DECODE, 0)

    return {
        "hash prompt": lambda: block_hashes(prompt),
        "hash 100 KiB": lambda: block_hashes(document),
        "token interval": lambda: estimator.interval(PROMPT_BYTES),
        "observe tokens": lambda: estimator.observe(PROMPT_BYTES, 140),
        "in doubt": lambda: is_in_doubt(100, 150, 0, boundary),
        "admission": admit_and_release,
        "protocol": serve,
    }


def decisions(workers: int) -> dict[str, Decision]:
    """Decisions among `workers` instances; every one of them has the system prompt in its cache."""
    random = Random(workers)
    prefills = [
        PrefillLoad(index, random.randrange(20_000), random.randrange(20), 0, 5000.0 + index)
        for index in range(workers)
    ]
    decodes = [
        DecodeLoad(index, random.randrange(10**6), random.randrange(10**5), random.randrange(64), 32_768)
        for index in range(workers)
    ]
    served = [classes_of_role(Role.SHORT if index % 2 else Role.LONG) for index in range(workers)]
    nothing_cached = [0] * workers
    boundary = FixedBoundary(512)
    breakers = [CircuitBreaker() for _ in range(workers)]
    chosen = breakers[0]
    index = PrefixIndex(16_384 * BLOCK_BYTES, BLOCK_ENDS)
    system_prompt = random.randbytes(SYSTEM_PROMPT_BYTES)
    for worker in range(workers):
        index.add_worker(worker)
        index.record(worker, block_hashes(system_prompt + random.randbytes(4096)))
    new, shared = block_hashes(random.randbytes(PROMPT_BYTES)), block_hashes(system_prompt + bytes(PROMPT_BYTES))
    document = block_hashes(random.randbytes(DOCUMENT_BYTES))
    index.record(0, document)

    def ask_and_tell_breakers() -> None:
        for breaker in breakers:
            breaker.can_try(1.0)
        chosen.on_start(1.0)
        chosen.record_success(2.0)

    named: dict[str, Decision] = {
        "match prefixes": lambda: index.matched(new),
        "match a shared system prompt": lambda: index.matched(shared),
        "match 100 KiB": lambda: index.matched(document),
        "record prefix": lambda: index.record(0, new),
        "record 100 KiB": lambda: index.record(0, document),
        "breakers": ask_and_tell_breakers,
        "pool": lambda: choose_pool(140, served, nothing_cached, boundary, True),
    }
    for name in PREFILL_POLICIES:
        choose_prefill = prefill_policy(name).choose
        named[f"prefill {name}"] = lambda choose=choose_prefill: choose(prefills, 140, 0.3)  # type: ignore[misc]
    for name in DECODE_POLICIES:
        choose_decode = decode_policy(name).choose
        named[f"decode {name}"] = lambda choose=choose_decode: choose(decodes, 0.3)  # type: ignore[misc]
    return named


def measure_us(decision: Decision, seconds: float, repeats: int) -> float:
    """Processor time of one call: the lowest mean of `repeats` runs of about `seconds` each."""
    timer = Timer(decision, timer=process_time)
    count, taken_s = timer.autorange()
    count = max(1, int(count * seconds / taken_s))
    return min(timer.repeat(repeats, count)) / count * 1e6


def main() -> None:
    use_compiled_modules()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 16, 128], help="numbers of instances")
    parser.add_argument("--seconds", type=float, default=0.05, help="length of one run")
    parser.add_argument("--repeats", type=int, default=5, help="runs per figure, of which the best counts")
    options = parser.parse_args()
    benchmark = BenchmarkRun("sglang-ext")
    if min(options.workers) < 1:
        parser.error("--workers: every number must be at least 1")

    def measured(named: dict[str, Decision]) -> dict[str, float]:
        return {name: measure_us(one, options.seconds, options.repeats) for name, one in named.items()}

    fixed = measured(fixed_decisions())
    by_workers = {workers: measured(decisions(workers)) for workers in options.workers}
    request_us = {
        workers: sum(fixed.get(name, figures.get(name, 0.0)) for name in PATH)
        for workers, figures in by_workers.items()
    }
    print(f"{'µs per decision':32s}" + "".join(f"{workers:>9d}" for workers in by_workers))
    for name, figure in fixed.items():
        print(f"{name:32s}{figure:9.2f}")
    for name in next(iter(by_workers.values())):
        print(f"{name:32s}" + "".join(f"{figures[name]:9.2f}" for figures in by_workers.values()))
    print(f"{'one short request in all':32s}" + "".join(f"{figure:9.2f}" for figure in request_us.values()))
    result = {
        "fixed_us": {name: round(figure, 3) for name, figure in fixed.items()},
        "by_workers_us": {
            str(workers): {name: round(figure, 3) for name, figure in figures.items()}
            for workers, figures in by_workers.items()
        },
        "request_us": {str(workers): round(figure, 2) for workers, figure in request_us.items()},
    }
    benchmark.end(result)


if __name__ == "__main__":
    main()

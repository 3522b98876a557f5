"""Route one request: which pool, and which instance there, as the router decides it.

python examples/route_request.py
"""

from __future__ import annotations

from sglang_ext.types import PrefillLoad
from sglang_ext_router.decide.pool_choice import FixedBoundary, classify
from sglang_ext_router.decide.prefill_choice import PredictedWait, predicted_end_s

PROMPT_TOKENS = 3_000
POOL = (
    PrefillLoad(worker_id=0, pending_tokens=0, in_flight=0, cached_tokens=0, tokens_per_s=8_000),
    PrefillLoad(worker_id=1, pending_tokens=2_000, in_flight=1, cached_tokens=2_900, tokens_per_s=8_000),
    PrefillLoad(worker_id=2, pending_tokens=9_000, in_flight=4, cached_tokens=2_900, tokens_per_s=8_000),
)


def main() -> None:
    """Print the class of the prompt on each instance, when each would end the prefill, and the choice."""
    for load in POOL:
        length_class = classify(PROMPT_TOKENS - load.cached_tokens, load.cached_tokens, FixedBoundary(512))
        end_s = predicted_end_s(load, PROMPT_TOKENS)
        print(f"instance {load.worker_id}: {length_class}, {load.cached_tokens} tokens cached, ends in {end_s:.3f} s")
    chosen = POOL[PredictedWait().choose(POOL, PROMPT_TOKENS, draw=0.0)]
    print(f"chosen: instance {chosen.worker_id}")


if __name__ == "__main__":
    main()

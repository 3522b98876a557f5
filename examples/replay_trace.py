"""Replay a trace: send its requests, at their times, to instances that compute at a constant rate.

    python examples/replay_trace.py

The simulator (`sglang-ext simulate`) does the same with measured costs, batches, decode and failures.
"""

from __future__ import annotations

from sglang_ext.types import PrefillLoad
from sglang_ext_router.decide.prefill_choice import PredictedWait

TOKENS_PER_S = 10_000.0
TRACE = ((0.0, 4_000), (0.1, 300), (0.2, 300), (0.3, 12_000), (0.4, 300), (0.5, 300))  # seconds, tokens


def main() -> None:
    """Print where each request of the trace goes and its TTFT."""
    policy = PredictedWait()
    idle_at_s = [0.0, 0.0]  # when each instance has computed all that it was sent
    for arrival_s, prompt_tokens in TRACE:
        loads = [
            PrefillLoad(instance, round(max(0.0, end_s - arrival_s) * TOKENS_PER_S), 0, 0, TOKENS_PER_S)
            for instance, end_s in enumerate(idle_at_s)
        ]
        chosen = policy.choose(loads, prompt_tokens, 0.0)
        idle_at_s[chosen] = max(idle_at_s[chosen], arrival_s) + prompt_tokens / TOKENS_PER_S
        ttft_s = idle_at_s[chosen] - arrival_s
        print(f"{arrival_s:.1f} s: {prompt_tokens} tokens, instance {chosen}, TTFT {ttft_s:.2f} s")


if __name__ == "__main__":
    main()

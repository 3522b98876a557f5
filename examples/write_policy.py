"""Write a routing policy: a class with one method, which gets the loads and returns a position.

    python examples/write_policy.py

To offer it as `--prefill-policy`, add it to the table at the end of `sglang_ext_router/decide/prefill_choice.py`;
the rest of what that takes is in docs/how-to/write-a-policy.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.types import PrefillLoad
from sglang_ext_router.decide.prefill_choice import PredictedWait, PrefillPolicy


class MostCached:
    """Choose the instance with the longest cached prefix; of equals, the one with the fewest pending tokens."""

    def choose(self, loads: Sequence[PrefillLoad], new_prompt_tokens: int, draw: float) -> int:
        """Return the position in `loads` of the instance to take."""
        return max(range(len(loads)), key=lambda i: (loads[i].cached_tokens, -loads[i].pending_tokens))


def main() -> None:
    """Compare the policy with the router's default on one pool."""
    pool = (PrefillLoad(0, 0, 0, 0, 8_000.0), PrefillLoad(1, 40_000, 9, 2_900, 8_000.0))
    policies: tuple[PrefillPolicy, ...] = (MostCached(), PredictedWait())
    for policy in policies:
        position = policy.choose(pool, 3_000, 0.0)
        print(f"{type(policy).__name__}: instance {pool[position].worker_id}")


if __name__ == "__main__":
    main()

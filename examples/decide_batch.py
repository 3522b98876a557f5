"""One decision of LAPS: which prefills an instance runs next, and until when it waits otherwise.

python examples/decide_batch.py
"""

from __future__ import annotations

from sglang_ext.graphs.decide.graph_grid import GraphGrid
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.laps.decide.policy import Laps
from sglang_ext.laps.decide.round_plan import InstanceLimits, PriorityClass, QueuedPrefill, RoundSnapshot
from sglang_ext.types import LengthClass

COSTS = CostCoefficients(alpha_s=2e-10, token_s=5e-6, read_s=1e-8, kappa_s=1e-2)


def waiting(key: int, tokens: int, length_class: LengthClass, deadline_s: float) -> QueuedPrefill:
    """Return a request that arrived at 0 s with nothing cached."""
    return QueuedPrefill(key, length_class, tokens, 0, tokens, 0.0, deadline_s, PriorityClass.NORMAL, False, False)


def main() -> None:
    """Print the batches for a queue of two short prompts and a long one."""
    limits = InstanceLimits(page_tokens=1, max_chunk_tokens=8192, max_batch_tokens=8192, max_requests=64)
    laps = Laps(LapsOptions(boundary_tokens=512), GraphGrid(), COSTS, limits)
    queue = (
        waiting(1, 100, LengthClass.SHORT, 0.4),
        waiting(2, 200, LengthClass.SHORT, 0.4),
        waiting(3, 20_000, LengthClass.LONG, 5.0),
    )
    plan = laps.choose_of(RoundSnapshot(now_s=0.02, queue=queue, free_kv_tokens=100_000))
    for batch in plan.batches:
        print(f"run {batch.whole} whole, then {batch.cut}: {batch.predicted_s * 1e3:.1f} ms ({batch.reason})")


if __name__ == "__main__":
    main()

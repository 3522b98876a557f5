"""What an instance says of its prefill graphs, in `GET /laps`."""

from __future__ import annotations

from typing import Any

from sglang_ext.sglang_plugin.graphs.runner import GridPrefillRunner


def graph_status(model_runner: Any) -> dict[str, Any] | None:
    """Shapes, memory, replays and what ran without, by reason, as JSON-safe values; None without graphs."""
    runner = getattr(model_runner, "prefill_cuda_graph_runner", None)
    graphs = runner.graphs if isinstance(runner, GridPrefillRunner) else None
    if graphs is None:
        return None
    return {
        "shapes": len(graphs.grid.shapes),
        "captured": len(graphs.captured),
        "pool_bytes": graphs.pool_bytes,
        "used_bytes": graphs.used_bytes,
        "replays": {f"{shape.length_tokens}x{shape.requests}": count for shape, count in graphs.replays.items()},
        "fallbacks": {reason.value: count for reason, count in graphs.fallbacks.items()},
    }

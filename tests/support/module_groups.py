"""Test modules that share what is dear to start: a worker of pytest runs a group of them, one after the other.

Modules of `tests/integration` share engines; others share the imports of SGLang.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ENGINES = {
    "requests over a pair": (
        *("api_document", "batch_run", "continuations", "live_page", "openai_client", "profile_engine"),
        *("prompts_that_fit", "router_tokens", "scoring"),
    ),
    "a pair and its losses": (
        *("engine_abort", "engine_greedy", "engine_processes", "engine_samples", "forked_engines", "laps_beside_stock"),
        *("plain_instances", "prefix_attention", "router_faults", "router_migration", "router_patience"),
        *("router_pool_move", "worker_shutdown"),
    ),
    "long prompts under LAPS": ("laps_mixed", "laps_parking", "laps_queues", "laps_ranks"),
    "pipelines": ("laps_stages", "pipeline_faults", "pipeline_stages", "stage_times"),
    "a pool with pages": ("kept_prefixes", "long_pool_ending", "long_pool_memory"),
    "a pool by handshake": ("long_pool_answers", "one_pool", "router_long_pool"),
}
# Their processes are forked from one that has SGLang's imports (`support.preloaded`).
PROCESSES = (
    *("integration/test_chunk_steps", "integration/test_chunk_steps_ranks", "integration/test_prefill_graphs"),
    *("unit/sglang_ext/laps/sglang/test_rank_agreement", "unit/sglang_ext/long_pool/member/test_ranks"),
    "unit/sglang_ext/long_pool/coordinator/test_coordinator_server_processes",
    "unit/sglang_ext/transfer/endpoint/test_endpoint_processes",
)
_GROUP_OF = {f"tests/integration/test_{name}.py": group for group, names in ENGINES.items() for name in names}
_GROUP_OF |= {f"tests/{name}.py": "processes" for name in PROCESSES}


@cache
def group_of(path: str) -> str:
    """Return the group of a module, given by its path in the checkout; a module without one is a group of its own."""
    if path in _GROUP_OF:
        return _GROUP_OF[path]
    return "imports of SGLang" if "sglang_imported" in (ROOT / path).read_text(encoding="utf-8") else path

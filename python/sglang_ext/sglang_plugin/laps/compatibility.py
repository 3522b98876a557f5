"""Which SGLang arguments LAPS works with. Found before the engine starts, said in one line."""

from __future__ import annotations

from typing import Any


def conflict(server_args: Any) -> str | None:
    """Why these SGLang arguments and LAPS exclude each other; None when they do not.

    They may be ServerArgs that SGLang has not resolved yet: what it derives from another argument is looked for there.
    """
    for is_conflicting, argument, reason in (
        (server_args.disaggregation_mode != "prefill", "--disaggregation-mode", "LAPS schedules prefill instances"),
        (
            server_args.schedule_policy != "fcfs",
            f"--schedule-policy {server_args.schedule_policy}",
            "LAPS orders the queue itself",
        ),
        (server_args.pp_size > 1, "--pp-size", "a parked chunk belongs to one pipeline stage"),
        (server_args.enable_dp_attention, "--enable-dp-attention", "its ranks build batches of their own"),
        (server_args.enable_mixed_chunk, "--enable-mixed-chunk", "a LAPS batch is never mixed"),
        (
            server_args.enable_priority_scheduling,
            "--enable-priority-scheduling",
            "priorities come with the request instead (header x-sgl-priority)",
        ),
        (server_args.enable_prefill_delayer, "--enable-prefill-delayer", "the waiting window takes its place"),
        (
            server_args.optimistic_prefill_attempts > 0,
            "--optimistic-prefill-attempts",
            "a parked prefill must have its decode instance",
        ),
        (
            # SGLang derives optimistic prefill from it; 0.5.17 has no such argument.
            getattr(server_args, "disaggregation_decode_allocation_policy", None) == "prefill_complete",
            "--disaggregation-decode-allocation-policy prefill_complete",
            "a parked prefill must have its decode instance",
        ),
        (
            server_args.chunked_prefill_size is not None and server_args.chunked_prefill_size <= 0,
            "--chunked-prefill-size",
            "long prefills must run in chunks to yield between them",
        ),
        (server_args.enable_hierarchical_cache, "--enable-hierarchical-cache", "parking was not tested with it"),
    ):
        if is_conflicting:
            return f"{argument} does not go with --laps-mode ({reason}); use --laps-mode off"
    return None

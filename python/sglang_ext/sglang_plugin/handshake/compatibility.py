"""What the handshake backend does not transfer, each said in one line that names it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_PREFIX = "does not go with --transfer-backend handshake"


def conflict(server_args: Any, *, has_staging_buffer: bool) -> str | None:
    """Why these SGLang arguments exclude the backend, before the engine starts; None when they do not."""
    return _first(
        (server_args.pp_size > 1, "--pp-size", "it sends all layers of a rank's request together"),
        (server_args.attn_cp_size > 1, "--attn-cp-size", "a rank holds every token of its heads"),
        (server_args.dcp_size > 1, "--dcp-size", "a decode rank holds every token of its heads"),
        (server_args.enable_hisparse, "--enable-hisparse", "KV goes to the device's pool"),
        (server_args.speculative_algorithm is not None, "--speculative-algorithm", "the draft's KV stays behind"),
        (server_args.enable_pd_role_switch, "--enable-pd-role-switch", "an endpoint keeps its role"),
        (
            server_args.disaggregation_decode_allocation_policy != "early",
            "--disaggregation-decode-allocation-policy",
            "decode allocates early, then invites",
        ),
        (has_staging_buffer, "SGLANG_DISAGG_STAGING_BUFFER", "heads are cut from their rows without one"),
    )


def model_conflict(kv_args: Any, is_mla: bool) -> str | None:
    """Why a model's KV pool cannot be transferred; None when it can."""
    kinds = ", ".join(str(getattr(kind, "value", kind)) for kind in kv_args.state_types)
    return _first(
        (is_mla, "a model with latent attention (MLA)", "its KV is not keys and values of heads"),
        (bool(kinds), f"a model with extra state ({kinds})", "only keys and values travel"),
        (kv_args.num_draft_entries > 0, "a draft model", "its KV stays behind"),
    )


def _first(*conflicts: tuple[bool, str, str]) -> str | None:
    matching: Iterable[str] = (f"{what} {_PREFIX} ({why})" for is_so, what, why in conflicts if is_so)
    return next(iter(matching), None)

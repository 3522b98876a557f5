"""An instance reports which KV passes only between equal numbers of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.transfer.sglang import transfer_backend
from sglang_ext.transfer.sglang.transfer_backend import states_of_equal_ranks


def scheduler(
    backend: str,
    *states: str,
    has_latent_attention: bool = False,
    divides_states: bool = False,
    queue: str = "prefill_bootstrap",
) -> Any:
    manager = SimpleNamespace(
        is_mla_backend=has_latent_attention,
        is_hybrid_mla_backend=False,
        divides_states=divides_states,
        kv_args=SimpleNamespace(state_types=[SimpleNamespace(value=state) for state in states]),
    )
    return SimpleNamespace(
        server_args=SimpleNamespace(disaggregation_transfer_backend=backend),
        **{f"disagg_{queue}_queue": SimpleNamespace(kv_manager=manager)},
    )


@pytest.mark.parametrize("queue", ["prefill_bootstrap", "decode_prealloc"])
def test_by_backend_and_attention(queue: str) -> None:
    states = ("mamba", "swa", "minimax_index_k", "block_scale", "dsa")
    assert states_of_equal_ranks(scheduler("nixl", *states, queue=queue)) == ["block_scale", "minimax_index_k", "swa"]
    assert states_of_equal_ranks(scheduler("mooncake", *states, queue=queue)) == ["block_scale", "minimax_index_k"]
    assert states_of_equal_ranks(scheduler("handshake", "mamba", queue=queue)) == ["mamba"]
    assert states_of_equal_ranks(scheduler("handshake", "mamba", divides_states=True, queue=queue)) == []
    hybrid = scheduler("handshake", "mamba", has_latent_attention=True, queue=queue)
    assert states_of_equal_ranks(hybrid) == ["mamba"]
    latent = scheduler("nixl", *states, has_latent_attention=True, queue=queue)
    assert states_of_equal_ranks(latent) == ["minimax_index_k"]


def test_most_models_have_none() -> None:
    assert states_of_equal_ranks(scheduler("mooncake")) == []
    assert states_of_equal_ranks(SimpleNamespace()) == []  # undivided


@pytest.mark.usefixtures("sglang_imported")
def test_they_are_sglangs() -> None:
    from sglang.srt.disaggregation.base.conn import StateType

    known = {kind.value for kind in StateType}
    assert known >= transfer_backend._NEVER_CUT | transfer_backend._CUT_FOR_LATENT_ATTENTION | {"swa"}

"""Layers with a recurrent state on a CPU without AMX, in plain torch and float32.

Short convolutions, the gated delta rule (Qwen3-Next, Qwen3.5) and state space layers (Mamba 2 and hybrids with it) are
computed token by token, with the signatures of SGLang's kernels, whose names stand in `recurrent_kernels`. A request's
state lies in a slot of a pool and is updated there; a slot below 0 is padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

_L2_EPSILON = 1e-6
_SILU = frozenset({"silu", "swish", True})


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    conv_states: torch.Tensor,
    activation: str | bool | None = "silu",
    **_: Any,
) -> torch.Tensor:
    """Return the causal convolution of each channel of x [channels, tokens of all sequences].

    `weight` is [channels, width]; conv_states [slots, channels, width - 1] gets the last inputs of each sequence.
    """
    output, width = torch.empty_like(x), weight.shape[-1]
    for number, tokens in enumerate(_sequences(query_start_loc)):
        slot = int(cache_indices[number])
        if tokens.start == tokens.stop or slot < 0:
            continue
        is_known = has_initial_state is not None and bool(has_initial_state[number])
        before = conv_states[slot].to(x.dtype) if is_known else x.new_zeros(x.shape[0], width - 1)
        inputs = torch.cat([before, x[:, tokens]], 1)
        convolved = functional.conv1d(inputs[None], weight[:, None], bias, groups=x.shape[0])[0]
        output[:, tokens] = functional.silu(convolved) if activation in _SILU else convolved
        conv_states[slot] = inputs[:, inputs.shape[1] - (width - 1) :].to(conv_states.dtype)
    return output


def convolve_next(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the same for one more token of each sequence, x [sequences, channels]."""
    assert conv_state_indices is not None
    rows, slots = _used(conv_state_indices)
    output = torch.zeros_like(x)
    inputs = torch.cat([conv_state[slots].to(x.dtype), x[rows, :, None]], -1)
    convolved = (inputs * weight).sum(-1) + (0 if bias is None else bias)
    conv_state[slots] = inputs[..., 1:].to(conv_state.dtype)
    output[rows] = functional.silu(convolved) if activation in _SILU else convolved
    return output


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [n, heads, V] and the state [heads, V, K] behind n tokens of one sequence.

    q and k are [n, key heads, K], v [n, heads, V], `decay` the logarithm of what remains of the state [n, heads], and
    beta [n, heads]. Keys and queries are normalised here.
    """
    group = v.shape[1] // q.shape[1]
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _L2_EPSILON) for part in (q.float(), k.float()))
    q, k = q.repeat_interleave(group, 1) * q.shape[-1] ** -0.5, k.repeat_interleave(group, 1)
    kept = decay.float().exp()[..., None, None]
    v, beta = v.float(), beta.float()
    outputs = torch.empty(v.shape, dtype=torch.float32)
    for token in range(v.shape[0]):
        state = state * kept[token]
        error = (v[token] - (state @ k[token][..., None])[..., 0]) * beta[token][:, None]
        state = state + error[..., None] * k[token][:, None]
        outputs[token] = (state @ q[token][..., None])[..., 0]
    return outputs, state


def gates(
    decay_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decay and beta of the gated delta rule, [1, tokens, heads] each, of a and b [tokens, heads]."""
    decay = -decay_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def delta_rule_extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state_indices: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """Return the outputs of all sequences, in the shape of v [1, tokens, heads, V], and no intermediate states."""
    return _by_sequence(q, k, v, g[0], beta[0], initial_state, initial_state_indices, cu_seqlens), None, None


def delta_rule_next(
    A_log: torch.Tensor,  # noqa: N803  # SGLang's name
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Return the outputs of one more token of each sequence, in the shape of v."""
    heads = v.shape[2]
    decay, beta = gates(A_log, a.reshape(-1, heads), b.reshape(-1, heads), dt_bias)
    return _by_sequence(q, k, v, decay[0], beta[0], initial_state_source, initial_state_indices, cu_seqlens)


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803  # the symbols of Mamba 2, as SGLang's arguments are called
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int,
    D: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    **_: Any,
) -> tuple[None, torch.Tensor, None]:
    """Write what a state space layer gives to `out`, and return the state of each sequence [sequences, H, P, N].

    x is [1, tokens, H, P], dt [1, tokens, H], B and C [1, tokens, groups, N].
    """
    group = x.shape[2] // B.shape[2]
    steps = functional.softplus(dt[0].float() + dt_bias.float())
    inputs, keys, queries = x[0].float(), *(part[0].float().repeat_interleave(group, 1) for part in (B, C))
    kept = (steps * A.float()).exp()
    states = []
    for number, tokens in enumerate(_sequences(cu_seqlens)):
        state = inputs.new_zeros(*inputs.shape[1:], keys.shape[-1])
        if initial_states is not None:
            state = initial_states[number].float()
        for token in range(tokens.start, tokens.stop):
            added = (steps[token][:, None] * inputs[token])[..., None] * keys[token][:, None]
            state = state * kept[token][:, None, None] + added
            read = (state @ queries[token][..., None])[..., 0]
            out[0, token] = (read + inputs[token] * D.float()[:, None]).to(out.dtype)
        states.append(state)
    return None, torch.stack(states).to(state_dtype or x.dtype), None


def scan_next(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """Write the same for one more token of each sequence to `out`: x and dt [sequences, H, P], B and C [sequences,
    groups, N]; state [slots, H, P, N]."""
    rows, slots = _used(state_batch_indices)
    group = x.shape[1] // B.shape[1]
    steps = functional.softplus(dt[rows].float() + dt_bias.float())
    keys, queries = (part[rows].float().repeat_interleave(group, 1) for part in (B, C))
    inputs = x[rows].float()
    updated = (
        state[slots].float() * (steps[..., None] * A.float()).exp() + (steps * inputs)[..., None] * keys[:, :, None]
    )
    state[slots] = updated.to(state.dtype)
    out[rows] = ((updated @ queries[..., None])[..., 0] + inputs * D.float()).to(out.dtype)


def _by_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> torch.Tensor:
    outputs = torch.zeros_like(v)
    for number, tokens in enumerate(_sequences(query_start_loc)):
        slot = int(slots[number])
        if tokens.start == tokens.stop or slot < 0:
            continue
        gating = decay[tokens], beta[tokens]
        found, state = delta_rule(q[0, tokens], k[0, tokens], v[0, tokens], *gating, pool[slot].float())
        outputs[0, tokens], pool[slot] = found.to(outputs.dtype), state.to(pool.dtype)
    return outputs


def _sequences(query_start_loc: torch.Tensor) -> Iterator[slice]:
    bounds = query_start_loc.tolist()
    return (slice(start, stop) for start, stop in pairwise(bounds))


def _used(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of the sequences have a slot, and which."""
    rows = (slots >= 0).nonzero()[:, 0]
    return rows, slots[rows].long()

"""Recurrent layers on a CPU: pieces give what the whole gives, and a short prompt what its definition says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from sglang_ext.cpu import recurrent_layers as layers

HEADS, KEY_HEADS, SIZE, WIDTH, CHANNELS = 4, 2, 8, 4, 6
SLOTS = torch.tensor([3, 1])  # of two sequences


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def starts(*tokens: int) -> torch.Tensor:
    return torch.tensor([0, *tokens]).cumsum(0)


def convolve(x: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, *tokens: int, known: bool) -> torch.Tensor:
    return layers.convolve(x, weight, None, starts(*tokens), SLOTS, torch.tensor([known] * 2), states)


def test_a_convolution_in_pieces_is_that_of_the_whole() -> None:
    weight, x = torch.randn(CHANNELS, WIDTH), torch.randn(2, CHANNELS, 11)
    wanted = functional.silu(functional.conv1d(functional.pad(x, (WIDTH - 1, 0)), weight[:, None], groups=CHANNELS))
    states = torch.randn(5, CHANNELS, WIDTH - 1)  # what was in the slots before does not count
    untouched = states.clone()
    first = convolve(torch.cat([x[0, :, :5], x[1, :, :2]], 1), states, weight, 5, 2, known=False)
    then = convolve(torch.cat([x[0, :, 5:6], x[1, :, 2:10]], 1), states, weight, 1, 8, known=True)
    assert torch.allclose(torch.cat([first[:, :5], then[:, :1]], 1), wanted[0, :, :6], atol=1e-6)
    assert torch.allclose(torch.cat([first[:, 5:], then[:, 1:]], 1), wanted[1, :, :10], atol=1e-6)
    latest = torch.stack([x[0, :, 6], x[1, :, 10]])
    one = layers.convolve_next(latest, states, weight, activation="silu", conv_state_indices=SLOTS)
    assert torch.allclose(one, torch.stack([wanted[0, :, 6], wanted[1, :, 10]]), atol=1e-6)
    assert torch.equal(states[[0, 2, 4]], untouched[[0, 2, 4]])
    assert torch.equal(states[3], x[0, :, 4:7])


def test_a_convolution_shorter_than_its_width_begins_with_nothing() -> None:
    weight, x = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS, 2)
    states = torch.randn(5, CHANNELS, WIDTH - 1)
    convolve(torch.cat([x[:, :1], x[:, 1:]], 1), states, weight, 1, 1, known=False)
    assert torch.equal(states[3], torch.cat([torch.zeros(CHANNELS, WIDTH - 2), x[:, :1]], 1))


def delta_inputs(tokens: int) -> dict[str, torch.Tensor]:
    keys = (torch.randn(1, tokens, KEY_HEADS, SIZE) for _ in range(2))
    q, k = keys
    v, gate = torch.randn(1, tokens, HEADS, SIZE), torch.randn(2, tokens, HEADS)
    return {"q": q, "k": k, "v": v, "a": gate[0], "b": gate[1]}


def extend(inputs: dict[str, torch.Tensor], tokens: slice, pool: torch.Tensor, gating: Any) -> torch.Tensor:
    part = {name: value[:, tokens] for name, value in inputs.items() if name in {"q", "k", "v"}}
    decay, beta = layers.gates(gating[0], inputs["a"][tokens], inputs["b"][tokens], gating[1])
    length = part["q"].shape[1]
    found, _, _ = layers.delta_rule_extend(
        *part.values(), g=decay, beta=beta, initial_state=pool, cu_seqlens=starts(length), initial_state_indices=SLOTS
    )
    return found


def test_the_delta_rule_in_pieces_and_by_token_is_that_of_the_whole() -> None:
    inputs, gating = delta_inputs(9), (torch.rand(HEADS), torch.randn(HEADS))
    whole, pool = torch.zeros(5, HEADS, SIZE, SIZE), torch.zeros(5, HEADS, SIZE, SIZE)
    wanted = extend(inputs, slice(0, 9), whole, gating)
    pieces = [extend(inputs, slice(start, stop), pool, gating) for start, stop in ((0, 3), (3, 8))]
    last = {name: value[:, 8:] if value.dim() == 4 else value[8:] for name, value in inputs.items()}
    pieces.append(
        layers.delta_rule_next(
            *gating, **last, initial_state_source=pool, initial_state_indices=SLOTS, cu_seqlens=starts(1)
        )
    )
    assert torch.allclose(torch.cat(pieces, 1), wanted, atol=1e-6)
    assert torch.allclose(pool, whole, atol=1e-6)
    assert not pool[[0, 1, 2, 4]].any()


def test_the_delta_rule_reads_back_what_a_key_has_written() -> None:
    """A key of length one, without decay and with a beta of one, replaces its value in the state."""
    k = functional.normalize(torch.randn(1, 1, SIZE), dim=-1).repeat(2, 1, 1)
    v, still = torch.randn(2, 1, SIZE), torch.zeros(2, 1)
    found, state = layers.delta_rule(k, k, v, still, torch.ones(2, 1), torch.zeros(1, SIZE, SIZE))
    assert torch.allclose(found * SIZE**0.5, v, atol=1e-4)
    assert torch.allclose((state @ k[0, 0])[0], v[1, 0], atol=1e-4)


def test_a_scan_in_pieces_and_by_token_is_that_of_the_whole() -> None:
    tokens, groups, states = 9, 2, 5
    x, dt = torch.randn(1, tokens, HEADS, SIZE), torch.randn(1, tokens, HEADS)
    keys, queries = torch.randn(2, 1, tokens, groups, states)
    rate, skip, bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)

    def scanned(start: int, stop: int, initial: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(1, stop - start, HEADS, SIZE)
        part = (value[:, start:stop] for value in (x, dt))
        cut = (value[:, start:stop] for value in (keys, queries))
        _, state, _ = layers.scan(
            *part, rate, *cut, 32, skip, bias, cu_seqlens=starts(stop - start), out=out, initial_states=initial
        )
        return out, state

    wanted, last = scanned(0, tokens, None)
    first, state = scanned(0, 5, None)
    then, state = scanned(5, 8, state)
    pool, out = torch.zeros(5, HEADS, SIZE, states), torch.empty(1, HEADS, SIZE)
    pool[3] = state[0]
    wide = (value[:, None].expand(-1, SIZE) for value in (skip, bias))
    layers.scan_next(
        pool,
        x[0, 8:],
        dt[0, 8:, :, None].expand(-1, -1, SIZE),
        rate[:, None, None].expand(-1, SIZE, states),
        *(keys[0, 8:], queries[0, 8:], *wide),
        state_batch_indices=SLOTS[:1],
        out=out,
    )
    assert torch.allclose(torch.cat([first, then, out[None]], 1), wanted, atol=1e-5)
    assert torch.allclose(pool[3], last[0], atol=1e-5)


def test_padding_has_no_slot() -> None:
    states, pool = torch.ones(5, CHANNELS, WIDTH - 1), torch.ones(5, HEADS, SIZE, SIZE)
    padding = torch.tensor([-1])
    weight = torch.randn(CHANNELS, WIDTH)
    layers.convolve(torch.randn(CHANNELS, 3), weight, None, starts(3), padding, None, states)
    layers.convolve_next(torch.randn(1, CHANNELS), states, weight, conv_state_indices=padding)
    inputs = delta_inputs(1)
    layers.delta_rule_next(
        torch.rand(HEADS),
        torch.rand(HEADS),
        **inputs,
        initial_state_source=pool,
        initial_state_indices=padding,
        cu_seqlens=starts(1),
    )
    assert states.eq(1).all()
    assert pool.eq(1).all()

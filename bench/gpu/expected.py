"""Describes what a stage should show on a card, by the roofline alone, before anything was measured there.

A prefill takes at least the time of reading what it must read, or of computing what it must compute; a closed loop of
N clients answers no faster than its new tokens can be computed, and by Little's law makes each wait N / rate. What is
measured below these figures is measured wrongly; what is far above has a reason that is to be found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gpu.card import Card, largest_model, needed_bytes, weight_bytes
from gpu.floor import Ceilings, floor_s, prefill_operations
from gpu.model_shapes import SHAPES
from gpu.stage_plan import BATCHES, CONCURRENCIES, LENGTHS, RATES_PER_S, Selection, plan

# Of the load of figures 5 and 6: lognormal lengths, a tenth of figure 6's between 1024 and 4096 tokens.
SHORT_TOKENS = 48 * math.exp(0.9**2 / 2)
LONG_TOKENS = (1024 + 4096) / 2
LONG_SHARE = 0.1
REPREFILLS = ((16, 1, 1024), (64, 8, 1024), (16, 1, 4096), (256, 4, 4096))


def expected_lines(stage: str, card: Card, selection: Selection) -> Iterator[str]:
    """Yield what to print before the stage: its time, and the figures that bound its results."""
    try:
        steps = plan(stage, card, selection)
    except ValueError as error:
        yield str(error)
        return
    yield f"{stage}: {sum(step.estimate_s for step in steps):.0f} s for {', '.join(step.name for step in steps)}"
    ceilings = card.nominal
    if ceilings is None:
        yield f"  no bandwidth is known of {card.name}: no further expectation"
    elif stage.startswith("buckets"):
        yield from _buckets(f"qwen2.5-{stage.removeprefix('buckets-')}", ceilings)
    elif stage == "figure6":
        yield from _figure_6(largest_model(card.memory_bytes), ceilings)
    elif stage == "figure5":
        yield from _figure_5(ceilings)
    elif stage == "kernels":
        yield from _kernels(ceilings)
    elif stage == "tokens":
        yield "  the same tokens; logits that differ by 1e-4 or less, with wrong attention by 1 or so"
    elif stage == "two-engines":
        yield "  all 16 answers one instance's, none of them for another prompt"


def _buckets(model: str, ceilings: Ceilings) -> Iterator[str]:
    shape = SHAPES[model]
    yield (
        f"  {model}: weights {weight_bytes(model) / 1e9:.1f} GB, {needed_bytes(model) / 1e9:.0f} GB with its KV; "
        f"bound by memory below {_turn_tokens(model, ceilings)} tokens"
    )
    yield "  least ms, new tokens x requests: " + ", ".join(
        f"{length}x{batch} {floor_s(shape, ceilings, length, batch) * 1e3:.2f}"
        for length, batch in ((LENGTHS[0], BATCHES[0]), (16, 8), (64, 8), (128, 16), (LENGTHS[-1], BATCHES[-1]))
    )
    yield "  least ms, with cached tokens: " + ", ".join(
        f"{new}x{batch}+{cached} {floor_s(shape, ceilings, new, batch, cached) * 1e3:.2f}"
        for new, batch, cached in REPREFILLS
    )
    yield "  the grid: 1.25 times that up to 128 tokens, 1.5 times above; eagerly: 10 ms or more, the host's launches"


def _turn_tokens(model: str, ceilings: Ceilings) -> int:
    """The first power of two of tokens whose arithmetic takes longer than reading the weights."""
    tokens = 8
    while prefill_operations(SHAPES[model], tokens, 1) / ceilings.operations_per_s < (
        weight_bytes(model) / ceilings.read_bytes_per_s
    ):
        tokens *= 2
    return tokens


def _figure_6(model: str, ceilings: Ceilings) -> Iterator[str]:
    new_tokens = LONG_SHARE * LONG_TOKENS + (1 - LONG_SHARE) * SHORT_TOKENS
    each_s = prefill_operations(SHAPES[model], round(new_tokens), 1) / ceilings.operations_per_s
    alone_s = floor_s(SHAPES[model], ceilings, round(SHORT_TOKENS), 1)
    yield f"  {model}: {new_tokens:.0f} new tokens a request, so {1 / each_s:.0f} requests/s at most"
    yield "  least mean ms: " + ", ".join(
        f"{max(clients * each_s, alone_s) * 1e3:.0f} with {clients} clients" for clients in CONCURRENCIES
    )


def _figure_5(ceilings: Ceilings) -> Iterator[str]:
    shape = SHAPES["qwen2.5-7b"]
    each_s = prefill_operations(shape, round(SHORT_TOKENS), 1) / ceilings.operations_per_s
    alone_s = floor_s(shape, ceilings, round(SHORT_TOKENS), 1)
    yield f"  qwen2.5-7b: {SHORT_TOKENS:.0f} tokens a request, {alone_s * 1e3:.1f} ms at least"
    yield "  share of the arithmetic: " + ", ".join(f"{rate * each_s:.0%} at {rate:g}/s" for rate in RATES_PER_S)


def _kernels(ceilings: Ceilings) -> Iterator[str]:
    # 28 heads and 4 KV heads of 128, as in `kernels.py`
    pairs = 16384 * 16385 / 2
    yield f"  a causal block of 16384 tokens: {4 * pairs * 28 * 128 / ceilings.operations_per_s * 1e3:.2f} ms at least"
    merged = 65536 * (3 * 28 * 128 * 4 + 3 * 28 * 4)
    yield f"  merging 65536 tokens: {merged / ceilings.read_bytes_per_s * 1e3:.2f} ms at least"

"""AROUND `moe_forward_native`: experts that are divided among the ranks of an instance (`--ep-size`), on a CPU.

On a rank the number of an expert of another rank is -1, which SGLang's loop over experts for CPUs takes for an index.
The contributions of all ranks are added up behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def skip_experts_of_others(stock: Callable[..., Any], layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
    """Compute with the experts of this rank. `x` [tokens, hidden]; `topk_output` has a number and a weight of each of
    `k` experts [tokens, k]. The output has the shape of `x`; 0 for a token whose experts are all elsewhere.
    """
    if layer.moe_ep_size == 1:
        return stock(layer, x, topk_output, config)
    weights, experts = topk_output.topk_weights, topk_output.topk_ids
    tokens, places = (experts >= 0).nonzero(as_tuple=True)
    out = x.new_zeros(x.shape)
    if len(tokens):
        chosen = topk_output._replace(
            topk_weights=weights[tokens, places, None], topk_ids=experts[tokens, places, None]
        )
        out.index_add_(0, tokens, stock(layer, x[tokens], chosen, config))
    return out

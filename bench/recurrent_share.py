"""Describes which part of a hybrid's prefill on a CPU is its recurrence, which members of a long pool would compute one
after the other, and how much faster several members could be at most.

    python bench/recurrent_share.py [--rounds 5] [--output FILE]

Layers of the sizes of Qwen3-Next-80B-A3B (three with a gated delta rule for each that attends; experts as products of
the parameters that are active) and Falcon-H1-7B (attention and Mamba 2 in every layer), with random numbers in float32,
one thread (its processor time): a chunk of 512 tokens behind 7,680 others. Matrix products are torch's, attention and
recurrence this project's for CPUs. In every round each part runs once, in a random order; medians count. Members share
everything but the recurrence: `gain` of P members is 1 / (share + (1 - share) / P), without any time for communication.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from sglang_ext.cpu.recurrent_layers import convolve, delta_rule, scan
from sglang_ext_kernels.block_attention import attention_behind_prefix_
from support.result import BenchmarkRun, benchmark_parser

CHUNK_TOKENS = 512
KNOWN_TOKENS = 8192  # with the chunk
MEMBERS = (2, 4, 8)
Work = Callable[[], object]


class Hybrid(NamedTuple):
    """Layers of a model: parts by name, and how often each occurs in a group of layers that repeats."""

    name: str
    products: tuple[tuple[int, int, int], ...]  # inputs, outputs, and how often in a group
    attention: tuple[int, int, int, int]  # heads, KV heads, head size, layers
    recurrence: Callable[[], Work]
    recurrent_layers: int
    channels: int  # of the short convolution


def gated_delta() -> Work:
    """32 heads of 128 x 128, 16 key heads."""
    q, k = (torch.randn(CHUNK_TOKENS, 16, 128) for _ in range(2))
    v, state = torch.randn(CHUNK_TOKENS, 32, 128), torch.zeros(32, 128, 128)
    decay, beta = -torch.rand(CHUNK_TOKENS, 32), torch.rand(CHUNK_TOKENS, 32)
    return lambda: delta_rule(q, k, v, decay, beta, state)


def state_space() -> Work:
    """24 heads of 128, states of 256."""
    x, dt = torch.randn(1, CHUNK_TOKENS, 24, 128), torch.randn(1, CHUNK_TOKENS, 24)
    b, c = (torch.randn(1, CHUNK_TOKENS, 1, 256) for _ in range(2))
    a, d, bias, out = -torch.rand(24), torch.ones(24), torch.zeros(24), torch.empty(1, CHUNK_TOKENS, 24, 128)
    bounds = torch.tensor([0, CHUNK_TOKENS])
    return lambda: scan(x, dt, a, b, c, 256, d, bias, bounds, out)


HYBRIDS = (
    Hybrid(
        "Qwen3-Next-80B-A3B",
        # Queries, keys, values and gates, and the output, of three layers and of a layer that attends; all experts.
        ((2048, 12288, 3), (4096, 2048, 3), (2048, 9216, 1), (4096, 2048, 1), (2048, 11264, 4), (5632, 2048, 4)),
        (16, 2, 256, 1),
        gated_delta,
        3,
        8192,
    ),
    Hybrid(
        "Falcon-H1-7B",
        ((3072, 6680, 1), (3072, 3072, 1), (3072, 2048, 1), (1536, 3072, 1), (3072, 24576, 1), (12288, 3072, 1)),
        (12, 2, 128, 1),
        state_space,
        1,
        3584,
    ),
)


def parts_of(hybrid: Hybrid) -> dict[str, tuple[list[Work], list[int]]]:
    """Return the work of each part of a group of layers, and how often each occurs."""
    products: list[Work] = []
    for inputs, outputs, _ in hybrid.products:
        rows, matrix = torch.randn(CHUNK_TOKENS, inputs), torch.randn(inputs, outputs)
        products.append(lambda rows=rows, matrix=matrix: rows @ matrix)  # type: ignore[misc]
    heads, kv_heads, size, layers = hybrid.attention
    query, output = torch.randn(CHUNK_TOKENS, heads, size), torch.empty(CHUNK_TOKENS, heads, size)
    keys, values = (torch.randn(KNOWN_TOKENS, kv_heads, size) for _ in range(2))
    inputs, weight = torch.randn(hybrid.channels, CHUNK_TOKENS), torch.randn(hybrid.channels, 4)
    bounds, slots, states = torch.tensor([0, CHUNK_TOKENS]), torch.tensor([0]), torch.zeros(1, hybrid.channels, 3)
    return {
        "products": (products, [count for *_, count in hybrid.products]),
        "attention": ([lambda: attention_behind_prefix_(output, query, keys, values, size**-0.5)], [layers]),
        "recurrence": (
            [hybrid.recurrence(), lambda: convolve(inputs, weight, None, bounds, slots, None, states)],
            [hybrid.recurrent_layers] * 2,
        ),
    }


def measure(hybrid: Hybrid, rounds: int, draw: random.Random) -> dict[str, float]:
    """Return the median seconds of each part of a group of layers."""
    parts = parts_of(hybrid)
    pieces = [
        (name, work, count)
        for name, (works, counts) in parts.items()
        for work, count in zip(works, counts, strict=True)
    ]
    times: dict[int, list[float]] = {place: [] for place in range(len(pieces))}
    for number in range(rounds + 1):
        for place in draw.sample(range(len(pieces)), len(pieces)):
            began_s = time.thread_time()
            pieces[place][1]()
            if number:  # the first round warms up
                times[place].append(time.thread_time() - began_s)
    seconds = dict.fromkeys(parts, 0.0)
    for place, (name, _, count) in enumerate(pieces):
        seconds[name] += median(times[place]) * count
    return seconds


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE", help="where the result goes")
    arguments = parser.parse_args()
    run = BenchmarkRun("torch")
    torch.set_num_threads(1)
    draw = random.Random(0)
    torch.manual_seed(0)
    figures: dict[str, object] = {"chunk_tokens": CHUNK_TOKENS, "known_tokens": KNOWN_TOKENS}
    for hybrid in HYBRIDS:
        seconds = measure(hybrid, arguments.rounds, draw)
        share = seconds["recurrence"] / sum(seconds.values())
        figures[hybrid.name] = {
            **{f"{name}_s": round(value, 3) for name, value in seconds.items()},
            "recurrent_share": round(share, 3),
            **{f"gain_{members}": round(1 / (share + (1 - share) / members), 2) for members in MEMBERS},
        }
    run.end(figures, arguments.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

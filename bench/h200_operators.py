"""Writes `sglang_ext/planner/simulation/h200_operators.py`: operator times measured on an H200, for a few model shapes.

    python bench/h200_operators.py FOLDER > python/sglang_ext/planner/simulation/h200_operators.py

FOLDER is `aiconfigurator_h200`: NVIDIA's aiconfigurator, Apache-2.0, SGLang 0.5.14. Needs `pyarrow`, which nothing else
here does. Only entries that a shape needs are kept: matrix products of one layer in bfloat16 (`sglang_torch_linear`),
attention over a prompt without a prefix (FlashAttention 3, batch 1), NCCL's all-gather of 2-byte elements, and SGLang's
own all-reduce of them, as captured graphs have it.

A matrix or a number of heads that was not measured lies on the straight line between the nearest two that were; fewer
heads than were measured take as long as the fewest measured. Rows and tokens take no longer than more of them, to
which they could be padded. The numbers of rows and of tokens are measured ones.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

ROWS = (1, 16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768)
PROMPT_TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384)
# hidden, intermediate, layers, heads, KV heads, vocabulary of one device, among how many a model is divided, head size
SHAPES = {
    "llama3-8b": (4096, 14336, 32, 32, 8, 128_256, 1, 128),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151_936, 1, 64),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152_064, 1, 128),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, 152_064, 1, 128),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, 152_064, 1, 128),
    "qwen2.5-72b-tp2": (8192, 14784, 80, 32, 4, 76_032, 2, 128),
}


HEADER = '''"""Operator times measured on an H200, and the model shapes that they are of; by bench/h200_operators.py.

Source: NVIDIA aiconfigurator (Apache-2.0), SGLang 0.5.14, bfloat16, and its `h200_sxm.yaml`. Matrices and numbers of
heads that were not measured are interpolated between measured ones. Times in milliseconds.
"""

from __future__ import annotations

from typing import NamedTuple


class ModelShape(NamedTuple):
    """Describes what a prefill computes, layer by layer; with tensor parallelism on each of its devices."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary_size: int
    product_ms: tuple[float, ...]  # the four matrix products of a layer, by ROWS
    attention_ms: tuple[float, ...]  # of a layer, a whole prompt by PROMPT_TOKENS
    tp: int = 1  # devices that it is divided among
    head_size: int = 128


MEMORY_BYTES_PER_S = 0.8 * 4.8e12  # what is reached of it
KERNEL_S = 3e-6  # minimum time of an operation on memory'''


def between(measured: Sequence[int], wanted: int, time_ms: Callable[[int], float]) -> float:
    """The time at `wanted`, measured or on the line between its neighbours."""
    if wanted in measured:
        return time_ms(wanted)
    low = max(measured_point for measured_point in measured if measured_point < wanted)
    high = min(measured_point for measured_point in measured if measured_point > wanted)
    share = (wanted - low) / (high - low)
    return (1 - share) * time_ms(low) + share * time_ms(high)


def print_tuple(indent: int, name: str, values: Sequence[float]) -> None:
    """Lines of at most 120 characters that end with a comma unless they are a statement."""
    text = ", ".join(str(value) if isinstance(value, int) else f"{value:.4g}" for value in values)
    lines = textwrap.wrap(text, 112 - indent)
    print(f"{' ' * indent}{name}(")
    for line in lines:
        print(f"{' ' * (indent + 4)}{line}")
    print(f"{' ' * indent}){',' if indent else ''}")


def main() -> int:
    from pyarrow.parquet import read_table

    folder = Path(sys.argv[1])
    gemm = {
        (row["m"], row["n"], row["k"]): row["latency"]
        for row in read_table(folder / "gemm/sglang/0.5.14/gemm_perf.parquet").to_pylist()
        if row["gemm_dtype"] == "bfloat16"
    }
    sizes = sorted({n for _, n, _ in gemm})
    attention = {
        (row["head_dim"], row["num_heads"], row["num_key_value_heads"], row["isl"]): row["latency"]
        for row in read_table(folder / "attention/sglang/0.5.14/context_attention_perf.parquet").to_pylist()
        if (row["attn_dtype"], row["kv_cache_dtype"], row["window_size"], row["batch_size"])
        == ("bfloat16", "bfloat16", 0, 1)
    }
    gather = {
        (row["num_gpus"], row["message_size"]): row["latency"]
        for row in read_table(folder / "comm/nccl/2.29.2/nccl_perf.parquet").to_pylist()
        if (row["op_name"], row["nccl_dtype"]) == ("all_gather", "half")
    }

    reduce = {
        (row["num_gpus"], row["message_size"]): row["latency"]
        for row in read_table(folder / "comm/sglang/0.5.14/custom_allreduce_perf.parquet").to_pylist()
        if (row["allreduce_dtype"], row["backend"]) == ("bfloat16", "sglang_graph")
    }

    def product_ms(rows: int, columns: int, inner: int) -> float:
        def of_columns(n: int) -> float:
            return between(sizes, inner, lambda k: gemm[rows, n, k])

        return between(sizes, columns, of_columns)

    def attention_ms(head_size: int, heads: int, kv_heads: int, tokens: int) -> float:
        known = sorted(h for size, h, kv, isl in attention if (size, kv, isl) == (head_size, kv_heads, tokens))
        return between(known, max(heads, known[0]), lambda h: attention[head_size, h, kv_heads, tokens])

    print(HEADER)
    print(f"ROWS = {ROWS}")
    print(f"PROMPT_TOKENS = {PROMPT_TOKENS}")
    print("# fmt: off")
    print("SHAPES = {")
    for name, (hidden, intermediate, layers, heads, kv_heads, vocabulary, tp, head_size) in SHAPES.items():
        attended = head_size * heads
        matrices = (
            (attended + 2 * head_size * kv_heads, hidden),
            (hidden, attended),
            (2 * intermediate, hidden),
            (hidden, intermediate),
        )
        measured = [sum(product_ms(rows, *matrix) for matrix in matrices) for rows in ROWS]
        products = [min(measured[at:]) for at in range(len(ROWS))]
        attended_ms = [attention_ms(head_size, heads, kv_heads, tokens) for tokens in PROMPT_TOKENS]
        attentions = [min(attended_ms[at:]) for at in range(len(PROMPT_TOKENS))]
        print(f'    "{name}": ModelShape(')
        print(f"        {hidden}, {intermediate}, {layers}, {heads}, {kv_heads}, {vocabulary},")
        print_tuple(8, "", products)
        print_tuple(8, "", attentions)
        if tp > 1:
            print(f"        {tp},")
        if head_size != 128:
            print(f"        head_size={head_size},")
        print("    ),")
    print("}")
    elements = sorted({size for _, size in gather})
    print_tuple(0, "GATHERED_ELEMENTS = ", elements)
    print("GATHER_MS = {  # all-gather of this many 2-byte elements in all, by devices of one node")
    for devices in sorted({one for one, _ in gather}):
        print_tuple(4, f"{devices}: ", [gather[devices, size] for size in elements])
    print("}")
    elements = sorted({size for _, size in reduce})
    print_tuple(0, "REDUCED_ELEMENTS = ", elements)
    print("REDUCE_MS = {  # all-reduce of this many 2-byte elements on each device, by devices of one node")
    for devices in sorted({shape[-2] for shape in SHAPES.values()} - {1}):
        print_tuple(4, f"{devices}: ", [reduce[devices, size] for size in elements])
    print("}")
    print("# fmt: on")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles every Triton kernel for a Hopper GPU, which needs no GPU, and prints what each takes of the chip.

    PYTHONPATH=FOLDER_WITH_TRITON python tools/compile_kernels.py [--json]

Exit status 1 when one does not compile, or spills registers: float32 attention may, which only tests use.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any, NamedTuple

HOPPER = ("cuda", 90, 32)


class Variant(NamedTuple):
    """A kernel with the types of its arguments and its compile-time constants."""

    module: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3


def positioned(dtype: str, queries: int, keys: int, size: int) -> Variant:
    pointers = dict.fromkeys(("q", "k", "v"), f"*{dtype}")
    positions = dict.fromkeys(("q_positions", "k_positions", "seen_by_all", "seen_by_some"), "*i32")
    outputs = {"out": "*fp32", "lse": "*fp32", "q_tokens": "i32", "k_tokens": "i32", "scale_log2": "fp32"}
    names = ("q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride")
    constants = {
        "HEADS": 28, "GROUP": 7, "SIZE": size, "V_SIZE": size, "SIZE_BLOCK": size, "V_SIZE_BLOCK": size,
        "QUERIES": queries, "KEYS": keys, "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }  # fmt: skip
    types = {**pointers, **positions, **outputs, **dict.fromkeys(names, "i32")}
    is_wide = queries >= 128
    stages = 2 if dtype == "fp32" or size > 128 else 3
    return Variant("attention_kernels", "_positioned_block", types, constants, 8 if is_wide else 4, stages)


def split_prefix(dtype: str, rows: int, keys: int, size: int) -> Variant:
    types = dict.fromkeys(("q", "k", "v", "k_pool", "v_pool", "out"), f"*{dtype}")
    types |= {"qo_indptr": "*i64", "kv_indptr": "*i32", "kv_indices": "*i64", "parts": "*fp32", "parts_lse": "*fp32"}
    types |= {"padded_tokens": "i32", "scale_log2": "fp32"}
    names = ("q", "k", "v", "k_pool", "v_pool", "out")
    types |= {f"{name}{part}_stride": "i32" for name in names for part in ("", "_head")}
    constants = {
        "KV_HEADS": 4, "GROUP": 7, "SIZE": size, "SIZE_BLOCK": size, "SPLITS": 32, "ROWS": rows, "KEYS": keys,
        "LEAST": 128, "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }  # fmt: skip
    return Variant("prefix_kernels", "_split_prefix", types, constants, 8 if rows >= 128 or size > 128 else 4, 2)


def variants() -> list[Variant]:
    merge = {"out": "*fp32", "lse": "*fp32", "other_out": "*fp32", "other_lse": "*fp32", "rows": "i32"}
    paged = dict.fromkeys(("keys", "values", "packed_keys", "packed_values"), "*bf16")
    paged |= {"slots": "*i64", "tokens": "i32", "key_stride": "i32", "value_stride": "i32"}
    rows = {"WIDTH": 512, "WIDTH_BLOCK": 512, "ROWS": 8}
    heads = {"kv": "*bf16", "flat": "*bf16", "table": "*i32"}
    heads |= dict.fromkeys(("tokens", "token_stride", "head_stride"), "i32")
    tokens = ("ids", "positions", "cache_slots", "static_ids", "static_positions", "static_cache_slots")
    requests = (
        "rows", "new_lens", "prefix_lens", "static_rows", "static_new", "static_prefix", "static_total",
        "static_start", "qo_indptr",
    )  # fmt: skip
    prefix = {"table": "*i32", "table_stride": "i32", "rows": "*i64", "prefix_lens": "*i64", "kv_indptr": "*i32"}
    return [
        *(positioned("bf16", *sizes) for sizes in ((128, 64, 128), (128, 128, 128), (64, 64, 128), (128, 64, 64))),
        positioned("bf16", 128, 64, 256),
        positioned("fp32", 32, 32, 128),
        *(split_prefix("bf16", *sizes) for sizes in ((128, 64, 128), (64, 64, 128), (128, 64, 64), (64, 32, 256))),
        Variant(
            "prefix_kernels",
            "_join_splits",
            {
                "qo_indptr": "*i64",
                "kv_indptr": "*i32",
                "out": "*bf16",
                "parts": "*fp32",
                "parts_lse": "*fp32",
                **dict.fromkeys(("padded_tokens", "out_stride", "out_head_stride"), "i32"),
            },
            {"HEADS": 28, "SIZE": 128, "SIZE_BLOCK": 128, "SPLITS": 32, "ROWS": 8, "KEYS": 64, "LEAST": 128},
        ),
        *(
            Variant("attention_kernels", "_merge_states", merge | other, {"SIZE": 128, "SIZE_BLOCK": 128, "ROWS": 8})
            for other in ({}, {"other_out": "*bf16"})
        ),
        *(
            Variant("moving_kernels", "_move_kv", paged, {**rows, "IS_GATHER": is_gather}, num_warps=8)
            for is_gather in (True, False)
        ),
        Variant("moving_kernels", "_move_heads", heads, {"SIZE": 128, "SIZE_BLOCK": 128, "ROWS": 32, "IS_SPLIT": True}),
        Variant(
            "moving_kernels",
            "_pad_tokens",
            {**dict.fromkeys(tokens, "*i64"), "tokens": "i32", "padded": "i32"},
            {"BLOCK": 1024},
        ),
        Variant(
            "moving_kernels",
            "_pad_requests",
            {**dict.fromkeys(requests, "*i64"), "kv_indptr": "*i32", "requests": "i32", "padded": "i32"},
            {"BLOCK": 64},
            num_warps=1,
        ),
        Variant("moving_kernels", "_prefix_indices", {**prefix, "kv_indices": "*i64"}, {"BLOCK": 1024}),
    ]


def compile_variant(variant: Variant) -> dict[str, Any]:
    """Registers, spills, shared memory and the matrix instruction of one kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"sglang_ext_kernels.on_gpu.{variant.module}"), variant.kernel)
    order = kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in order}
    # pointers of 16-byte alignment, strides that are multiples of 16: what tensors of an engine have
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(order)
        if signature[name].startswith("*") or name.endswith("stride")
    }
    source = ASTSource(
        kernel, signature, {(order.index(name),): value for name, value in variant.constants.items()}, aligned
    )
    compiled = triton.compile(
        source,
        target=GPUTarget(*HOPPER),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )
    ptx = compiled.asm["ptx"]
    return {
        "kernel": variant.kernel.removeprefix("_"),
        "constants": variant.constants,
        "shared_bytes": compiled.metadata.shared,
        "has_wgmma": "wgmma" in ptx,
        "vector_loads": ptx.count("ld.global.v4") + ptx.count("cp.async.cg.shared.global"),
        "local_bytes": _local_bytes(compiled),
        "triton": triton.__version__,
    }


def _local_bytes(compiled: Any) -> int:
    """Bytes of local memory a thread, where spilled registers go: the cubin's `.nv.info` has the frame size."""
    import struct

    cubin = compiled.asm["cubin"]
    (section_offset,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, section_offset + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    largest = 0
    for name, _, _, _, offset, size, *_ in headers:
        end = cubin.index(b"\0", names + name)
        if cubin[names + name : end] == b".nv.info":
            at = offset
            while at < offset + size:
                form, attribute, length = struct.unpack_from("<BBH", cubin, at)
                if form == 4:
                    if attribute == 0x11:  # EIATTR_FRAME_SIZE: symbol, bytes
                        largest = max(largest, struct.unpack_from("<I", cubin, at + 8)[0])
                    at += 4 + length
                else:
                    at += 4
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print records instead of a table")
    arguments = parser.parse_args()
    records = [compile_variant(variant) for variant in variants()]
    if arguments.json:
        print(json.dumps(records))
    else:
        for record in records:
            sizes = " ".join(f"{name}={value}" for name, value in record["constants"].items())
            print(
                f"{record['kernel']:<36} shared {record['shared_bytes'] / 1024:6.1f} KiB  "
                f"stack {record['local_bytes']:4} B  {'wgmma' if record['has_wgmma'] else '     '}  {sizes}"
            )
    return (
        1 if any(record["local_bytes"] and record["constants"].get("PRECISION") != "ieee" for record in records) else 0
    )


if __name__ == "__main__":
    sys.exit(main())

"""Compiles every Triton kernel for a Hopper GPU, which needs no GPU, and prints what each takes of the chip.

    PYTHONPATH=FOLDER_WITH_TRITON python tools/compile_kernels.py [--json] [--write]

The kernels are launched as in service, by the functions that callers use, on tensors of the types and strides that an
engine has; a stand-in for the driver lets Triton find the types of the arguments and compile, and runs nothing.
SGLang's own extend kernel is among them, as captured passes with latent attention call it. `--write` keeps the records
of this version of Triton in bench/results and renews the table in docs/explanation/kernels.md.

Exit status 1 when one does not compile, or spills registers: float32 attention may, which only tests use, and SGLang's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
DOCUMENT = ROOT / "docs/explanation/kernels.md"
TABLE_BEGIN = "<!-- made by `python tools/compile_kernels.py --write` -->"
TABLE_END = "<!-- end of what it made -->"
SHARED_LIMIT_BYTES = 227 * 1024
REGISTERS = 65536  # of a multiprocessor
HOPPER = ("cuda", 90, 32)
SGLANG = "SGLang"


class Case(NamedTuple):
    """A launch: its name in the table, and what starts one kernel or several."""

    name: str
    launch: Callable[[], object]


class Compiled(NamedTuple):
    """Describes what one kernel takes of a multiprocessor."""

    case: str
    kernel: str
    types: str  # of the arguments that are no compile-time constants, one after the other
    warps: int
    shared_bytes: int
    registers: int
    spilled_bytes: int  # a thread: stores to and loads from local memory
    has_wgmma: bool
    vector_loads: int

    def is_for_tests(self) -> bool:
        """Return whether only tests launch it: attention in float32."""
        return "fp32" in self.case


def cases(has_sglang: bool) -> Iterator[Case]:
    """All kernels in the sizes of Qwen2.5 7B (28 heads, 4 with keys, of 128), and attention in others, too."""
    import torch

    from sglang_ext_kernels import block_attention, padded_batch, prefix_attention

    half, single = torch.bfloat16, torch.float32

    def heads(tokens: int, count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tokens, count, size, dtype=dtype)

    def positioned(
        dtype: torch.dtype,
        size: int,
        sizes: block_attention.BlockSizes | None = None,
        queries: int = 512,
        keys: int = 512,
    ) -> None:
        sizes = sizes or block_attention.default_sizes(size, dtype)
        plan = block_attention.plan_block(torch.arange(keys, keys + queries), torch.arange(keys), sizes)
        q, kv = heads(queries, 28, size, dtype), heads(keys, 4, size, dtype)
        block_attention.positioned_block(q, kv, kv, plan, 0.1)

    for name, dtype, size in (("bf16", half, 64), ("bf16", half, 128), ("bf16", half, 256), ("fp32", single, 128)):
        yield Case(f"positioned {name} D{size}", lambda dtype=dtype, size=size: positioned(dtype, size))
    for queries, keys in ((128, 128), (64, 64)):
        sizes = block_attention.BlockSizes(queries, keys)
        yield Case(f"positioned bf16 D128 {queries}x{keys}", lambda sizes=sizes: positioned(half, 128, sizes))
    for queries, keys in ((1, 1), (1, 100), (77, 1), (77, 100)):
        yield Case(
            f"positioned bf16 D128 of {queries} by {keys}",
            lambda queries=queries, keys=keys: positioned(half, 128, queries=queries, keys=keys),
        )

    def batch(requests: int, length: int, prefix: int) -> padded_batch.PaddedBatch:
        """Filled by the kernels that pad, from lengths as SGLang has them."""
        padded = padded_batch.allocate(requests * length, requests, requests * prefix, "cpu")
        # of an odd number of requests the tensors are views that are not aligned
        tokens = torch.zeros(requests * length + 1, dtype=torch.int64)[requests % 2 :][: requests * length]
        lengths = torch.full((requests + 1,), length, dtype=torch.int32)[requests % 2 :][:requests]
        rows, table = torch.arange(requests), torch.zeros(requests, 32768, dtype=torch.int32)
        live = padded_batch.RaggedBatch(tokens, tokens, tokens, rows, lengths, lengths, table, prefix)
        padded_batch.pad_batch_(padded, live)
        return padded

    def behind_prefix(
        size: int,
        length: int,
        requests: int,
        q_heads: int = 28,
        kv_heads: int = 4,
        window: int | None = None,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        q, kv, pool = (
            heads(tokens, count, size, half)
            for tokens, count in ((length * requests, q_heads), (64, kv_heads), (99, kv_heads))
        )
        sizes = prefix_attention.splits_of(length, requests, q_heads, kv_heads, size, half)
        prefix_attention.split_prefix_attention_(
            torch.empty_like(q),
            q,
            kv,
            kv,
            pool,
            pool,
            padded_batch.allocate(64, requests, 99, "cpu"),
            0.1,
            length,
            sizes,
            window=window,
            cap=cap,
            sinks=sinks,
        )

    for size, length, requests in ((64, 64, 1), (128, 8, 4), (128, 16, 1), (128, 64, 4), (256, 16, 1)):
        yield Case(
            f"prefix bf16 D{size} {length}x{requests}",
            lambda size=size, length=length, requests=requests: behind_prefix(size, length, requests),
        )
    sinks = torch.zeros(64, dtype=half)
    yield Case("gpt-oss bf16 D64 16x1 window, sinks", lambda: behind_prefix(64, 16, 1, 64, 8, 127, sinks=sinks))
    yield Case("Gemma 2 bf16 D256 16x1 window, cap", lambda: behind_prefix(256, 16, 1, 16, 8, 4095, cap=50.0))

    def merge(dtype: torch.dtype, count: int = 28, first: int = 0, other_first: int = 0) -> None:
        out, lse = heads(77, count, 128, single), torch.zeros(77, count)
        rows, other_rows = slice(first, first + 50), slice(other_first, other_first + 50)
        block_attention.merge_states_(out[rows], lse[rows], out[rows].to(dtype), lse[other_rows])

    yield Case("merge fp32 parts", lambda: merge(single))
    yield Case("merge a bf16 part", lambda: merge(half))
    # of an odd number of heads the sums of a row in the middle are not aligned
    for first, other_first in ((1, 0), (0, 1), (1, 1)):
        yield Case(
            f"merge rows from {first} with rows from {other_first}",
            lambda first=first, other_first=other_first: merge(single, 7, first, other_first),
        )
    pool, slots = heads(4096, 4, 128, half), torch.arange(512)

    def move(first: int, count: int) -> None:
        chosen = slots[first : first + count]
        block_attention.scatter_kv_(pool, pool, chosen, block_attention.gather_kv(pool, pool, chosen))

    yield Case("gather KV", lambda: block_attention.gather_kv(pool, pool, slots))
    packed = torch.zeros(2, 512, 4, 128, dtype=half)
    yield Case("scatter KV", lambda: block_attention.scatter_kv_(pool, pool, slots, packed))
    for first, count in ((0, 1), (1, 1), (3, 50)):
        yield Case(f"move {count} from {first}", lambda first=first, count=count: move(first, count))
    yield Case("pad 64x16", lambda: batch(64, 16, 512))
    yield Case("pad 5x13", lambda: batch(5, 13, 512))
    yield Case("pad 1x1", lambda: batch(1, 1, 512))

    def pages(page_tokens: int) -> None:
        numbers = torch.zeros(4, dtype=torch.int64)
        padded_batch.fill_page_table_(
            torch.zeros(4, 512, dtype=torch.int32),
            torch.zeros(9, 4096, dtype=torch.int32),
            numbers,
            numbers,
            page_tokens,
        )

    yield Case("pages of 1", lambda: pages(1))
    yield Case("pages of 16", lambda: pages(16))
    if has_sglang:
        extend = sglang_extend()

        def extended(size: int, v_size: int, q_heads: int = 28, kv_heads: int = 4) -> None:
            padded = padded_batch.allocate(256, 4, 512, "cpu")
            q, k, pool = (heads(*sizes, size, half) for sizes in ((256, q_heads), (256, kv_heads), (4096, kv_heads)))
            v, v_pool, out = k[..., :v_size].contiguous(), pool[..., :v_size], q[..., :v_size].contiguous()
            indices = (padded.qo_indptr, padded.kv_indptr, padded.kv_indices)
            extend(q, k, v, out, pool, v_pool, *indices, None, True, None, 64, 1.0, 1.0, sm_scale=0.1)

        name = f"{SGLANG} {version('sglang')} extend"
        for size in (64, 128, 256):
            yield Case(f"{name} D{size}", lambda size=size: extended(size, size))
        yield Case(f"{name} latent D576", lambda: extended(576, 512, 16, 1))


def sglang_extend() -> Callable[..., None]:
    """SGLang's function that starts its extend kernel, without the rest of SGLang, which wants a GPU."""
    folder = Path(importlib.util.find_spec("sglang").origin or "").parent.parent  # type: ignore[union-attr]
    from pretended_gpu import open_package

    for name in ("sglang", "sglang.srt", "sglang.kernels.ops"):
        open_package(folder, name)
    utils = ModuleType("sglang.srt.utils")
    utils.__file__ = utils.__name__
    utils.__getattr__ = lambda name: lambda *_: name == "is_cuda"  # type: ignore[method-assign]
    sys.modules[utils.__name__] = utils
    extend: Callable[..., None] = importlib.import_module(
        "sglang.kernels.ops.attention.extend_attention"
    ).extend_attention_fwd
    return extend


def compile_all() -> list[Compiled]:
    """Return every case's kernels, in order, without repetitions."""
    from pretended_gpu import pretend

    pretend()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from sglang_ext_kernels import triton_support

    target = GPUTarget(*HOPPER)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )
    triton_support.runs_on = lambda tensor: True
    launched: list[Any] = []
    compile_only = JITFunction.run

    def run(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched.append((kernel, compile_only(kernel, *arguments, **{**options, "warmup": True})))

    JITFunction.run = run
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    found: dict[str, Compiled] = {}
    for case in cases(has_sglang=importlib.util.find_spec("sglang") is not None):
        launched.clear()
        case.launch()
        for kernel, compiled in launched:
            if compiled.hash not in found:
                found[compiled.hash] = _measure(case.name, kernel.fn.__name__.strip("_"), compiled, ptxas)
    return list(found.values())


def _measure(case: str, name: str, compiled: Any, ptxas: Path) -> Compiled:
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(ptxas), "-v", "--gpu-name=sm_90a", "-o", "/dev/null", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", report)
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    types = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    return Compiled(
        case=case,
        kernel=name,
        types=" ".join(types),
        warps=compiled.metadata.num_warps,
        shared_bytes=compiled.metadata.shared,
        registers=int(registers),
        spilled_bytes=sum(spilled),
        has_wgmma="wgmma" in ptx,
        vector_loads=ptx.count("ld.global.v4") + ptx.count("cp.async.cg.shared.global"),
    )


def problems(records: list[Compiled]) -> list[str]:
    """Kernels that would not start, or would be slow."""
    found = [
        f"{record.case}: {record.kernel} takes {record.shared_bytes} bytes of shared memory, more than "
        f"{SHARED_LIMIT_BYTES}"
        for record in records
        if record.shared_bytes > SHARED_LIMIT_BYTES
    ]
    ours = [record for record in records if not record.is_for_tests() and not record.case.startswith(SGLANG)]
    found += [
        f"{record.case}: {record.kernel} spills {record.spilled_bytes} bytes" for record in ours if record.spilled_bytes
    ]
    return found


def path_of(triton_version: str) -> Path:
    """Return where the records of a version of Triton are kept."""
    return RESULTS / f"compiled-sm90a-triton-{triton_version}.json"


def read_records() -> dict[str, list[Compiled]]:
    """Version of Triton to records, of all that are kept."""
    paths = sorted(RESULTS.glob("compiled-sm90a-triton-*.json"))
    return {
        path.stem.rpartition("-")[2]: [Compiled(**load) for load in json.loads(path.read_text(encoding="utf-8"))]
        for path in paths
    }


def table(records: dict[str, list[Compiled]]) -> str:
    """One row a kernel and case; what differs between versions is given for each, in their order."""
    versions = sorted(records)
    lines = [
        f"Triton {' / '.join(versions)}, one value where they agree; blocks: as many as fit on a multiprocessor.",
        "",
        "| launch | kernel | warps | shared KiB | registers | spilled bytes | blocks | wgmma |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[str, str], dict[str, Compiled]] = {}
    for triton_version in versions:
        for record in records[triton_version]:
            rows.setdefault((record.case, record.kernel), {})[triton_version] = record
    for (case, kernel), by_version in rows.items():
        columns: list[Callable[[Compiled], str]] = [
            lambda one: str(one.warps),
            lambda one: f"{one.shared_bytes / 1024:.1f}",
            lambda one: str(one.registers),
            lambda one: str(one.spilled_bytes),
            lambda one: str(_blocks(one)),
            lambda one: "yes" if one.has_wgmma else "",
        ]
        cells = []
        for column in columns:
            values = [column(by_version[one]) for one in versions if one in by_version]
            cells.append(values[0] if len(set(values)) == 1 else " / ".join(values))
        lines.append(f"| {case} | `{kernel}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _blocks(compiled: Compiled) -> int:
    """Programs that registers and shared memory of a multiprocessor hold; registers are given out by 8 a thread."""
    of_registers = REGISTERS // (-(-compiled.registers // 8) * 8 * 32 * compiled.warps)
    of_shared = 228 * 1024 // (compiled.shared_bytes + 1024)
    return min(of_registers, of_shared, 64 // compiled.warps, 32)


def with_table(document: str, made: str) -> str:
    """Return the document with its table replaced. Raises ValueError where it has none."""
    before, begin, rest = document.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT}: no {TABLE_BEGIN} ... {TABLE_END}")
    return f"{before}{begin}\n{made}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print records instead of a table")
    parser.add_argument(
        "--write", action="store_true", help="keep the records, and renew the table in docs/explanation/kernels.md"
    )
    arguments = parser.parse_args()
    import triton

    records = compile_all()
    if arguments.write:
        lines = ",\n ".join(json.dumps(record._asdict()) for record in records)
        path_of(triton.__version__).write_text(f"[{lines}]\n", encoding="utf-8")
        made = with_table(DOCUMENT.read_text(encoding="utf-8"), table(read_records()))
        DOCUMENT.write_text(made, encoding="utf-8")
    print(
        json.dumps([record._asdict() for record in records]) if arguments.json else table({triton.__version__: records})
    )
    for problem in problems(records):
        print(problem, file=sys.stderr)
    return 1 if problems(records) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Describes what the machine has that the stages need, each looked at in seconds, before minutes go into finding out.

    python -m gpu.preflight --out FILE
    python -m gpu.preflight --out FILE --pretend      what can be looked at before: imports, as on a Hopper GPU

Each check has an outcome and a time of its own, written as it is known; one that fails stops no other. Those that are
required are what every later stage needs; the others say which baselines there will be, and are tried in processes of
their own, as a library that is not whole may end the one that calls it, or compile for minutes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from gpu.pretended_gpu import pretend
from support.result import progress, write_json

# Of bfloat16, against float32.
BOUND = 2e-2
NIXL_TIMEOUT_S = 10.0
OPTIONAL_LIMIT_S = 60.0


class Check(NamedTuple):
    """`run` returns a line of what it found, and raises where it is not as it should be."""

    name: str
    is_required: bool
    run: Callable[[], str]
    computes: bool = True  # on the device


class MissingError(RuntimeError):
    """Something is not there, or gives wrong numbers; the text is one line."""


def device() -> str:
    import torch

    if not torch.cuda.is_available():
        raise MissingError(f"torch {torch.__version__} finds no CUDA device")
    properties = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return (
        f"{properties.name}, capability {properties.major}.{properties.minor}, {properties.multi_processor_count} SMs, "
        f"{free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free, torch {torch.__version__}"
    )


def compiler() -> str:
    """nvcc, the headers that flashinfer's kernels include, and the library that they are linked against."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if not (home / "bin/nvcc").is_file():
        raise MissingError(f"no nvcc in {home}/bin (CUDA_HOME)")
    included = [home / "include", *map(Path, filter(None, os.environ.get("CPATH", "").split(":")))]
    linked = [home / "lib64/stubs", *map(Path, filter(None, os.environ.get("LIBRARY_PATH", "").split(":")))]
    absent = [
        *(name for name in ("cublasLt.h", "curand.h") if not any((folder / name).is_file() for folder in included)),
        *([] if any((folder / "libcuda.so").exists() for folder in linked) else ["libcuda.so"]),
    ]
    if absent:
        raise MissingError(f"nvcc is in {home}, but {', '.join(absent)} are neither there nor on CPATH, LIBRARY_PATH")
    return f"nvcc, headers and libcuda.so in {home} or on CPATH, LIBRARY_PATH"


def packages() -> str:
    names = ("sglang", "sglang-kernel", "flashinfer-python", "triton", "transformers", "apache-tvm-ffi")
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            raise MissingError(f"{name} is not installed") from None
    return ", ".join(found)


def engine() -> str:
    """Modules that a model runner, a model and a server import, some of them when they are made."""
    for name in (
        *("sglang.benchmark.one_batch", "sglang.srt.entrypoints.http_server", "sglang_ext.engine.launch"),
        *("sglang.srt.models.qwen2", "sglang.kernels.ops.gemm.cutedsl_dual_gemm", "nvshmem.core"),
        *(f"sglang.srt.layers.attention.{one}_backend" for one in ("flashattention", "flashinfer", "triton")),
    ):
        importlib.import_module(name)
    return "SGLang, its attention and this project's plugin are imported"


def carried_modules() -> str:
    """Return what flashinfer need not compile."""
    from flashinfer.jit import env

    names = sorted(name for provider in env.FLASHINFER_AOT_PROVIDERS for name in provider.modules)
    if not names:
        raise MissingError("none of flashinfer's modules was compiled beforehand")
    return f"flashinfer finds {len(names)} of its modules compiled: {', '.join(name[:24] for name in names)}"


def optional_imports() -> str:
    for name in ("sgl_kernel.flash_attn", "nixl._api", "torchvision"):
        importlib.import_module(name)
    return "FlashAttention 3, NIXL and torchvision are imported"


def own_modules() -> str:
    """Decisions take several times as long uncompiled, and a planner of long prompts has no other way."""
    from sglang_ext.long_pool.decide import _core  # noqa: F401
    from sglang_ext_router.compiled import describe_compiled

    is_wrong, state = describe_compiled()
    if is_wrong or "plain Python" in state:
        raise MissingError(state)
    return f"{state}, and so is the planner's core"


def sglang_modules() -> str:
    """Return what SGLang compiles for a model with heads of 128 in bfloat16, once for all stages."""
    import torch
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import can_use_store_cache

    _jit_fused_rope_module(True, 128, torch.bfloat16, torch.bfloat16)
    rows_bytes = [heads * 128 * 2 for heads in (4, 8)]
    failed = [byte for byte in rows_bytes if not can_use_store_cache(byte, byte)]
    if failed:
        raise MissingError(f"KV stores of rows of {', '.join(map(str, failed))} bytes do not compile")
    return "rotary positions and KV stores are compiled"


def norm() -> str:
    """The norm that stands twice in every layer: it may be compiled when it is first called."""
    import torch
    from sgl_kernel import fused_add_rmsnorm, rmsnorm

    x = torch.randn(64, 3584, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(3584, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn_like(x)

    def wanted(of: torch.Tensor) -> torch.Tensor:
        wide = of.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()

    _compare(rmsnorm(x, weight, 1e-6), wanted(x))
    total = x.float() + residual.float()
    fused_add_rmsnorm(x, residual, weight, 1e-6)
    _compare(x, wanted(total))
    return "bfloat16 RMSNorm, with and without the residual, as in float32"


def activation() -> str:
    import torch
    from sglang.srt.layers.activation import silu_and_mul

    x = torch.randn(64, 2 * 18944, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(64, 18944, device="cuda", dtype=torch.bfloat16)
    silu_and_mul(x, out)
    gate, up = x.float().chunk(2, dim=-1)
    _compare(out, torch.nn.functional.silu(gate) * up)
    return "bfloat16 SiLU and product as in float32"


def flash_attention_3() -> str:
    """SGLang's default attention on Hopper GPUs, over packed keys and over a cache whose pages have one token."""
    import torch
    from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    q, k, v, starts = _attention_inputs()
    common: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": 64, "causal": True, "softmax_scale": 128**-0.5}
    packed = flash_attn_varlen_func(q, k, v, cu_seqlens_k=starts, max_seqlen_k=64, **common)
    slots = torch.randperm(64, device="cuda")
    k_cache, v_cache = torch.empty_like(k)[:, None], torch.empty_like(v)[:, None]
    k_cache[slots, 0], v_cache[slots, 0] = k, v
    cached = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        page_table=slots[None].int(),
        cache_seqlens=starts[1:],
        cu_seqlens_k_new=starts,
        **common,
    )
    for got in (packed, cached):
        _compare(got[0] if isinstance(got, tuple) else got, _attention(q, k, v))
    return "FlashAttention 3, packed and paged, as in float32: SGLang's default attention"


def flashinfer() -> str:
    import flashinfer as library

    q, k, v, _ = _attention_inputs()
    _compare(library.single_prefill_with_kv_cache(q, k, v, causal=True, sm_scale=128**-0.5), _attention(q, k, v))
    return "flashinfer's prefill as in float32"


def nvshmem() -> str:
    from sglang_ext.long_pool.mesh.nvshmem_memory import load_nvshmem

    load_nvshmem()
    return f"nvshmem4py {version('nvshmem4py-cu13')}"


def nixl() -> str:
    """Return what moves KV between two engines: one agent writes into another's device memory."""
    import torch

    source = torch.arange(4096, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    nixl_write(source, target, "VRAM")
    if not torch.equal(source, target):
        raise MissingError("NIXL has written something else")
    return f"nixl {version('nixl')} writes device memory over UCX"


def nixl_write(source: Any, target: Any, kind: str) -> None:
    """Copy a tensor by NIXL from one agent of this process to another; `kind` is its name for the memory.

    Raises MissingError where that is not done in time.
    """
    from nixl._api import nixl_agent, nixl_agent_config

    agents = [nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in ("preflight-from", "preflight-to")]
    regions = [(one.data_ptr(), one.nbytes, one.get_device() if one.is_cuda else 0) for one in (source, target)]
    for agent, region in zip(agents, regions, strict=True):
        agent.register_memory([(*region, "")], kind)
    sender, receiver = agents
    peer = sender.add_remote_agent(receiver.get_agent_metadata())
    from_, to = (sender.get_xfer_descs([region], kind) for region in regions)
    transfer = sender.initialize_xfer("WRITE", from_, to, peer, b"")
    state = sender.transfer(transfer)
    end_s = time.perf_counter() + NIXL_TIMEOUT_S
    while state not in ("DONE", "ERR") and time.perf_counter() < end_s:
        time.sleep(0.001)
        state = sender.check_xfer_state(transfer)
    if state != "DONE":
        raise MissingError(f"NIXL's write is {state} after {NIXL_TIMEOUT_S:g} s")


def _attention_inputs() -> tuple[Any, Any, Any, Any]:
    import torch

    q = torch.randn(64, 28, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(64, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return q, k, v, torch.tensor([0, 64], device="cuda", dtype=torch.int32)


def _attention(q: Any, k: Any, v: Any) -> Any:
    import torch

    wide = (tensor.float().transpose(0, 1)[None] for tensor in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def _compare(got: Any, wanted: Any) -> None:
    error = float((got.float() - wanted).norm() / wanted.norm())
    if not error < BOUND:
        raise MissingError(f"differs from float32 by {error:.2g}, more than {BOUND:g}")


CHECKS = (
    Check("device", True, device),
    Check("packages", True, packages, computes=False),
    Check("compiler", False, compiler),
    Check("engine", True, engine, computes=False),
    Check("own modules", True, own_modules, computes=False),
    Check("carried modules", False, carried_modules, computes=False),
    Check("other imports", False, optional_imports, computes=False),
    Check("norm", True, norm),
    Check("activation", True, activation),
    Check("SGLang's modules", True, sglang_modules),
    Check("FlashAttention 3", False, flash_attention_3),
    Check("NVSHMEM", True, nvshmem),
    Check("NIXL", False, nixl),
    Check("flashinfer", False, flashinfer),
)


def run_check(check: Check) -> dict[str, Any]:
    """The outcome as a plain JSON value."""
    started_s = time.perf_counter()
    try:
        detail, is_ok = check.run(), True
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        detail, is_ok = lines[0] if isinstance(error, MissingError) else f"{type(error).__name__}: {lines[-1]}", False
    seconds = time.perf_counter() - started_s
    return {"ok": is_ok, "is_required": check.is_required, "detail": detail, "seconds": seconds}


def run_apart(check: Check, limit_s: float) -> dict[str, Any]:
    """The same in a process of its own, which is ended after `limit_s`."""
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "gpu.preflight", "--only", check.name, "--out", str(out)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
            )
            problem = f"its process ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit_s:.0f} s"
        if out.is_file():
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["checks"].get(check.name, {})
            if found:
                return found
    seconds = time.perf_counter() - started_s
    return {"ok": False, "is_required": check.is_required, "detail": problem, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--within", type=float, default=500.0, help="no check is begun later (s; default: 500)")
    parser.add_argument("--only", choices=[check.name for check in CHECKS], default=None, help="one check, in here")
    parser.add_argument("--pretend", action="store_true", help="without a GPU: only what does not compute")
    arguments = parser.parse_args()
    end_s = time.perf_counter() + arguments.within
    found: dict[str, Any] = {"checks": {}}
    checks = [one for one in CHECKS if arguments.only in (None, one.name)]
    if arguments.pretend:
        pretend()
        checks = [one for one in checks if not one.computes]
    for check in checks:
        left_s = end_s - time.perf_counter()
        if left_s < 0:
            break
        is_apart = arguments.only is None and not check.is_required and not arguments.pretend
        result = run_apart(check, min(left_s, OPTIONAL_LIMIT_S)) if is_apart else run_check(check)
        found["checks"][check.name] = result
        progress(f"{'yes' if result['ok'] else 'NO '} {check.name:<18} {result['seconds']:6.1f} s  {result['detail']}")
        write_json(arguments.out, found)
    wrong = [check for check in found["checks"].values() if check["is_required"] and not check["ok"]]
    return 1 if arguments.pretend and wrong else 0


if __name__ == "__main__":
    sys.exit(main())

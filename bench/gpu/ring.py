"""Ring attention between two processes on one GPU, over the mesh that members of a long pool have there.

    python bench/gpu/ring.py [--mesh device|host] [--tokens N] [--layers N] [--out FILE] [--dry-run]

First whether CUDA IPC works between processes (transports on one machine need it); then a prompt whose tokens lie in
zigzag order at two members: each layer's attention of all its tokens, with keys and values passed round, against
float64. Without a GPU both members' tensors lie in host memory.

A bad number: an error above its bound is a wrong ring or a message that came before its bytes. Milliseconds far above
the bound: the mesh does not hide behind the computation, or pinned memory is allocated again for each message.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.multiprocessing  # lets multiprocessing pass tensors

import gpu.checkout  # noqa: F401
from gpu.attention_cases import DTYPE, HEAD_SIZE, HEADS, KV_HEADS, SCALE, attention_in_double
from gpu.measure import DEVICE, HAS_GPU, Report, parser, progress, relative_error, synchronize
from sglang_ext.long_pool.member.ring_attention import AttentionRule, Ring, as_tensor
from sglang_ext.long_pool.mesh.mesh import Membership
from sglang_ext.long_pool.mesh.peer_links import LinkMesh, PeerLinks

MEMBERS = 2
STEPS = 4  # the first compiles
CHECKED_ROWS = 48
TIMEOUT_S = 120.0


def zigzag(tokens: int, place: int) -> tuple[range, range]:
    """The positions of a member: the same share of the causal work for each."""
    part = tokens // (2 * MEMBERS)
    last = 2 * MEMBERS - 1 - place
    return range(place * part, (place + 1) * part), range(last * part, (last + 1) * part)


def inputs(tokens: int) -> list[torch.Tensor]:
    """Queries, keys and values of the whole prompt, the same in each process."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(tokens, heads, HEAD_SIZE, generator=generator).to(DEVICE, DTYPE)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def device_mesh(kind: str) -> Callable[[LinkMesh], AbstractContextManager[Any]]:
    """Return the mesh of two members that NCCL cannot connect, as on one GPU."""
    if not HAS_GPU:
        return nullcontext
    from sglang_ext.long_pool.mesh.device_streams import CudaStreams
    from sglang_ext.long_pool.mesh.shared_device_mesh import CudaSharing, SharedDeviceMeshes
    from sglang_ext.long_pool.mesh.staged_mesh import StagedMeshes

    device = torch.device("cuda", 0)
    if kind == "host":
        return StagedMeshes(CudaStreams(device)).over
    return SharedDeviceMeshes(CudaStreams(device), CudaSharing(device)).over


def member(place: int, tokens: int, layers: int, kind: str, pipe: Connection) -> None:
    """Run one process: it sends its address, gets all others, computes some steps and sends what it found."""
    try:
        links = PeerLinks("127.0.0.1", b"", 60.0, over=device_mesh(kind))
        links.enter(Membership(16 * b"r", place))
        pipe.send(links.address)
        addresses = pipe.recv()
        q, k, v = inputs(tokens)
        held = [zigzag(tokens, each) for each in range(MEMBERS)]
        rows = as_tensor(held[place], torch.device(DEVICE))
        kv = torch.stack([k[rows], v[rows]])
        mine = q[rows].contiguous()
        seconds = []
        for step in range(STEPS):
            with links.step(step + 1, addresses) as mesh:
                synchronize()
                mesh.meet()
                started_s = time.perf_counter()
                ring = Ring(mesh, tuple(range(MEMBERS)), place, held, 0)
                for layer in range(layers):
                    out = ring.attend(mine, held[place], kv, AttentionRule(SCALE), layer)
                mesh.settle()
                synchronize()
                seconds.append((time.perf_counter() - started_s) / layers)
                kind = type(mesh).__name__
        sample = torch.linspace(0, len(rows) - 1, CHECKED_ROWS).long().to(DEVICE)
        at = torch.arange(tokens, device=DEVICE)
        wanted, _ = attention_in_double(q[rows[sample]], k, v, rows[sample], at)
        error = relative_error(out[sample], wanted)
        pipe.send({"mesh": kind, "error": error, "layer_s": seconds, "message_bytes": kv.nbytes})
        links.close()
    except Exception:
        pipe.send({"failed": traceback.format_exc()[-800:]})


def add_one(tensors: Any, pipe: Connection) -> None:
    """The other process of the check of CUDA IPC."""
    try:
        tensor = tensors.get()
        found = float(tensor.sum())
        tensor.add_(1.0)
        synchronize()
        # Its memory is the other process's, which must still be there when this one lets go of it.
        del tensor
        torch.cuda.ipc_collect()
        pipe.send(found)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}"[:300])


def shared_memory_of_the_device(report: Report) -> None:
    """Check that another process can read and write a tensor of this one."""
    context = torch.multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    tensors = context.SimpleQueue()
    process = context.Process(target=add_one, args=(tensors, there), daemon=True)
    process.start()
    tensor = torch.ones(1 << 20, device=DEVICE)
    synchronize()
    tensors.put(tensor)
    found = here.recv() if here.poll(60) else "no answer in 60 s"
    synchronize()
    report.record(cuda_ipc={"sum": found, "seen_back": float(tensor[0])})
    is_good = isinstance(found, float) and found == 1 << 20 and float(tensor[0]) == 2.0
    report.check("memory of the device is shared between processes", float(is_good), at_least=1)
    process.join(5)
    process.kill()


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=None, help="of the prompt; default: 16384, 256 in a dry run")
    options.add_argument("--layers", type=int, default=8, help="default: 8")
    options.add_argument(
        "--mesh", choices=["device", "host"], default="device", help="the GPU's own memory, or host memory and TCP"
    )
    arguments = options.parse_args()
    tokens = arguments.tokens or (256 if arguments.dry_run else 16384)
    report = Report("ring", arguments.out, arguments.dry_run)
    report.expect(
        "a layer of 16,384 tokens", "1.2 ms of computation each; at most 20 ms, also through host memory and TCP"
    )
    report.record(tokens=tokens, layers=arguments.layers, asked_mesh=arguments.mesh)
    if HAS_GPU:
        shared_memory_of_the_device(report)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for place in range(MEMBERS):
        here, there = context.Pipe()
        pipes.append(here)
        processes.append(
            context.Process(target=member, args=(place, tokens, arguments.layers, arguments.mesh, there), daemon=True)
        )
        processes[-1].start()
    addresses = {place: pipe.recv() for place, pipe in enumerate(pipes)}
    for pipe in pipes:
        pipe.send(addresses)
    found = [pipe.recv() if pipe.poll(TIMEOUT_S) else {"failed": f"no answer in {TIMEOUT_S:g} s"} for pipe in pipes]
    report.record(members=found)
    for place, one in enumerate(found):
        if "failed" in one:
            report.fail(f"member {place}", RuntimeError(one["failed"]))
            continue
        progress(f"member {place} over {one['mesh']}: ms a layer {[round(each * 1e3, 2) for each in one['layer_s']]}")
        report.check(f"error of member {place}", one["error"], at_most=1e-2)
        report.check(f"ms a layer of member {place}", min(one["layer_s"]) * 1e3, at_most=20, is_speed=True)
    for process in processes:
        process.join(10)
        process.kill()
    return report.end()


if __name__ == "__main__":
    sys.exit(main())

"""The links of one rank of a member in one epoch, found through the coordinator's store.

Each rank of an instance is connected with the same ranks of the others. The instance has a mesh when all of its ranks
have one: they say so in the store, and its first rank, which tells the coordinator, waits for them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from sglang_ext.sequence_parallel.mesh import GlooMesh, Mesh, MeshError, first_line
from sglang_ext.sequence_parallel.messages import Welcome
from sglang_ext.sequence_parallel.nccl_mesh import NcclMesh
from sglang_ext.sequence_parallel.ranks import SINGLE_RANK, Ranks
from sglang_ext.sequence_parallel.step_watch import StepWatch

_IS_BUILT = "built"
_CPU = torch.device("cpu")


def connect_mesh(
    welcome: Welcome,
    epoch: int,
    members: tuple[int, ...],
    timeout_s: float,
    ranks: Ranks = SINGLE_RANK,
    device: torch.device = _CPU,
) -> Mesh:
    """This rank's links to the other members in one epoch, for tensors on `device`; blocks.

    Raises MeshError without all of them within `timeout_s`, on the first rank also where another rank has failed.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        # A store of its own for each: one that waits for a lost member would keep the next epoch waiting.
        store = dist.TCPStore(welcome.store_host, welcome.store_port, is_master=False, timeout=timeout)
        key = f"mesh/{epoch}/instance{welcome.instance}/rank"
        try:
            mesh = make_mesh(store, f"mesh/{epoch}/rank{ranks.rank}", members, welcome.instance, timeout_s, device)
        except MeshError as error:
            store.set(f"{key}{ranks.rank}", str(error))
            raise
        mesh.watch(StepWatch(store, epoch, mesh.interrupt))
        store.set(f"{key}{ranks.rank}", _IS_BUILT)
        if ranks.rank == 0:
            _wait_for_others(store, [f"{key}{rank}" for rank in range(1, ranks.size)])
    except MeshError:
        raise
    except RuntimeError as error:
        raise MeshError(f"mesh {epoch}: {first_line(error)}") from None
    return mesh


def make_mesh(
    store: dist.Store, name: str, members: Sequence[int], instance: int, timeout_s: float, device: torch.device
) -> GlooMesh | NcclMesh:
    """By the kind of device: gloo for host memory, NCCL for a GPU's. Raises MeshError."""
    if device.type == "cpu":
        return GlooMesh(store, name, members, instance, timeout_s)
    return NcclMesh(store, name, members, instance, timeout_s, device)


def _wait_for_others(store: dist.Store, keys: list[str]) -> None:
    for key in keys:
        answer = store.get(key).decode()  # waits
        if answer != _IS_BUILT:
            raise MeshError(answer)

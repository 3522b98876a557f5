"""Members of a long pool in processes of their own, all on the first GPU: only other processes open its memory."""

from __future__ import annotations

import traceback
from multiprocessing.connection import Connection
from typing import Any

ROWS = 500_000
TIMEOUT_S = 60.0


def take_part(instance: int, steps: list[bool], pipe: Connection) -> None:
    """Send the address, receive all, and take part in steps of two; in one that is lost the second member fails."""
    import torch

    from sglang_ext.long_pool.mesh.device_streams import CudaStreams
    from sglang_ext.long_pool.mesh.mesh import Membership, MeshError
    from sglang_ext.long_pool.mesh.peer_links import PeerLinks
    from sglang_ext.long_pool.mesh.shared_device_mesh import CudaSharing, SharedDeviceMeshes

    try:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        over = SharedDeviceMeshes(CudaStreams(device), CudaSharing(device)).over
        links = PeerLinks("127.0.0.1", b"", TIMEOUT_S, over=over)
        links.enter(Membership(16 * b"p", instance))
        pipe.send(links.address)
        addresses = pipe.recv()
        found: list[Any] = []
        for number, is_lost in enumerate(steps, start=1):
            try:
                with links.step(number, addresses) as mesh:
                    found.append((type(mesh).__name__, _swap(mesh, instance, is_lost)))
            except MeshError as error:
                found.append(str(error))
        pipe.send(found)
        pipe.recv()  # the other one has what it needs of this process
        links.close()
    except Exception:
        pipe.send(traceback.format_exc()[-1500:])


def _swap(mesh: Any, instance: int, is_lost: bool) -> int:
    """Rounds of computing, sending, receiving, and computing with what has come; how many came right."""
    import torch

    from sglang_ext.long_pool.mesh.mesh import MeshError

    other, right, sums = 1 - instance, [], []
    for number in range(30):
        if is_lost and number == 3 and instance == 1:
            raise MeshError("on purpose")
        rows = ROWS if number % 2 else 1000
        torch.cuda._sleep(2_000_000)  # what is sent is being computed still
        ours = torch.full((rows,), float(number * 2 + instance), device="cuda")
        theirs = torch.full((rows,), -1.0, device="cuda")
        with mesh.batch():
            calls = [mesh.receive(theirs, other, number), mesh.send(ours, other, number)]
        for call in calls:
            call.wait()
        ours.fill_(float("nan"))  # what was sent may be overwritten now
        sums.append(theirs.double().mean())
        right.append(float(number * 2 + other))
    mesh.settle()
    return sum(float(value) == wanted for value, wanted in zip(sums, right, strict=True))

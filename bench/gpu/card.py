"""The GPU of a run, read without opening it: its name, its memory, and what is known of it before anything is measured.

`nvidia-smi` is asked, not torch: a process that opens the device holds some of its memory for as long as it lives, and
the one that starts the stages lives through all of them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from gpu.floor import Ceilings
from gpu.model_shapes import SHAPES

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
# Measured on cards of these names: the bandwidth of a copy, read and written, and products of 8192 x 8192 matrices.
NOMINAL = {"h100": Ceilings(3.0e12, 7.9e14), "h200": Ceilings(4.3e12, 7.8e14)}
# KV of a closed loop of 64 clients, and what workspaces, graphs and activations take beside weights and KV.
KV_TOKENS = 65536
OTHER_BYTES = 8e9


class Card(NamedTuple):
    """One GPU."""

    name: str
    memory_bytes: float
    driver: str = "unknown"

    @property
    def slug(self) -> str:
        """Return what result files are named by: `h100`, `h200`, or the whole name in small letters."""
        known = re.search(r"\b([A-Z]+\d+)\b", self.name)
        return known[1].lower() if known else re.sub(r"\W+", "-", self.name).strip("-").lower()

    @property
    def nominal(self) -> Ceilings | None:
        """Expected ceilings; None for a card that none was measured of."""
        return NOMINAL.get(self.slug)


CARDS = {
    "h100": Card("NVIDIA H100 80GB HBM3", 81559 * 2**20),
    "h200": Card("NVIDIA H200", 143771 * 2**20),
}


def read_card() -> Card | None:
    """The first GPU of this machine; None without one or without its driver."""
    if shutil.which(QUERY[0]) is None:
        return None
    done = subprocess.run(QUERY, capture_output=True, text=True, check=False)
    fields = [field.strip() for field in (done.stdout.splitlines() or [""])[0].split(",")]
    if done.returncode != 0 or len(fields) != len(Card._fields) or not fields[1].isdigit():
        return None
    return Card(fields[0], int(fields[1]) * 2**20, fields[2])


@contextmanager
def busy_samples() -> Iterator[list[float]]:
    """Shares of time in which the GPU computed, sampled twice a second meanwhile and there at the end; what is missing
    to 1 lies between iterations. None without a GPU."""
    found: list[float] = []
    if shutil.which(QUERY[0]) is None:
        yield found
        return
    sampler = subprocess.Popen(
        [QUERY[0], "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield found
    finally:
        sampler.terminate()
        output, _ = sampler.communicate()
        found += [float(line) / 100 for line in output.split() if line.isdigit()]


def weight_bytes(model: str) -> float:
    """Of all matrices, the embedding too."""
    shape = SHAPES[model]
    heads = 1 if shape.is_tied else 2
    return (shape.body_parameters + heads * shape.head_parameters) * float(shape.element_bytes)


def needed_bytes(model: str) -> float:
    """Device memory that an instance of `model` takes under the load of figure 6."""
    return weight_bytes(model) + KV_TOKENS * SHAPES[model].kv_bytes_per_token + OTHER_BYTES


def largest_model(memory_bytes: float) -> str:
    """The largest of the Qwen2.5 shapes that fits. Raises ValueError where none does."""
    fitting = [name for name in SHAPES if name != "tiny" and needed_bytes(name) <= memory_bytes]
    if not fitting:
        raise ValueError(f"no model fits into {memory_bytes / 1e9:.0f} GB of device memory")
    return max(fitting, key=weight_bytes)

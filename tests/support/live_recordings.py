"""Recordings of the live page's stream to test it with, made by the simulator."""

from __future__ import annotations

import random
from pathlib import Path

from sglang_ext.cli import main


def simulated_recording(folder: Path, *, seconds: float = 20.0, seed: int = 1) -> Path:
    """Short prompts, one in seven long, on three short and five long instances, of which some move; two decode."""
    draw = random.Random(seed)
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens"]
    at_s = 0.0
    while (at_s := at_s + draw.expovariate(25)) < seconds:
        tokens = draw.choice((30, 60, 100, 180, 240)) if draw.random() < 0.85 else draw.randint(4_000, 30_000)
        lines.append(f"{at_s:.3f},{tokens},{draw.randint(20, 300)}")
    workload = folder / "workload.csv"
    workload.write_text("\n".join(lines) + "\n")
    out = folder / "recording.jsonl"
    options = ["--policy", "laps", "--prefill", "8", "--short-instances", "3", "--move-pools", "--decode", "2"]
    assert (
        main(["simulate", "--workload", str(workload), *options, "--boundary-tokens", "256", "--record", str(out)]) == 0
    )
    return out

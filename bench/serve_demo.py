"""The demonstration's cluster under SGLang's own load generator: short and long prompts at the same time.

    python bench/serve_demo.py [--short 20] [--long 5]

Starts one short prefill, one long prefill and one decode instance of SmolLM2-135M-Instruct and the router, then
runs `sglang.bench_serving` twice at once, unmodified, with random prompts: one process sends the short prompts,
one the long, each at Poisson arrival times. Goodput is the rate of requests that kept both of their targets,
time to first token (TTFT) and time per output token (TPOT). Fails when any request fails.

The last line is `RESULT {json}`; latencies in milliseconds, rates per second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from sglang_ext.cluster.cluster import Cluster
from sglang_ext.cluster.config import ClusterConfig, ConfigError, PoolConfig, PoolsConfig, RouterSettings
from sglang_ext.cluster.display import PlainDisplay
from sglang_ext.cluster.state import ClusterInUseError
from sglang_ext.cluster.supervisor import StartError
from sglang_ext.cpu.models.smollm2 import MODEL_NAME, ModelError, ensure_smollm2
from support.bench_serving import BenchServing, BenchServingError, ClassLoad, ClassResult
from support.result import BenchmarkRun, give_up, progress

LENGTH_BOUNDARY_TOKENS = 512


class Target(NamedTuple):
    """Describes what a request of a class must keep to count as good."""

    ttft_ms: float
    tpot_ms: float


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    benchmark = BenchmarkRun("sglang-ext", "sglang", "torch")
    loads = {
        "short": ClassLoad(arguments.short, arguments.short_rate, 128, arguments.output_tokens, seed=1),
        "long": ClassLoad(arguments.long, arguments.long_rate, 1200, arguments.output_tokens, seed=2),
    }
    targets = {
        "short": Target(arguments.short_ttft_ms, arguments.tpot_ms),
        "long": Target(arguments.long_ttft_ms, arguments.tpot_ms),
    }
    try:
        model = ensure_smollm2()
        with (
            tempfile.TemporaryDirectory(prefix="serve-demo-") as scratch,
            Cluster(_cluster_config(), PlainDisplay(sys.stdout)) as cluster,
            cluster.kept_running(),
            ExitStack() as running,
        ):
            progress(f"load: {', '.join(f'{load.requests} {name} prompts' for name, load in loads.items())}")
            runs = {
                name: running.enter_context(
                    BenchServing(load, cluster.url, MODEL_NAME, model, Path(scratch) / f"{name}.jsonl")
                )
                for name, load in loads.items()
            }
            results = {name: run.wait(progress=lambda line: progress(f"  {line}")) for name, run in runs.items()}
    except StartError as error:
        print("\n".join(f"  | {line}" for line in error.log_lines), file=sys.stderr)
        give_up(str(error))
    except (ConfigError, ModelError, ClusterInUseError, BenchServingError, OSError) as error:
        give_up(str(error))
    summary = {name: _summary(result, targets[name]) for name, result in results.items()}
    for name, values in summary.items():
        progress(f"{name}: {values}")
    failures = sum(loads[name].requests - len(result.ttft_ms) for name, result in results.items())
    benchmark.end(
        {
            "failures": failures,
            "requests": sum(load.requests for load in loads.values()),
            "classes": summary,
            "overlap_s": round(_overlap_s(list(results.values())), 1),
            "model": MODEL_NAME,
        }
    )
    if failures:
        give_up(f"{failures} requests failed")


def _summary(result: ClassResult, target: Target) -> dict[str, object]:
    good = sum(
        ttft <= target.ttft_ms and tpot <= target.tpot_ms
        for ttft, tpot in zip(result.ttft_ms, result.tpot_ms, strict=True)
    )
    return {
        "completed": len(result.ttft_ms),
        "requests_per_s": round(len(result.ttft_ms) / result.duration_s, 3),
        "input_tokens_per_s": round(result.input_tokens / result.duration_s, 1),
        "output_tokens_per_s": round(result.output_tokens / result.duration_s, 1),
        "ttft_ms": _percentiles(result.ttft_ms),
        "tpot_ms": _percentiles(result.tpot_ms),
        "goodput_per_s": round(good / result.duration_s, 3),
        "good_share": round(good / max(1, len(result.ttft_ms)), 3),
        "target": target._asdict(),
    }


def _overlap_s(results: list[ClassResult]) -> float:
    """Return how long all classes were under load together."""
    began_s = max(result.end_s - result.duration_s for result in results)
    return max(0.0, min(result.end_s for result in results) - began_s)


def _percentiles(values: list[float]) -> dict[str, float]:
    """Return the nearest-rank percentiles of `values`."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{p}": round(ordered[max(0, -(-p * len(ordered) // 100) - 1)], 1) for p in (50, 90, 99)}


def _cluster_config() -> ClusterConfig:
    one = PoolConfig(count=1)
    return ClusterConfig(
        name="serve-demo",
        run_dir=str(Path(__file__).resolve().parent.parent / "run"),
        model="smollm2",
        pools=PoolsConfig(short=one, long=one, decode=one),
        router=RouterSettings(port=0, length_boundary_tokens=LENGTH_BOUNDARY_TOKENS),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--short", type=int, default=20, help="short prompts: 64 to 128 tokens")
    parser.add_argument("--long", type=int, default=5, help="long prompts: 600 to 1200 tokens")
    parser.add_argument("--short-rate", type=float, default=0.5, help="short prompts per second")
    parser.add_argument("--long-rate", type=float, default=0.12, help="long prompts per second")
    parser.add_argument("--output-tokens", type=int, default=16, help="longest answer")
    parser.add_argument("--short-ttft-ms", type=float, default=3000, help="target of short prompts")
    parser.add_argument("--long-ttft-ms", type=float, default=15000, help="target of long prompts")
    parser.add_argument("--tpot-ms", type=float, default=500, help="target of both")
    arguments = parser.parse_args()
    for name, value in vars(arguments).items():
        if not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be greater than 0, not {value}")
    return arguments


if __name__ == "__main__":
    main()

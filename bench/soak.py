"""A cluster under mixed traffic while its instances are killed and frozen: nothing hangs, nothing is left behind.

    python bench/soak.py [--minutes 10 | --hours 2] [--users 8] [--out FOLDER]

`sglang-ext up` runs two short, one long and two decode instances of a tiny model on the CPU, and the router. Users
send chats, completions and `/generate` requests, short and long, streamed and not, with one or two sequences and with
log-probabilities; some leave at a random moment. Meanwhile one instance after the other gets SIGKILL or SIGSTOP, and
the supervisor brings it back. How a request may end:

- `ok`: whole, with as many tokens as were asked for; `left`: its client left
- `cut_by_faults`: its reply had begun when its instance was lost, and ended with an error event, or was cut
- `refused_by_faults`: an error status while an instance was out (none is expected: another one is there)
- `failed`: anything else, also the two before without a fault; `hung`: no end within `--limit-s`

Of the cut, `streams_cut` are streams with which other instances can go on; `tokens_wrong` are greedy replies whose text
differs from that of an earlier one to the same prompt, which count as failed.

Before the faults begin and after they have ended the users pause, and what the router and the engines hold is compared.
Writes `soak.png` and `soak.json`; the last line is `RESULT {json}`. Its `failed`, `hung`, `streams_cut`,
`leaked_slots`, `leaked_in_flight` and `not_recovered` must be 0, `rss_growth_mib` and `descriptor_growth` about 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from support.result import BenchmarkRun, benchmark_parser, give_up, progress
from support.soak_faults import FAULTS, Fault, Faults, Sample, ServedCluster
from support.soak_load import WRONG_TEXT, Ended, Traffic, count_outcomes
from support.text_model import build_text_model

BOUNDARY_TOKENS = 128
WARM_UP_SHARE = 0.2  # of the time with faults
WARM_UP_S = (
    30.0,
    120.0,
)  # the router's memory grows for about 100 s: prompts that it remembers, pools of its allocator
SETTLE_S = 8.0  # uvicorn closes connections that were idle for 5 s
IDLE_LIMIT_S = 60.0
START_LIMIT_S = 300.0
PROGRESS_EVERY_S = 15.0
BIN_S = 10.0  # of the picture
_LEGEND = {"ok": "tab:green", "left": "tab:blue", "cut_by_faults": "tab:orange", "refused_by_faults": "tab:purple"}


class SoakError(RuntimeError):
    """The cluster did not come up, or did not become idle."""


class Held(NamedTuple):
    """Describes what is held while no request is under way."""

    sample: Sample
    slots: dict[str, int]  # of the engines: kind → count, where it is not 0
    router: dict[str, float]  # gauges of the router that are not 0


class Run(NamedTuple):
    """A whole soak."""

    began_s: float
    faults_from_s: float
    before: Held
    after: Held
    samples: list[Sample]
    ended: list[Ended]
    faults: list[Fault]
    migrated: int  # streams


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    duration_s = arguments.hours * 3600.0 if arguments.hours else arguments.minutes * 60.0
    benchmark = BenchmarkRun("sglang-ext", "sglang", "torch")
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        with _scratch(arguments.keep) as scratch, _cluster(scratch) as cluster:
            progress(f"the cluster is up after {benchmark.elapsed_s():.0f} s; {duration_s:.0f} s of traffic")
            faults = Faults(cluster, arguments.calm_s, arguments.faults)
            run = asyncio.run(_soak(cluster, faults, duration_s, arguments.users, arguments.limit_s))
    except SoakError as error:
        give_up(str(error))
    result = {**_result(run), "users": arguments.users}
    _draw(arguments.out / "soak.png", run)
    progress(f"wrote {arguments.out / 'soak.png'} and soak.json")
    benchmark.end(result, arguments.out / "soak.json")


@contextmanager
def _scratch(keep: Path | None) -> Iterator[Path]:
    """Yield a folder for model, logs and state: `keep`, or a temporary folder."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        yield Path(folder)


@contextmanager
def _cluster(scratch: Path) -> Iterator[ServedCluster]:
    """A cluster as `sglang-ext up` runs it, every instance ready."""
    model = scratch / "model"
    model.mkdir(exist_ok=True)
    build_text_model(model)
    file = scratch / "cluster.yaml"
    settings = {
        "model": str(model),
        "served_model_name": "soak",
        "name": "soak",
        "run_dir": str(scratch / "run"),
        "device": "cpu",
        "pools": {"short": {"count": 2}, "long": {"count": 1}, "decode": {"count": 2}},
        "router": {
            "port": 0,
            "length_boundary_tokens": BOUNDARY_TOKENS,
            "args": ["--access-log", str(scratch / "access.log")],
        },
        "start": {"timeout_s": START_LIMIT_S},
    }
    file.write_text(json.dumps(settings))  # which is YAML, too
    output = scratch / "up.log"
    with output.open("wb") as log:
        command = [sys.executable, "-m", "sglang_ext.cli", "up", "--config", str(file)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    cluster = ServedCluster(scratch / "run" / "soak")
    try:
        deadline_s = time.monotonic() + START_LIMIT_S
        while not cluster.is_ready():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SoakError(f"the cluster did not start: {output.read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)
        yield cluster
        if process.poll() is not None:
            raise SoakError(f"the cluster ended: {output.read_text(errors='replace')[-2000:]}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _soak(cluster: ServedCluster, faults: Faults, duration_s: float, users: int, limit_s: float) -> Run:
    samples: list[Sample] = []
    url = cluster.state()["url"]
    began_s = time.monotonic()
    async with Traffic(url, users, BOUNDARY_TOKENS, limit_s, faults.was_active) as traffic:
        watching = asyncio.create_task(_watch(cluster, traffic, faults, samples))
        traffic.resume()
        await asyncio.sleep(min(max(WARM_UP_S[0], WARM_UP_SHARE * duration_s), WARM_UP_S[1]))
        await traffic.pause()
        before = await _idle(cluster)
        progress(f"warmed up: {before.sample.rss_mib:.1f} MiB, {before.sample.descriptors} descriptors")
        faults_from_s = time.monotonic()
        traffic.resume()
        await faults.run(faults_from_s + duration_s)
        await asyncio.sleep(max(0.0, faults_from_s + duration_s - time.monotonic()))
        await traffic.pause()
        after = await _idle(cluster)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        migrated = await asyncio.to_thread(cluster.migrated)
        return Run(began_s, faults_from_s, before, after, samples, traffic.ended, faults.done, migrated)


async def _idle(cluster: ServedCluster) -> Held:
    """Return what is held once the connections of the last requests are closed; what is let go within a minute is
    not."""
    await asyncio.sleep(SETTLE_S)
    deadline_s = time.monotonic() + IDLE_LIMIT_S
    names = ("requests_in_flight", "requests_queued", "worker_in_flight", "worker_pending_tokens", "buffered_bytes")
    while True:
        slots = await asyncio.to_thread(cluster.held)
        gauges = await asyncio.to_thread(cluster.gauges)
        router = {name: gauges[name] for name in names if gauges[name]}
        if not (slots or router) or time.monotonic() > deadline_s:
            return Held(await asyncio.to_thread(cluster.sample), slots, router)
        await asyncio.sleep(1.0)


async def _watch(cluster: ServedCluster, traffic: Traffic, faults: Faults, samples: list[Sample]) -> None:
    shown_s = time.monotonic()
    began_s = shown_s
    while True:
        await asyncio.sleep(1.0)
        try:
            samples.append(await asyncio.to_thread(cluster.sample))
        except (OSError, ValueError):
            continue
        if time.monotonic() - shown_s >= PROGRESS_EVERY_S:
            shown_s = time.monotonic()
            counts = {name: count for name, count in count_outcomes(traffic.ended).items() if count}
            progress(
                f"{shown_s - began_s:6.0f} s: {counts}, {len(faults.done)} faults, {samples[-1].rss_mib:.1f} MiB, "
                f"{samples[-1].descriptors} descriptors, {samples[-1].in_flight:.0f} in flight"
            )


def _result(run: Run) -> dict[str, object]:
    counts = count_outcomes(run.ended)
    times_s = sorted(one.ended_s - one.started_s for one in run.ended if one.outcome == "ok")
    recovered_s = [fault.recovered_s - fault.at_s for fault in run.faults if fault.recovered_s is not None]
    details = Counter(one.detail for one in run.ended if one.outcome not in ("ok", "left"))
    return {
        "failed": counts["failed"],
        "hung": counts["hung"],
        "streams_cut": sum(one.outcome == "cut_by_faults" and one.may_migrate for one in run.ended),
        "streams_migrated": run.migrated,
        "tokens_wrong": sum(one.detail.endswith(WRONG_TEXT) for one in run.ended),
        "rss_growth_mib": round(run.after.sample.rss_mib - run.before.sample.rss_mib, 1),
        "descriptor_growth": run.after.sample.descriptors - run.before.sample.descriptors,
        "leaked_slots": sum(count for name, count in run.after.slots.items() if name.endswith("num_used_tokens")),
        "leaked_requests": sum(count for name, count in run.after.slots.items() if name.endswith("_reqs")),
        "leaked_in_flight": sum(run.after.router.values()),
        "not_recovered": len(run.faults) - len(recovered_s),
        "requests": len(run.ended),
        "outcomes": counts,
        "faults": dict(Counter(f"{fault.kind} {fault.program.partition('-')[0]}" for fault in run.faults)),
        "recovery_s": {"median": _quantile(recovered_s, 0.5), "longest": _quantile(recovered_s, 1.0)},
        "request_s": {
            "p50": _quantile(times_s, 0.5),
            "p99": _quantile(times_s, 0.99),
            "longest": _quantile(times_s, 1.0),
        },
        "held_after": run.after.slots | run.after.router,
        "details": dict(details.most_common(10)),
        "fault_list": [
            (
                fault.program,
                fault.kind,
                round(fault.at_s - run.began_s, 1),
                None if fault.recovered_s is None else round(fault.recovered_s - run.began_s, 1),
            )
            for fault in run.faults
        ],
        "odd": [
            (round(one.started_s - run.began_s, 1), round(one.ended_s - run.began_s, 1), one.outcome, one.detail[:160])
            for one in run.ended
            if one.outcome not in ("ok", "left")
        ][:40],
        "traffic_s": round(run.after.sample.at_s - run.faults_from_s, 1),
    }


def _quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else None


def _draw(path: Path, run: Run) -> None:
    """Memory, what is under way, and how requests ended, over time; faults as bands."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(11, 8), sharex=True)
    at_s = [sample.at_s - run.began_s for sample in run.samples]
    axes[0].plot(at_s, [sample.rss_mib for sample in run.samples], label="router's memory, MiB")
    axes[1].plot(at_s, [sample.in_flight for sample in run.samples], label="requests in flight")
    axes[1].plot(at_s, [sample.descriptors for sample in run.samples], label="descriptors")
    bins = int((run.after.sample.at_s - run.began_s) / BIN_S) + 1
    heights = {name: [0] * bins for name in (*_LEGEND, "failed or hung")}
    for one in run.ended:
        name = one.outcome if one.outcome in _LEGEND else "failed or hung"
        heights[name][min(bins - 1, int((one.ended_s - run.began_s) / BIN_S))] += 1
    bottom = [0] * bins
    for name, counts in heights.items():
        centres = [(number + 0.5) * BIN_S for number in range(bins)]
        label = f"{name} ({sum(counts)})"
        axes[2].bar(centres, counts, BIN_S, bottom=bottom, color=_LEGEND.get(name, "tab:red"), label=label)
        bottom = [a + b for a, b in zip(bottom, counts, strict=True)]
    for axis in axes:
        for fault in run.faults:
            end_s = run.after.sample.at_s if fault.recovered_s is None else fault.recovered_s
            colour = "tab:red" if fault.kind == "kill" else "tab:blue"
            axis.axvspan(fault.at_s - run.began_s, end_s - run.began_s, color=colour, alpha=0.12)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", fontsize=8)
    axes[0].set_title("instances killed (red) and frozen (blue) until they were back", loc="left")
    axes[2].set_ylabel(f"requests per {BIN_S:g} s")
    axes[2].set_xlabel("s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, the warm-up apart")
    parser.add_argument("--hours", type=float, default=0.0, help="the same in hours")
    parser.add_argument("--users", type=int, default=8, help="clients that send at a time")
    parser.add_argument("--calm-s", type=float, default=8.0, help="mean time between a recovery and the next fault")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, help="which ones")
    parser.add_argument("--limit-s", type=float, default=60.0, help="when a request counts as hung")
    parser.add_argument("--keep", type=Path, help="folder for model and logs, which stay; default: a temporary one")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Describes what a router costs: ours, `sglang-router` and `smg` on the same static upstreams.

    python bench/router_overhead.py [--repeats 3] [--seconds 5]

All three serve prefill and decode apart: two short and two long prefill instances and two decode instances
for ours, the same four and two for the peers. Upstreams and load generator (Debian: apt-get install nginx wrk)
are not counted. The routers take turns in every repeat; each number is a median over the repeats.

- processor time per request, all processes of the router, and latency, at concurrency 1, 16 and 64
- processor time per request with prompts of 32 KB, 120 KB, 400 KB and 4 MB, all different, at concurrency 4
- processor time per streamed event, requests' own cost included (64 events of 200 bytes each)

With --ui, only ours: processor time per request while one page of its live stream is open over that without, in turns
on one router, at full load and at about 500 requests/s (`ui_cpu_ratio`, the largest), and what an open page costs a
router without requests.

With --traces, only ours: processor time per request of the product with traces off over that of a copy of its sources
that knows nothing of traces (`traces_off_cpu_ratio`, the larger of both concurrencies); with traces on, to a collector
that keeps nothing, for the record. Product and copy are compiled alike, and measured in turns.

A run fails when an answer is outside 2xx, when a stream is not whole, or when a leg of a request did not
reach its instances. The last line is `RESULT {json}`; its ratios are ours over the better peer.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median

from sglang_ext.ports import pick_free_ports
from support.compiled import use_compiled_modules
from support.result import BenchmarkRun, give_up, progress
from support.routers import COMMANDS, OURS, RouterError, RunningRouter, Upstreams
from support.sse_upstream import EVENTS_PER_STREAM
from support.static_upstreams import StaticUpstreams, UpstreamError, wait_until_healthy
from support.traced_routers import BRANCHES, VARIANTS, build_variants, trace_sink, traced_routers
from support.wrk import WrkError, run_wrk

CONCURRENCIES = (1, 16, 64)
STREAM_CONCURRENCY = 32
BODIES = {"32k": 32_000, "120k": 120_000, "400k": 400_000, "4m": 4_000_000}  # bytes of their prompts
BODY_CONCURRENCY = 4
UI_CONCURRENCIES = (16, 64)
PACED_CONCURRENCY, PACED_PAUSE_MS = 32, 64  # 500 requests/s
UI_TURNS = (False, True, True, False)  # whether a page is open: what drifts meets both alike
TRACES_TURNS = (*VARIANTS, *reversed(VARIANTS))
TRACES_CONCURRENCIES = (16, 64)
TRACES_REPEATS, TRACES_SECONDS = 9, 2.0  # of each turn
WARM_UP_S = 1.0
START_PAGE_S = 20.0
QUIET_CORES = 0.1
WARM_UP_CONCURRENCY = 8

Samples = dict[str, dict[str, list[float]]]  # router, quantity, one number per repeat


class Bench:
    """Upstreams, ports and the samples so far."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.samples: Samples = defaultdict(lambda: defaultdict(list))
        # Every other port is left to bootstrap servers, which no request reaches here.
        ports = iter(pick_free_ports("127.0.0.1", 15, draw=random.SystemRandom()))
        self.whole = Upstreams([next(ports), next(ports)], [next(ports), next(ports)], [next(ports), next(ports)])
        self.streaming = self.whole._replace(decode=[next(ports), next(ports)])
        self.router_port = next(ports)
        self.metrics_port = next(ports)
        self.traced_ports = [next(ports) for _ in VARIANTS]

    @contextmanager
    def upstreams(self) -> Iterator[StaticUpstreams]:
        with ExitStack() as stack:
            static = stack.enter_context(StaticUpstreams(self.folder, self.whole.prefill, self.whole.decode))
            for port in self.streaming.decode:
                log = self.folder / f"sse-{port}.log"
                command = [sys.executable, "-m", "support.sse_upstream", str(port)]
                process = subprocess.Popen(command, cwd=Path(__file__).parent, stderr=log.open("wb"))
                stack.callback(process.wait)
                stack.callback(process.kill)
                wait_until_healthy(port, process, "the streaming upstream", log)
            yield static

    def router(self, name: str, upstreams: Upstreams) -> RunningRouter:
        log = self.folder / f"{name}.log"
        return RunningRouter(name, self.router_port, self.metrics_port, upstreams, log)

    def measure_requests(self, name: str, static: StaticUpstreams) -> None:
        """Add samples of whole answers; both legs of every request must reach their instances."""
        with self.router(name, self.whole) as router:
            content = json.loads(router.ask(stream=False))["choices"][0]["message"]["content"]
            if content != "hello there":
                raise RouterError(f"{name} does not pass the decode instance's answer on: {content!r}")
            run_wrk(router.port, concurrency=WARM_UP_CONCURRENCY, duration_s=WARM_UP_S, stream=False)
            before = static.served()
            sent = 0
            for concurrency in CONCURRENCIES:
                used_s = router.processor_time_s
                load = run_wrk(router.port, concurrency=concurrency, duration_s=self.seconds, stream=False)
                used_s = router.processor_time_s - used_s
                sent += load.requests
                cpu_us = used_s / load.requests * 1e6
                self._note(name, f"cpu_us_c{concurrency}", cpu_us)
                self._note(name, f"p50_ms_c{concurrency}", load.p50_ms)
                self._note(name, f"p99_ms_c{concurrency}", load.p99_ms)
                progress(
                    f"  {name:14s} concurrency {concurrency:2d}: {cpu_us:6.1f} us of CPU per request, "
                    f"p50 {load.p50_ms:.3f} ms, p99 {load.p99_ms:.3f} ms, {load.requests_per_s:.0f} requests/s"
                )
            for size, prompt_bytes in BODIES.items():
                used_s = router.processor_time_s
                load = run_wrk(
                    router.port,
                    concurrency=BODY_CONCURRENCY,
                    duration_s=self.seconds,
                    stream=False,
                    prompt_bytes=prompt_bytes,
                )
                used_s = router.processor_time_s - used_s
                sent += load.requests
                body_us = used_s / load.requests * 1e6
                self._note(name, f"cpu_us_body_{size}", body_us)
                self._note(name, f"p50_ms_body_{size}", load.p50_ms)
                progress(
                    f"  {name:14s} prompts of {size:4s}: {body_us:6.0f} us of CPU per request, "
                    f"p50 {load.p50_ms:.2f} ms, {load.requests_per_s:.0f} requests/s"
                )
            served = static.served() - before
        # Requests under way when wrk stops are served but not in its count.
        most = sent + sum(CONCURRENCIES) + WARM_UP_CONCURRENCY + BODY_CONCURRENCY * len(BODIES)
        for leg, ports in (("prefill", self.whole.prefill), ("decode", self.whole.decode)):
            reached = sum(served[port] for port in ports)
            if not sent <= reached <= most:
                raise RouterError(f"{name}: {sent} requests were answered, {reached} reached a {leg} instance")
        unused = [port for port in (*self.whole.short, *self.whole.decode) if not served[port]]
        if unused:
            raise RouterError(f"{name} sent nothing to the instances on ports {unused}")

    def measure_stream(self, name: str) -> None:
        """Add a sample of streamed answers; every event is counted where it is written."""
        with self.router(name, self.streaming) as router:
            events = [line for line in router.ask(stream=True).split(b"\n") if line.startswith(b"data: ")]
            if len(events) != EVENTS_PER_STREAM + 1 or events[-1] != b"data: [DONE]":
                raise RouterError(f"{name} passed {len(events)} events of {EVENTS_PER_STREAM + 1} on")
            run_wrk(router.port, concurrency=WARM_UP_CONCURRENCY, duration_s=WARM_UP_S, stream=True)
            used_s, sent = router.processor_time_s, self._events_sent()
            run_wrk(router.port, concurrency=STREAM_CONCURRENCY, duration_s=self.seconds, stream=True)
            used_s, sent = router.processor_time_s - used_s, self._events_sent() - sent
        chunk_us = used_s / sent * 1e6
        self._note(name, "cpu_us_chunk", chunk_us)
        progress(f"  {name:14s} streaming     : {chunk_us:6.1f} us of CPU per event, {sent} events")

    def measure_viewed(self) -> None:
        """Add samples of whole answers with a page open, and without, in turns on one router."""
        with self.router(OURS, self.whole) as router:
            run_wrk(router.port, concurrency=WARM_UP_CONCURRENCY, duration_s=WARM_UP_S, stream=False)
            points = [(f"c{concurrency}", concurrency, 0) for concurrency in UI_CONCURRENCIES]
            for point, concurrency, pause_ms in [*points, ("paced", PACED_CONCURRENCY, PACED_PAUSE_MS)]:
                for is_viewed in UI_TURNS:
                    with self._page(router.port) if is_viewed else nullcontext():
                        used_s = router.fine_processor_time_s
                        load = run_wrk(
                            router.port,
                            concurrency=concurrency,
                            duration_s=self.seconds,
                            stream=False,
                            pause_ms=pause_ms,
                        )
                        used_s = router.fine_processor_time_s - used_s
                    cpu_us = used_s / load.requests * 1e6
                    name = "viewed" if is_viewed else "unviewed"
                    self._note(name, f"cpu_us_{point}", cpu_us)
                    self._note(name, f"p99_ms_{point}", load.p99_ms)
                    self._note(name, f"requests_per_s_{point}", load.requests_per_s)
                    progress(
                        f"  {name:14s} {point:5s}: {cpu_us:6.1f} us of CPU per request, "
                        f"p99 {load.p99_ms:.3f} ms, {load.requests_per_s:.0f} requests/s"
                    )
            for is_viewed in (False, True):
                with self._page(router.port) if is_viewed else nullcontext():
                    used_s = router.fine_processor_time_s
                    time.sleep(self.seconds)
                    used_s = router.fine_processor_time_s - used_s
                self._note("viewed" if is_viewed else "unviewed", "idle_ms_per_s", used_s / self.seconds * 1e3)

    def measure_traced(self, built: dict[str, Path], sink_url: str) -> None:
        """Add samples of the three variants in turns, all on the same upstreams."""
        with traced_routers(built, self.whole, self.traced_ports, sink_url, self.folder) as routers:
            for router in routers.values():
                run_wrk(router.port, concurrency=WARM_UP_CONCURRENCY, duration_s=WARM_UP_S, stream=False)
            for concurrency in TRACES_CONCURRENCIES:
                used_s = dict.fromkeys(VARIANTS, 0.0)
                requests = dict.fromkeys(VARIANTS, 0)
                for name in TRACES_TURNS:
                    before_s = routers[name].fine_processor_time_s
                    load = run_wrk(routers[name].port, concurrency=concurrency, duration_s=self.seconds, stream=False)
                    used_s[name] += routers[name].fine_processor_time_s - before_s
                    requests[name] += load.requests
                for name in VARIANTS:
                    self._note(name, f"cpu_us_c{concurrency}", used_s[name] / requests[name] * 1e6)
                costs = {name: self.samples[name][f"cpu_us_c{concurrency}"][-1] for name in VARIANTS}
                shown = ", ".join(f"{name} {cpu_us:.2f}" for name, cpu_us in costs.items())
                progress(f"  concurrency {concurrency:2d}: us of CPU per request: {shown}")

    @contextmanager
    def _page(self, port: int) -> Iterator[None]:
        """A reader of the live stream, as a page is; RouterError where it got no frames."""
        out = self.folder / "recording.jsonl"
        command = [sys.executable, "-m", "sglang_ext.cli", "live", "record", f"127.0.0.1:{port}", "--out", str(out)]
        with (self.folder / "record.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            end_s = time.monotonic() + START_PAGE_S
            while not out.exists() or out.read_bytes().count(b"\n") < 3:
                if process.poll() is not None or time.monotonic() > end_s:
                    raise RouterError("the live stream brought nothing")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.wait()
            out.unlink(missing_ok=True)

    def _events_sent(self) -> int:
        total = 0
        for port in self.streaming.decode:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/sent", timeout=5) as reply:
                total += int(reply.read())
        return total

    def _note(self, name: str, quantity: str, value: float) -> None:
        self.samples[name][quantity].append(value)


def main() -> None:
    """Run the comparison and print the result line."""
    use_compiled_modules()
    arguments = _arguments()
    names = [name for name in COMMANDS if name in arguments.routers]
    if shutil.which("wrk") is None:
        give_up("wrk is not installed: apt-get install nginx wrk")
    benchmark = BenchmarkRun("sglang-ext", "sglang-router", "smg")
    with tempfile.TemporaryDirectory(prefix="router-overhead-") as scratch:
        folder = Path(scratch)
        bench = Bench(folder, arguments.seconds)
        try:
            built: dict[str, Path] = {}
            if arguments.traces:
                progress("compiling the product, and its sources without a tracer (some minutes)")
                built = build_variants(folder)
            with bench.upstreams() as static, trace_sink() as sink_url:
                for repeat in range(arguments.repeats):
                    if arguments.ui:
                        progress(f"[{benchmark.elapsed_s():5.0f} s] repeat {repeat + 1} of {arguments.repeats}")
                        bench.measure_viewed()
                        continue
                    if arguments.traces:
                        progress(f"[{benchmark.elapsed_s():5.0f} s] repeat {repeat + 1} of {arguments.repeats}")
                        bench.measure_traced(built, sink_url)
                        continue
                    # None is always first, nor always after the same one.
                    order = names[repeat % len(names) :] + names[: repeat % len(names)]
                    for name in order:
                        elapsed_s = benchmark.elapsed_s()
                        progress(f"[{elapsed_s:5.0f} s] repeat {repeat + 1} of {arguments.repeats}: {name}")
                        bench.measure_requests(name, static)
                        bench.measure_stream(name)
        except (RouterError, UpstreamError, WrkError, OSError, subprocess.CalledProcessError) as error:
            for log in sorted(folder.glob("*.log")):
                if log.name != "served.log" and log.stat().st_size:
                    print(f"--- end of {log.name}\n{log.read_text(errors='replace')[-1500:]}", file=sys.stderr)
            give_up(str(error))
    others = benchmark.other_load_cores()
    if others > QUIET_CORES:
        progress(f"note: other programs used {others:g} cores meanwhile; run it again on a quiet machine")
    benchmark.end(summarise(bench.samples, arguments), arguments.out)


def summarise(samples: Samples, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the result line's values: ratios of ours to the better peer, and every median."""
    medians = {
        name: {quantity: round(median(values), 4) for quantity, values in quantities.items()}
        for name, quantities in samples.items()
    }
    result: dict[str, object] = {}
    if arguments.ui:
        viewed, unviewed = medians["viewed"], medians["unviewed"]
        points = [*(f"c{concurrency}" for concurrency in UI_CONCURRENCIES), "paced"]
        ratios = {point: viewed[f"cpu_us_{point}"] / unviewed[f"cpu_us_{point}"] for point in points}
        result |= {f"ui_cpu_ratio_{point}": round(ratio, 4) for point, ratio in ratios.items()}
        result["ui_cpu_ratio"] = round(max(ratios.values()), 4)
        result["ui_idle_ms_per_s"] = round(viewed["idle_ms_per_s"] - unviewed["idle_ms_per_s"], 2)
    if arguments.traces:
        for name in ("off", "on"):
            # Of each repeat: what drifts meets its turns alike, and leaves the ratio what it is.
            ratios = {}
            for quantity in (f"cpu_us_c{concurrency}" for concurrency in TRACES_CONCURRENCIES):
                pairs = zip(samples[name][quantity], samples["without"][quantity], strict=True)
                ratios[quantity.removeprefix("cpu_us_")] = median(own / other for own, other in pairs)
            result |= {f"traces_{name}_cpu_ratio_{point}": round(ratio, 4) for point, ratio in ratios.items()}
            result[f"traces_{name}_cpu_ratio"] = round(max(ratios.values()), 4)
        result["branches_removed"] = BRANCHES
    peers = [medians[name] for name in medians if name != OURS]
    if OURS in medians and peers:
        quantities = {f"cpu_ratio_c{c}": f"cpu_us_c{c}" for c in CONCURRENCIES}
        quantities |= {f"body_ratio_{size}": f"cpu_us_body_{size}" for size in BODIES}
        quantities |= {"p50_ratio_c1": "p50_ms_c1", "chunk_ratio": "cpu_us_chunk"}
        for ratio, quantity in quantities.items():
            result[ratio] = round(medians[OURS][quantity] / min(peer[quantity] for peer in peers), 3)
    return {
        **result,
        "medians": medians,
        "repeats": arguments.repeats,
        "seconds_each": arguments.seconds,
        "stream_concurrency": STREAM_CONCURRENCY,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, help=f"samples of each number (default 3; --traces: {TRACES_REPEATS})")
    parser.add_argument(
        "--seconds", type=float, help=f"length of each measurement (default 5; --traces: {TRACES_SECONDS:g})"
    )
    parser.add_argument(
        "--routers",
        nargs="+",
        choices=list(COMMANDS),
        default=list(COMMANDS),
        help="measure only these; ratios need ours and a peer",
    )
    parser.add_argument("--ui", action="store_true", help="measure what an open live page costs ours, and nothing else")
    parser.add_argument("--traces", action="store_true", help="measure what traces cost ours, and nothing else")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there, too")
    arguments = parser.parse_args()
    if arguments.ui and arguments.traces:
        parser.error("--ui and --traces are measured apart")
    repeats, seconds = (TRACES_REPEATS, TRACES_SECONDS) if arguments.traces else (3, 5.0)
    arguments.repeats = repeats if arguments.repeats is None else arguments.repeats
    arguments.seconds = seconds if arguments.seconds is None else arguments.seconds
    if arguments.repeats < 1 or not arguments.seconds > 0:
        parser.error("--repeats must be at least 1 and --seconds greater than 0")
    return arguments


if __name__ == "__main__":
    main()

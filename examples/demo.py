"""The demonstration: the same short chats and questions about documents, through the pools and through stock SGLang.

    python examples/demo.py [--device cpu|cuda] [--keep] [--decode-tp 3]

Starts two prefill instances of SGLang and one for decode, the coordinator that lets the two share long prompts, the
router, and one stock instance that has all cores to itself when it is asked (on GPUs: as many instances as there are
GPUs for, no coordinator and no stock instance). Asks through the unmodified `openai` client, and shows where every
request went, on how many instances its chunks were computed, and its time to the first token on either way.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from demo_client import Question, Reply, ask_all
from demo_report import draw_timeline, print_table
from demo_view import make_view

from sglang_ext import cli
from sglang_ext.cluster.cluster import Cluster
from sglang_ext.cluster.config import (
    ClusterConfig,
    ConfigError,
    CoordinatorConfig,
    PoolConfig,
    PoolsConfig,
    RouterSettings,
    StartSettings,
)
from sglang_ext.cluster.display import make_display
from sglang_ext.cluster.plan import Host, find_machine, resolve_device
from sglang_ext.cluster.state import ClusterInUseError
from sglang_ext.cluster.supervisor import StartError
from sglang_ext.cpu.models.smollm2 import ModelError, ensure_smollm2
from sglang_ext.live.timeline import (
    StatusUnavailableError,
    TimelineError,
    TimelinePictureError,
    begun_records,
    chunks_of,
    plan_text,
    read_status,
    timeline_of,
)
from sglang_ext.live.timeline import draw_timeline as draw_pool_timeline
from sglang_ext.types import Role

EXAMPLES = Path(__file__).resolve().parent
START_TIMEOUT_S = 600.0
POOL_TIMEOUT_S = 20.0
LENGTH_BOUNDARY_TOKENS = 512
SHARED_FROM_TOKENS = 1400  # longer prompts are offered to both prefill instances
PREFILL_CHUNK_TOKENS = 256  # of what an instance computes by itself: after each chunk it reports its load
MIN_CHUNK_TOKENS = 256
MAX_CHUNK_MS = 1200  # then all is decided again: the other instance joins as soon as it is free
PREFILL_INSTANCES = 2
SIMULATED_PROMPTS = 600
SIMULATED_LONG_SHARE = 0.1
WITHOUT_WARM_UP = ("--skip-server-warmup",)  # which begins with a second of sleep, and on a CPU gains nothing
# All that is asked here fits. Four instances touch every page of their KV memory at their start.
SMALL_KV = ("--max-total-tokens", "4096")

# Short questions come while documents are computed: when each is sent, in seconds since the first.
SHORT_QUESTIONS = {
    "capital": (0.5, "What is the capital of France?"),
    "sum": (1.5, "What is 2 plus 2?"),
    "sea": (3.0, "Write one sentence about the sea."),
    "colours": (4.5, "Name three primary colours."),
    "sky": (6.0, "Why is the sky blue?"),
}
DOCUMENTS_AT_S = 1.0  # one instance computes the chapters then, and the other one begins by itself
DOCUMENTS = ("handbook.md", "logbook.md")
DOCUMENTS_QUESTION = "When does the supply boat come and what does it bring?"
CHAPTERS_QUESTION = "How many steps does the tower have?"


def questions() -> list[Question]:
    """Return what is asked: about some chapters, about others and a log (1,700 tokens), and short chats."""
    handbook, logbook = ((EXAMPLES / name).read_text(encoding="utf-8") for name in DOCUMENTS)
    chapters = handbook.partition("## 4.")[0]
    other_chapters = handbook[handbook.index("## 4.") : handbook.index("## 8.")]
    asked = [
        Question("chapters", f"Read this document.\n\n{chapters}\n\nQuestion: {CHAPTERS_QUESTION}", 32),
        Question(
            "documents",
            f"Read these documents.\n\n{logbook}\n\n{other_chapters}\n\nQuestion: {DOCUMENTS_QUESTION}",
            32,
            DOCUMENTS_AT_S,
        ),
    ]
    return asked + [Question(label, text, 16, at_s) for label, (at_s, text) in SHORT_QUESTIONS.items()]


def cluster_config(arguments: argparse.Namespace, machine: Host) -> ClusterConfig:
    """The demonstration's cluster on `machine`.

    On a CPU two prefill instances that share long prompts, and a stock instance to compare with. With a GPU for each of
    them a short, a long and a decode instance; with fewer GPUs one prefill instance for all prompts and a decode
    instance, which share the GPU if there is only one. Raises ConfigError.
    """
    gpu_count = 0 if arguments.device == "cpu" else machine.gpu_count
    decode = PoolConfig(count=1, tp=arguments.decode_tp)
    if gpu_count == 0:
        engine = (*WITHOUT_WARM_UP, *(() if arguments.keep else SMALL_KV))
        shared = PoolConfig(
            count=PREFILL_INSTANCES,
            worker_args=("--cdsp-min-tokens", str(SHARED_FROM_TOKENS)),
            args=("--chunked-prefill-size", str(PREFILL_CHUNK_TOKENS), *engine),
        )
        decode = replace(decode, args=engine)
        stock = PoolConfig(count=1, threads=len(machine.core_ids), args=engine)
        pools = PoolsConfig(both=shared, decode=decode, plain=stock)
    elif gpu_count < 2 + arguments.decode_tp:
        pools = PoolsConfig(both=PoolConfig(count=1), decode=decode)
    else:
        pools = PoolsConfig(short=PoolConfig(count=1), long=PoolConfig(count=1), decode=decode)
    return ClusterConfig(
        name="demo",
        run_dir=str(EXAMPLES.parent / "run"),
        model="smollm2",
        device=arguments.device,
        pools=pools,
        coordinator=CoordinatorConfig(
            enabled=gpu_count == 0,
            args=(
                *("--profile", str(EXAMPLES / "demo_costs.json")),
                *("--min-chunk-tokens", str(MIN_CHUNK_TOKENS)),
                *("--set", f"pool.max_chunk_ms={MAX_CHUNK_MS}"),
            ),
        ),
        start=StartSettings(timeout_s=START_TIMEOUT_S),
        router=RouterSettings(
            port=arguments.port,
            length_boundary_tokens=LENGTH_BOUNDARY_TOKENS,
            # The head of a stream that is kept alive comes before it is known which instances serve it.
            args=("--set", "limits.sse_keep_alive_secs=0"),
        ),
    )


def describe(config: ClusterConfig, machine: Host) -> str:
    """Return what the cluster consists of, and the engine that computes."""
    kinds = [
        f"{pool.count} {'stock' if role is Role.PLAIN else role}{' prefill' if role.is_prefill else ''}"
        for role, pool in config.pools.by_role()
        if pool.count
    ]
    kinds += ["1 coordinator"] * config.coordinator.enabled + ["1 router"]
    gpus = f"CUDA, {machine.gpu_count} GPU{'s' * (machine.gpu_count > 1)}"
    engine = "the CPU" if resolve_device(config, machine) == "cpu" else gpus
    return f"{', '.join(kinds)}; SGLang on {engine}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; 0 when every request was answered."""
    arguments = _arguments(argv)
    began_s = time.monotonic()
    try:
        _step("model")
        ensure_smollm2()
        machine = find_machine()
        config = cluster_config(arguments, machine)
        _step(f"cluster: {describe(config, machine)}")
        threading.Thread(target=_import_early, daemon=True).start()
        # Its arguments are always the same: SGLang need not be asked first whether it takes them.
        with Cluster(config, make_display(sys.stdout), checks_engines=False) as cluster:
            print(f"live page: {cluster.page_url}", flush=True)
            all_answered = _demonstrate(cluster, began_s)
            if arguments.keep and all_answered:
                _keep(cluster)
            elif arguments.device == "cpu" and arguments.decode_tp == 1:
                # All is answered, and a kill leaves neither memory of a GPU nor queues of ranks behind.
                cluster.stop_at_once_when(lambda: True)
    except KeyboardInterrupt:
        return 130
    except StartError as error:
        print("\n".join(f"  | {line}" for line in error.log_lines), file=sys.stderr)
        return _fail(f"{error}; the whole log is {error.log}")
    except (ConfigError, ModelError, ClusterInUseError, OSError) as error:
        return _fail(str(error))
    return 0 if all_answered else 1


def _demonstrate(cluster: Cluster, began_s: float) -> bool:
    asked = questions()
    _await_pool(cluster)
    stock = next((program for program in cluster.plan.instances if program.role is Role.PLAIN), None)
    if stock is not None:
        _set_apart(cluster, stock.url)
    _step(f"{len(asked)} requests through the openai client at {cluster.url}/v1")
    view = make_view(sys.stdout, [question.label for question in asked])
    stock_replies = None
    with view, cluster.kept_running():
        replies = asyncio.run(ask_all(f"{cluster.url}/v1", cluster.plan.model_name, asked, view))
    if stock is not None:
        _step(f"the same requests at the same times through one stock instance at {stock.url}/v1")
        view = make_view(sys.stdout, [question.label for question in asked])
        with view, cluster.kept_running():
            stock_replies = asyncio.run(ask_all(f"{stock.url}/v1", cluster.plan.model_name, asked, view))
    _step("where each request went")
    status = _pool_status(cluster)
    print_table(replies, stock_replies, cluster.name_of, lambda reply: _plan(reply, status), sys.stdout)
    if cluster.plan.coordinator is not None:
        _explain()
    failed = [reply for reply in (*replies, *(stock_replies or ())) if reply.error]
    for reply in failed:
        print(f"{reply.question.label} failed: {reply.error}", file=sys.stderr)
    if not failed:
        picture = cluster.folder / "timeline.png"
        draw_timeline(replies, stock_replies, cluster.name_of, picture)
        print(f"\ntimeline of the requests: {picture}")
        if status is not None:
            _draw_pool(cluster, status)
            _simulate_eight(cluster.folder)
    print(f"{time.monotonic() - began_s:.0f} s in all", flush=True)
    return not failed


def _import_early() -> None:
    """Import what the client and the pictures need while the cluster starts, of which the first part takes one core."""
    for module in ("openai", "matplotlib.pyplot"):
        with suppress(ImportError):  # where it is needed, it is imported again, and missed
            import_module(module)


def _await_pool(cluster: Cluster) -> None:
    """Wait until the prefill instances are members of their pool; before that each computes its prompts itself."""
    if cluster.plan.coordinator is None:
        return
    deadline_s = time.monotonic() + POOL_TIMEOUT_S
    while time.monotonic() < deadline_s:
        status = _pool_status(cluster)
        if status is not None and len(status["members"]) == PREFILL_INSTANCES:
            return
        time.sleep(0.1)
    print(
        f"the instances have not joined their pool within {POOL_TIMEOUT_S:g} s; each computes its prompts itself",
        flush=True,
    )


def _set_apart(cluster: Cluster, url: str) -> None:
    """Let the router send nothing to the stock instance, which is asked directly."""
    request = urllib.request.Request(
        f"{cluster.url}/workers/{url.removeprefix('http://')}/drain",
        b'{"drain": true}',
        {"authorization": f"Bearer {cluster.plan.admin_key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=POOL_TIMEOUT_S):
        pass


def _pool_status(cluster: Cluster) -> Any:
    """The coordinator's status, or None where it does not answer."""
    if cluster.plan.coordinator is None:
        return None
    try:
        return read_status(cluster.plan.coordinator.url)
    except StatusUnavailableError:
        return None


def _plan(reply: Reply, status: Any) -> str:
    """Return the chunks of a long prompt, each with its number of instances, as in the picture of the long pool."""
    if reply.length_class != "long":
        return ""
    for record in () if status is None else reversed(begun_records(status)):
        if record["room"] is not None and f"{record['room']:016x}" == reply.request_id and chunks_of(record):
            return plan_text(chunks_of(record))
    return plan_text([(reply.prompt_tokens, 1)])


def _explain() -> None:
    cores = len(find_machine().core_ids)
    print(
        f"\nchunks: tokens @ instances. Prompts from {SHARED_FROM_TOKENS:,} tokens on are shared by the instances "
        "where the costs in\nexamples/demo_costs.json say that it is faster: those of a machine with a core for each "
        f"instance. This one has {cores},\nwhich the stock instance has to itself and the pools share out."
    )


def _draw_pool(cluster: Cluster, status: Any) -> None:
    picture = cluster.folder / "long-pool.png"
    try:
        draw_pool_timeline(timeline_of(status), picture, lambda name: cluster.name_of(f"http://{name}"))
    except (TimelineError, TimelinePictureError) as error:
        print(f"no picture of the long pool: {error}", file=sys.stderr)
        return
    print(f"timeline of the long pool: {picture}")


def _simulate_eight(folder: Path) -> None:
    """Show what this machine cannot: the policies that serve, on eight simulated GPUs, as a page that plays the run."""
    _step("eight H200s, which this machine has not: simulated, with the policies that serve and with SGLang's order")
    lengths, recording, page = (folder / f"eight.{kind}" for kind in ("csv", "jsonl", "html"))
    draw = random.Random(1)
    prompts = [
        int(draw.uniform(8_000, 60_000) if draw.random() < SIMULATED_LONG_SHARE else 1 + draw.lognormvariate(5.5, 1.0))
        for _ in range(SIMULATED_PROMPTS)
    ]
    rows = ["num_prefill_tokens,num_decode_tokens", *(f"{tokens},100" for tokens in prompts)]
    lengths.write_text("\n".join(rows) + "\n", encoding="utf-8")
    wanted = [f"workload.file={lengths}", "workload.rate=25", f"workload.requests={SIMULATED_PROMPTS}"]
    wanted += ["instances.engine=h200-llama3-8b", "instances.prefill=8"]
    command = ["simulate", *(word for setting in wanted for word in ("--set", setting))]
    cli.main([*command, "--set", "policy.name=fcfs"])
    cli.main([*command, "--record", str(recording)])
    cli.main(["live", "timeline", "--recording", str(recording), "--out", str(page)])
    print(f"a page that plays the second run: {page}")


def _keep(cluster: Cluster) -> None:
    """Go on serving until Ctrl-C or SIGTERM."""
    stop = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    messages = '[{"role": "user", "content": "Hello!"}]'
    body = f'{{"model": "{cluster.plan.model_name}", "max_tokens": 40, "messages": {messages}}}'
    command = ["curl", f"{cluster.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
    _step("still serving; Ctrl-C stops. Try:")
    print(shlex.join(command), flush=True)
    print(f"live page: {cluster.page_url}", flush=True)
    cluster.serve(stop.is_set)


def _step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def _fail(message: str) -> int:
    print(f"demo: error: {message}", file=sys.stderr)
    return 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="what the instances run on")
    parser.add_argument("--keep", action="store_true", help="go on serving afterwards")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="router's port; 0 picks a free one")
    parser.add_argument(
        "--decode-tp", type=int, default=1, metavar="N", help="tensor-parallel ranks of the decode instance (1 or 3)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

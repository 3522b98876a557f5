"""The demonstration: short chats and a question about a document, served at the same time by separate pools.

    python examples/demo.py [--keep] [--decode-tp 3]

Starts one short prefill, one long prefill and one decode instance of SGLang and the router, asks through the
unmodified `openai` client, and shows where every request went and how long each step took.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from demo_client import Question, ask_all
from demo_report import draw_timeline, print_table
from demo_view import make_view

from sglang_ext.cluster.checks import ConfigError
from sglang_ext.cluster.cluster import Cluster
from sglang_ext.cluster.config import ClusterConfig, PoolConfig, PoolsConfig, RouterSettings
from sglang_ext.cluster.display import make_display
from sglang_ext.cluster.plan import find_machine
from sglang_ext.cluster.state import ClusterInUseError
from sglang_ext.cluster.supervisor import StartError
from sglang_ext.models.smollm2 import ModelError, ensure_smollm2

EXAMPLES = Path(__file__).resolve().parent
LENGTH_BOUNDARY_TOKENS = 512

SHORT_QUESTIONS = {
    "capital": "What is the capital of France?",
    "sum": "What is 2 plus 2?",
    "sea": "Write one sentence about the sea.",
    "colours": "Name three primary colours.",
    "sky": "Why is the sky blue?",
}
DOCUMENT_QUESTION = "When does the supply boat come and what does it bring?"


def questions() -> list[Question]:
    """Return what is asked: a question about a document of about 1,500 tokens, and short chats beside it."""
    document = (EXAMPLES / "handbook.md").read_text(encoding="utf-8")
    asked = [Question("document", f"Read this document.\n\n{document}\n\nQuestion: {DOCUMENT_QUESTION}", 60)]
    return asked + [Question(label, text, 48) for label, text in SHORT_QUESTIONS.items()]


def cluster_config(arguments: argparse.Namespace) -> ClusterConfig:
    """Return the demonstration's cluster. Raises ConfigError."""
    shares_gpus = 0 < find_machine().gpu_count < 2 + arguments.decode_tp
    return ClusterConfig(
        name="demo",
        run_dir=str(EXAMPLES.parent / "run"),
        model="smollm2",
        pools=PoolsConfig(
            short=PoolConfig(count=1), long=PoolConfig(count=1), decode=PoolConfig(count=1, tp=arguments.decode_tp)
        ),
        args=("--mem-fraction-static", "0.2") if shares_gpus else (),
        router=RouterSettings(port=arguments.port, length_boundary_tokens=LENGTH_BOUNDARY_TOKENS),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; 0 when every request was answered."""
    arguments = _arguments(argv)
    began_s = time.monotonic()
    try:
        _step("model")
        ensure_smollm2()
        _step("cluster: 1 short prefill, 1 long prefill, 1 decode, 1 router")
        with Cluster(cluster_config(arguments), make_display(sys.stdout)) as cluster:
            all_answered = _demonstrate(cluster, began_s)
            if arguments.keep and all_answered:
                _keep(cluster)
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
    _step(f"{len(asked)} requests at the same time through the openai client at {cluster.url}/v1")
    view = make_view(sys.stdout, [question.label for question in asked])
    with view, cluster.kept_running():
        replies = asyncio.run(ask_all(f"{cluster.url}/v1", cluster.plan.model_name, asked, view))
    _step("where each request went")
    print_table(replies, cluster.name_of, sys.stdout)
    failed = [reply for reply in replies if reply.error]
    for reply in failed:
        print(f"{reply.question.label} failed: {reply.error}", file=sys.stderr)
    if not failed:
        picture = cluster.folder / "timeline.png"
        draw_timeline(replies, cluster.name_of, picture)
        print(f"\ntimeline: {picture}")
    print(f"{time.monotonic() - began_s:.0f} s in all", flush=True)
    return not failed


def _keep(cluster: Cluster) -> None:
    """Go on serving until Ctrl-C or SIGTERM."""
    stop = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    body = f'{{"model": "{cluster.plan.model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    command = ["curl", f"{cluster.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
    _step("still serving; Ctrl-C stops. Try:")
    print(shlex.join(command), flush=True)
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
    parser.add_argument("--keep", action="store_true", help="go on serving afterwards")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="router's port; 0 picks a free one")
    parser.add_argument(
        "--decode-tp", type=int, default=1, metavar="N", help="tensor-parallel ranks of the decode instance (1 or 3)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""`sglang-ext batch run`: a file of requests through an endpoint, nothing lost, nothing written twice."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sglang_ext.batch.lines import MAX_TOP_LOGPROBS, Mode

API_KEY_VARIABLE = "SGLANG_EXT_API_KEY"
OK, USAGE, SOME_FAILED, STORE_FULL, INTERRUPTED = 0, 2, 3, 4, 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext batch run` to `parser`."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE|GLOB|DIR",
        help="JSONL (.gz, .zst) or Parquet: OpenAI batch lines, plain prompts or messages, or sequences to score",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE|DIR", help="JSONL (.gz, .zst) or Parquet")
    parser.add_argument("--endpoint", required=True, metavar="URL", help="the router, or any OpenAI-compatible server")
    parser.add_argument("--api-key", metavar="KEY", help=f"of the endpoint (or from {API_KEY_VARIABLE})")
    parser.add_argument("--mode", choices=[one.value for one in Mode], default=Mode.GENERATE.value, help="what to ask")
    parser.add_argument("--model", metavar="NAME", help="for lines that name none")
    parser.add_argument("--engine", choices=["local", "ray"], default="local", help="who reads, sends and writes")
    parser.add_argument("--top-logprobs", type=int, default=0, metavar="K", help=f"score: 0 to {MAX_TOP_LOGPROBS}")


def run(args: argparse.Namespace) -> int:
    """Run the batch and return the exit status."""
    if args.engine == "ray":
        # The module `ray_engine` has `run_on_ray(args) -> int`, with the same arguments and exit statuses.
        raise NotImplementedError
    raise NotImplementedError


def api_key(args: argparse.Namespace) -> str | None:
    """The key given, or that of the environment."""
    return args.api_key or os.environ.get(API_KEY_VARIABLE) or None

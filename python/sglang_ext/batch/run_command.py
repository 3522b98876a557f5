"""`sglang-ext batch run`: a file of requests through an endpoint, nothing lost, nothing written twice."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType

from sglang_ext.batch.batch_run import INTERRUPTED, STORE_FULL, USAGE, BatchRun
from sglang_ext.batch.database import StoreError, StoreFullError
from sglang_ext.batch.inputs import InputError
from sglang_ext.batch.lines import MAX_TOP_LOGPROBS, Mode
from sglang_ext.batch.object_storage import ObjectPath, StorageError, place_of
from sglang_ext.batch.outputs import OutputError, OutputFormat
from sglang_ext.batch.sending_options import API_KEY_VARIABLE, RunError, add_sending_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext batch run` to `parser`."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE|GLOB|DIR|URL",
        help="JSONL (.gz, .zst) or Parquet, also s3://...: OpenAI batch lines, plain prompts or messages, or sequences"
        " to score",
    )
    parser.add_argument(
        "--output",
        type=_place,
        required=True,
        metavar="FILE|DIR|URL",
        help=".jsonl (.gz, .zst), .parquet, or a folder; also s3://...",
    )
    parser.add_argument(
        "--endpoint", required=True, metavar="URL", help="URL of the router, or of any OpenAI-compatible server"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"API key of the endpoint (default: {API_KEY_VARIABLE})")
    parser.add_argument(
        "--mode",
        choices=[mode.value for mode in Mode],
        default=Mode.GENERATE.value,
        help="ask for new tokens, or for scores",
    )
    parser.add_argument(
        "--top-logprobs",
        type=int,
        default=0,
        metavar="K",
        help=f"candidates per scored position, 0 to {MAX_TOP_LOGPROBS}",
    )
    parser.add_argument("--model", metavar="NAME", help="model of lines that name none")
    parser.add_argument("--defaults", metavar="JSON", help='fields of lines that lack them, as {"max_tokens": 64}')
    parser.add_argument(
        "--format",
        choices=[output_format.value for output_format in OutputFormat],
        help="format of the output (default: by its name)",
    )
    parser.add_argument(
        "--vocabulary", type=int, default=0, metavar="N", help="size of the model's vocabulary, for distillkit"
    )
    parser.add_argument(
        "--engine", choices=["local", "ray"], default="local", help="send from this process, or by Ray Data"
    )
    parser.add_argument("--retry-failed", action="store_true", help="send lines again that failed in an earlier run")
    add_sending_arguments(parser)
    parser.add_argument(
        "--store", type=Path, metavar="FILE", help="local file with the run's lines and results (default: OUTPUT.store)"
    )


def _place(text: str) -> Path | ObjectPath:
    try:
        return place_of(text)
    except StorageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Run the batch and return the exit status: 0 all done, 2 usage, 3 some lines failed, 4 store full, 130 stopped."""
    if args.engine == "ray":
        return int(import_module("sglang_ext.batch.ray_engine").run_on_ray(args))
    with _stopped_by_signals():
        try:
            return BatchRun(args).run()
        except (RunError, InputError, OutputError) as error:
            _complain(f"error: {error}")
            return USAGE
        except StoreFullError as error:
            _complain(f"error: {error}; make room, and the same command goes on")
            return STORE_FULL
        except StoreError as error:
            _complain(f"error: {error}")
            return USAGE
        except StorageError as error:
            _complain(f"error: {error}" if error.is_refusal else f"error: {error}; the same command goes on from here")
            return USAGE if error.is_refusal else STORE_FULL
        except OSError as error:
            _complain(f"error: {error.filename or '--output'}: {error.strerror}; the same command goes on from here")
            return STORE_FULL
        except KeyboardInterrupt:
            _complain("stopped; the same command goes on from here")
            return INTERRUPTED


def _complain(text: str) -> None:
    print(f"sglang-ext batch run: {text}", file=sys.stderr)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM ends what is not asynchronous as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

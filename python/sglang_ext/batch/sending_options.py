"""Describes how lines are sent: the options that `sglang-ext batch run` and `sglang-ext batch serve` share."""

from __future__ import annotations

import argparse
import os

from sglang_ext.batch.decide.in_flight_cap import CapSettings
from sglang_ext.batch.decide.rate_limit import RateLimit
from sglang_ext.batch.lines import Mode
from sglang_ext.batch.runner import RunnerSettings

API_KEY_VARIABLE = "SGLANG_EXT_API_KEY"
SCORE_REPLY_BYTES = 24  # of a reply, for every log-probability


class RunError(ValueError):
    """The run cannot be made as asked; the text names the option or the file."""


def add_sending_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that both commands have."""
    parser.add_argument(
        "--max-in-flight", type=int, default=256, metavar="N", help="largest number of requests in flight"
    )
    parser.add_argument(
        "--limit-requests-per-s", type=float, metavar="N", help="largest number of requests sent per second"
    )
    parser.add_argument(
        "--limit-tokens-per-s", type=float, metavar="N", help="largest number of prompt and new tokens sent per second"
    )
    parser.add_argument(
        "--store-limit-mib", type=float, metavar="N", help="largest size of the store on the disk, in MiB"
    )


def api_key(args: argparse.Namespace) -> str | None:
    """Return the API key of the command line, or else of the environment."""
    return args.api_key or os.environ.get(API_KEY_VARIABLE) or None


def runner_settings(args: argparse.Namespace) -> RunnerSettings:
    """Return the settings that the options ask for. Raises RunError, which names a bad option."""
    if args.max_in_flight < 1:
        raise RunError(f"--max-in-flight must be at least 1, got {args.max_in_flight}")
    if args.store_limit_mib is not None and not args.store_limit_mib > 0:
        raise RunError(f"--store-limit-mib must be above 0, got {args.store_limit_mib:g}")
    is_scoring = getattr(args, "mode", None) == Mode.SCORE.value
    reply_bytes = SCORE_REPLY_BYTES * (1 + args.top_logprobs) if is_scoring else 0
    return RunnerSettings(CapSettings(max_in_flight=args.max_in_flight), reply_bytes_per_token=reply_bytes)


def rate_limit(option: str, per_s: float | None) -> RateLimit:
    """Return the rate limit of an option. Raises RunError, which names a bad option."""
    try:
        return RateLimit(per_s)
    except ValueError as error:
        raise RunError(f"{option} {error}") from None

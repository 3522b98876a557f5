"""`sglang-ext model`: print the folder of a model that comes as a Python package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_ext.models.smollm2 import ModelError, ensure_smollm2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext model` to `parser`."""
    parser.add_argument("name", choices=["smollm2"], help="smollm2: SmolLM2-135M-Instruct, 540 MB")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the model into this folder instead of the cache")


def run(args: argparse.Namespace) -> int:
    """Print the model's folder on standard output; progress goes to standard error."""
    try:
        print(ensure_smollm2(args.out))
    except ModelError as error:
        print(f"sglang-ext model: error: {error}", file=sys.stderr)
        return 1
    return 0

"""Settings of a command line in tests."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from sglang_ext import settings
from sglang_ext.settings import Setting


def sets(*assignments: str) -> list[str]:
    """Return the words `--set ASSIGNMENT` for each."""
    return [word for assignment in assignments for word in ("--set", assignment)]


def parse_with_settings(
    declare: Sequence[Callable[[argparse.ArgumentParser], None]], known: Sequence[Setting], argv: Sequence[str]
) -> argparse.Namespace:
    """Parse as `sglang-ext worker` does, with the options that `declare` adds and the `known` settings."""
    parser = argparse.ArgumentParser()
    for add_arguments in declare:
        add_arguments(parser)
    settings.add_arguments(parser, known, file=None)
    return settings.with_settings(parser.parse_args(argv), known)

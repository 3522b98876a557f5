"""How many examples a property is tried with: all of them with `--full`, a quarter without."""

from __future__ import annotations

import hypothesis

QUICK_EXAMPLES = 25  # of the 100 that Hypothesis makes by default
_ALL_EXAMPLES = 100


def examples(count: int) -> int:
    """Return this number, or a quarter of it where `--full` is not given."""
    return max(1, count * hypothesis.settings().max_examples // _ALL_EXAMPLES)

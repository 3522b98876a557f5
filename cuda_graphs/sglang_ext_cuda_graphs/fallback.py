"""Why a batch runs on the ordinary path although there are graphs. Bounded: these are metric labels."""

from __future__ import annotations

from enum import StrEnum


class Fallback(StrEnum):
    TOO_LARGE = "too_large"  # no shape of the grid holds it
    PADDING = "padding"  # the nearest shape would compute too much in vain
    PREFIXES = "prefixes"  # its cached prefixes are longer in all than the buffer for their slots
    MEMORY = "memory"  # its shape was not captured, the budget being used up
    UNSUPPORTED = "unsupported"  # the request asks for something that a captured pass does not do

"""Abort a batch or the samples of a request by the id that the client gave.

SGLang names the members of a request `x` with several sequences `x_0`, `x_1` … and forgets `x` itself, so that
an abort of `x` finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def abort_request(stock: Callable[..., None], manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """AROUND `TokenizerManager.abort_request(rid, abort_all)`."""
    members = [] if abort_all or not rid or rid in manager.rid_to_state else family(rid, manager.rid_to_state)
    for member in members or [rid]:
        stock(manager, member, abort_all)


def family(rid: str, known: Iterable[str]) -> list[str]:
    """Those ids in `known` that are `rid` followed by one or more `_` and number."""
    return [other for other in known if other.startswith(f"{rid}_") and is_member_suffix(other[len(rid) :])]


def is_member_suffix(suffix: str) -> bool:
    """Whether `suffix` is `_3`, `_3_0` and the like."""
    return suffix.startswith("_") and all(part.isdecimal() for part in suffix[1:].split("_"))

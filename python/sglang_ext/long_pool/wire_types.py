"""Types of the fields of messages, with what a receiver checks in them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Annotated, TypeAlias

from msgspec import Meta

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Rate: TypeAlias = Annotated[float, Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
Line: TypeAlias = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]+\Z")]
"""Text of at least one character, and of one line."""

if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
    Logits: TypeAlias = array[float]
else:  # the class has no subscript while a program runs
    TokenIds = Logits = array

"""Tensors that behave as if they lay in a GPU's memory, on a CPU: they go together with their like only.

Inside `pretended_device()` whatever is made with `device="cuda"` is such a tensor, and says so. Indexing by tensors of
the host is allowed, as it is on a GPU; any other operation on tensors of both raises torch's error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

CUDA = torch.device("cuda", 0)
_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_TO_HOST = {torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__bool__}


class DeviceTensor(torch.Tensor):
    """Lies in the host's memory and denies it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return CUDA
        if func in _TO_HOST:
            return func(*(on_host(value) for value in args), **(kwargs or {}))
        flat, _ = tree_flatten((args, kwargs))
        of_host = [value for value in flat if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor)]
        if any(value.dim() for value in of_host) and func not in _INDEXING:
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")
        return super().__torch_function__(func, types, args, kwargs or {})


class _Factories(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).as_subclass(DeviceTensor)


def on_host(value: Any) -> Any:
    """Return a tensor of the device as one of the host, with the same memory."""
    return value.as_subclass(torch.Tensor) if isinstance(value, DeviceTensor) else value


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """Pretend a CUDA device inside the `with` block."""
    with _Factories():
        yield CUDA

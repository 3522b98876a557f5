"""SGLang's own view of command lines on a machine with one Hopper GPU that is not there.

    python tests/support/cuda_arguments.py < REQUEST    one JSON object, as its test writes it

A process of its own, since SGLang asks for the device once and for all. Packages that need a GPU, or are not in the
CPU's environment, are stand-ins: what is proven is that the hooks are in force there, that SGLang takes the arguments,
and what it makes of them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[2]
MOCKED = ("sgl_kernel", "flashinfer", "pynvml", "deep_gemm", "nixl", "mooncake")
STOOD_IN = ("triton", "torchvision", "torchaudio", "datasets")


class Mocked(ModuleType):
    """A module that has every name."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class MockedPackages(MetaPathFinder, Loader):
    """Finds the packages of MOCKED that are not installed."""

    def __init__(self) -> None:
        self._absent = [name for name in MOCKED if importlib.util.find_spec(name) is None]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_absent = fullname.partition(".")[0] in self._absent
        return ModuleSpec(fullname, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Mocked(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def prepare() -> None:
    """What must be so before SGLang is imported."""
    sys.path[:0] = [str(ROOT / "tools")]
    from pretended_gpu import pretend

    from sglang_ext import cpu

    pretend()
    cpu.install(STOOD_IN)
    sys.meta_path.insert(0, MockedPackages())


def resolved(arguments: Any) -> dict[str, Any]:
    """The fields of SGLang's `ServerArgs` after it has chosen what was left open."""
    if hasattr(arguments, "resolve_once"):
        arguments.resolve_once()
        found: dict[str, Any] = arguments.resolved_dict()
        return found
    return dict(vars(arguments))


def of_command_lines(command_lines: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Of each command line of `sglang.launch_server`; {"error": ...} where SGLang refuses it."""
    from sglang.srt.server_args import prepare_server_args

    found = []
    for command_line in command_lines:
        try:
            found.append(resolved(prepare_server_args(list(command_line))))
        except (Exception, SystemExit) as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
    return found


def of_buckets(model: Path, mode: str) -> dict[str, Any]:
    """Return the fields for prefills by length and batch size; `mode`: SGLang's own graphs, or none."""
    from sglang.benchmark import one_batch

    from gpu import buckets, sglang_runner

    found: dict[str, Any] = {}

    def load(arguments: Any, *rest: Any) -> tuple[Any, None]:
        found.update(resolved(arguments))
        return MagicMock(), None

    one_batch.load_model = load
    sglang_runner.HAS_GPU = True
    own = None if mode == "none" else mode
    attention = buckets.attention_of(own, is_float32=False)
    sglang_runner.load_runner(sglang_runner.engine_options(model, "bfloat16", attention, own, [16, 64], [1, 64]))
    return found


def main() -> int:
    request = json.load(sys.stdin)
    os.environ.update(request["environment"])
    prepare()
    from sglang.srt.plugins import load_plugins

    from gpu.model_shapes import write_model
    from sglang_ext.engine.verification import verify_hooks

    load_plugins()
    verify_hooks()

    model = Path(request["model"])
    write_model("qwen2.5-7b", model)
    answer = {
        "command_lines": of_command_lines(request["command_lines"]),
        "buckets": {mode: of_buckets(model, mode) for mode in request["buckets"]},
    }
    # SGLang keeps parts of its arguments in objects of their own.
    print(json.dumps(answer, default=lambda part: vars(part) if dataclasses.is_dataclass(part) else str(part)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Import hook that supplies stand-ins for absent packages, and for nothing else."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from sglang_ext.cpu import stand_in_definitions
from sglang_ext.cpu.missing import MissingObject, missing_class

# Packages that SGLang imports unconditionally on its CPU path.
CANDIDATES = ("triton", "torchvision", "torchaudio", "sgl_kernel")
# Packages that SGLang's benchmark tools import unconditionally, for data sets that most runs do not use.
BENCHMARK_CANDIDATES = ("datasets",)
# A CPU build of sgl_kernel has one module on the paths that SGLang takes without AMX, that of recurrent layers.
WITHOUT_SUBMODULES = frozenset({"sgl_kernel"})
# SGLang copes with their absence, and would call into them otherwise.
NOT_IMITATED = frozenset({"triton.knobs"})


class StandInModule(ModuleType):
    """A module of an absent package: unknown names are missing objects or classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if self.__name__ == "sgl_kernel":
            return stand_in_definitions.lookup_sgl_kernel(name)
        if name[:1].isupper():
            value: object = missing_class(self.__name__, name)
        else:
            value = MissingObject(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class StandInLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        stand_in_definitions.populate(module)


class StandInFinder(MetaPathFinder):
    """Finds modules of the packages it was given, with a loader that makes stand-ins."""

    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, submodule = fullname.partition(".")
        if package not in self.packages or fullname in NOT_IMITATED:
            return None
        if submodule and package in WITHOUT_SUBMODULES and fullname != stand_in_definitions.RECURRENT:
            return None
        return ModuleSpec(fullname, StandInLoader(), is_package=fullname != stand_in_definitions.RECURRENT)


def absent_packages(candidates: Sequence[str] = CANDIDATES) -> tuple[str, ...]:
    """Return which of `candidates` are not installed here, stand-ins not counted."""
    installed = _installed_finder()
    stood_in: frozenset[str] = installed.packages if installed is not None else frozenset()
    return tuple(
        name
        for name in candidates
        if name in stood_in or (name not in sys.modules and importlib.util.find_spec(name) is None)
    )


def install(candidates: Sequence[str] = CANDIDATES) -> tuple[str, ...]:
    """Put stand-ins in place of those `candidates` that are absent, and return their names.

    Safe to call again; only the first call in a process has an effect. Probes by
    `importlib.util.find_spec` (as in transformers' `is_torchvision_available`) still see them as absent.
    """
    absent = absent_packages(candidates)
    if not absent or _installed_finder() is not None:
        return absent
    finder = StandInFinder(frozenset(absent))
    real_find_spec = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in finder.packages:
            return None
        return real_find_spec(name, package)

    importlib.util.find_spec = find_spec
    sys.meta_path.append(finder)
    return absent


def _installed_finder() -> StandInFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, StandInFinder)), None)

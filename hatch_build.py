"""Build hook: a wheel carries the hot path and the C++ extension modules compiled; without a compiler, without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLAIN = (
    "the router could not be compiled: a compiler is there, but it, mypyc or an import failed as above"
    " (Python.h is in Debian's python3-dev); SGLANG_EXT_PURE_PYTHON=1 makes a wheel that runs as plain Python"
)


class CompileHotPath(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles for a wheel. An editable installation is compiled by `make env`, beside the sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("SGLANG_EXT_PURE_PYTHON") == "1":
            return
        sys.path.insert(0, str(Path(self.root) / "tools"))
        self._folder = tempfile.mkdtemp(prefix="sglang-ext-wheel-")
        built = [*self._hot_path(), *self._native_modules()]
        for relative in built:
            build_data["force_include"][str(Path(self._folder) / relative)] = str(relative)
        if built:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def _hot_path(self) -> list[Path]:
        if shutil.which(os.environ.get("CC", "cc")) is None:
            self.app.display_warning("no C compiler: the router of this wheel is plain Python")
            return []
        from compile_hot_path import compile_in

        try:
            return compile_in(Path(self._folder))
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{error.stdout[-4000:]}\n{PLAIN}") from error

    def _native_modules(self) -> list[Path]:
        from build_native import NATIVE_MODULES, build, compiler

        command = compiler()
        if command is None:
            self.app.display_warning("no C++ compiler: this wheel plans in Python and moves KV by numpy")
            return []
        modules = [module for module in NATIVE_MODULES if module.root != "bench"]  # a benchmark's is of no use there
        for module in modules:
            build(module, command, Path(self._folder) / module.built())
        return [module.built() for module in modules]

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        folder = getattr(self, "_folder", None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

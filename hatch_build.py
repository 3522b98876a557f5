"""Build hook: a wheel carries the hot path compiled; without a C compiler it is plain Python."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileHotPath(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles for a wheel. An editable installation is compiled by `make env`, beside the sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("SGLANG_EXT_PURE_PYTHON") == "1":
            return
        if shutil.which(os.environ.get("CC", "cc")) is None:
            self.app.display_warning("no C compiler: building a wheel of plain Python")
            return
        sys.path.insert(0, str(Path(self.root) / "tools"))
        from compile_hot_path import compile_in

        self._folder = tempfile.mkdtemp(prefix="sglang-ext-wheel-")
        for built in compile_in(Path(self._folder)):
            build_data["force_include"][str(Path(self._folder) / built)] = str(built)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        folder = getattr(self, "_folder", None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

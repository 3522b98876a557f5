"""SGLang itself, imported once for the tests that work on its real classes."""

from __future__ import annotations

import os
import warnings

import pytest

from sglang_ext import cpu
from sglang_ext.engine.device import Device, inspect_machine


@pytest.fixture(scope="session")
def sglang_imported() -> None:
    """Make `import sglang…` work in this process; it warns about everything that a CPU cannot do."""
    if inspect_machine().device is Device.CPU:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        cpu.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.srt.disaggregation.utils
        import sglang.srt.managers.io_struct
        import sglang.srt.plugins.hook_registry  # noqa: F401

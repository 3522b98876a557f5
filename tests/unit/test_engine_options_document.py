"""`docs/reference/engine-options.md` has what instances refuse of SGLang's arguments, and all that they read."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_engine_options", ROOT / "tools/render_engine_options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_code_refuses(tool: ModuleType) -> None:
    page = tool.DOCUMENT.read_text(encoding="utf-8")
    assert page == tool.render(), "python tools/render_engine_options.py"
    assert "| `--schedule-policy lpm` | no (" in page


def test_every_argument_that_is_read_has_a_row(tool: ModuleType) -> None:
    given = {name for changes in tool.OPTIONS.values() for name in changes}
    assert tool.read_attributes() == given | {"disaggregation_mode"}  # which the role decides
    assert set(tool.DEFAULTS) == given | {"disaggregation_mode"}


def test_without_further_arguments_nothing_is_refused(tool: ModuleType) -> None:
    assert [problem(tool.Arguments({})) for problem in tool.MECHANISMS] == [None] * 4


def test_runs_on_a_gpu_have_raw_results(tool: ModuleType) -> None:
    files = [raw for _, raw in tool.ON_A_GPU.values() if raw is not None]
    assert files
    assert [raw for raw in files if not (ROOT / "bench/results" / raw).is_file()] == []

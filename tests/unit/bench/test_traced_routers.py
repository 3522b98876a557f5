"""The copy of the router's sources without a tracer: exactly the branches of the request path are missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from support.traced_routers import BRANCHES, VARIANTS, build_variants, without_tracer

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_copy_lacks_the_branches_of_the_request_path_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.path.append(str(ROOT / "tools"))
    try:
        import compile_hot_path as tool
    finally:
        sys.path.remove(str(ROOT / "tools"))

    def copy_in(folder: Path, change: object) -> None:
        for module in tool.HOT_MODULES:
            if module.startswith("sglang_ext_router/"):
                (folder / module).parent.mkdir(parents=True, exist_ok=True)
                (folder / module).write_text(tool.source_path(module).read_text())
        change(folder)  # type: ignore[operator]

    monkeypatch.setattr(tool, "compile_in", copy_in)
    monkeypatch.setattr("support.traced_routers._compile_tool", lambda: tool)
    built = build_variants(tmp_path)
    assert set(built) == {"product", "without"} < {"product", *VARIANTS}
    fewer = {}
    package = built["product"] / "sglang_ext_router"
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        lines = path.read_text().splitlines()
        left = (built["without"] / "sglang_ext_router" / name).read_text().splitlines()
        if lines != left:
            fewer[str(name)] = [line for line in lines if line not in left]
            kept = iter(lines)
            assert all(any(line == other for other in kept) for line in left), "in their order, and none is changed"
    assert set(fewer) == {"request/flow.py"}
    assert sum(line.strip().startswith("if services.tracer is not None") for one in fewer.values() for line in one) == 2
    assert BRANCHES == 2


def test_only_branches_that_can_be_left_out_are() -> None:
    assert without_tracer("if a.tracer is not None:\n    b()\nc()\n") == ("c()\n", 1)
    with pytest.raises(AssertionError, match="line 1 has an else"):
        without_tracer("if a.tracer:\n    b()\nelse:\n    c()\n")
    with pytest.raises(AssertionError):
        without_tracer("a.tracer.join()\n")

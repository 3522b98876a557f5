"""The Triton kernels where there is no GPU: run in Triton's interpreter, and compiled for a Hopper GPU.

Triton is in a folder of its own (`make kernels-env`), because an engine on a CPU imports stand-ins for it and would
behave otherwise with the real one. Hence other processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TRITON = ROOT / ".venv/kernels"
TRITON_VERSION = "3.8.0"
sys.path.append(str(ROOT / "tools"))

from compile_kernels import (  # noqa: E402
    DOCUMENT,
    SGLANG,
    Compiled,
    path_of,
    problems,
    read_records,
    table,
    with_table,
)


def run_with_triton(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    if not (TRITON / "triton").is_dir():
        pytest.fail(f"no Triton in {TRITON}: run `make kernels-env`")
    path = os.pathsep.join(filter(None, [str(TRITON), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.full
def test_kernels_are_their_references() -> None:
    done = run_with_triton("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def compiled_here(tmp_path: Path) -> list[Compiled]:
    """What compiling all kernels with the environment's Triton gives."""
    done = run_with_triton("tools/compile_kernels.py", "--json", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [Compiled(**record) for record in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.full
def test_kernels_compile_for_hopper_as_the_document_says(tmp_path: Path) -> None:
    records = compiled_here(tmp_path)
    assert {record.kernel for record in records if not record.case.startswith(SGLANG)} == {
        *("positioned_block", "split_prefix", "join_splits", "merge_states", "move_kv"),
        *("pad_tokens", "pad_requests", "prefix_indices", "fill_pages"),
    }
    attention = [record for record in records if record.kernel in {"positioned_block", "split_prefix"}]
    assert all(record.has_wgmma for record in attention if not record.is_for_tests())
    kept = read_records()
    assert records == kept[TRITON_VERSION], f"python tools/compile_kernels.py --write renews {path_of(TRITON_VERSION)}"


def test_the_document_has_the_kept_records() -> None:
    records = read_records()
    assert sorted(version.rpartition(".")[0] for version in records) == ["3.6", "3.8"]
    document = DOCUMENT.read_text()
    assert with_table(document, table(records)) == document
    assert not [problem for one in records.values() for problem in problems(one)]


def test_lengths_of_prompts_are_of_the_type_that_sglang_has() -> None:
    """int32, where the static tensors that they are written to are int64."""
    for records in read_records().values():
        (padding,) = [one for one in records if one.kernel == "pad_requests" and one.case == "pad 64x16"]
        assert padding.types.split()[:4] == ["*i64", "*i32", "*i32", "*i64"]


def test_no_batch_has_its_padding_compiled_while_it_waits() -> None:
    """Other numbers of tokens and requests, and tensors that are not aligned, take what has been compiled."""
    for records in read_records().values():
        padding = [one.kernel for one in records if one.case.startswith("pad ")]
        assert sorted(padding) == ["pad_requests", "pad_tokens", "prefix_indices"]


def test_no_layer_waits_for_a_kernel_of_other_sizes_to_be_compiled() -> None:
    """Other numbers of queries, keys and tokens, and rows from the middle, take what the first chunk has compiled."""
    for records in read_records().values():
        kernels = [(one.kernel, one.case) for one in records if one.kernel in {"positioned_block", "merge_states"}]
        assert kernels == [
            *(("positioned_block", f"positioned bf16 D{size}") for size in (64, 128, 256)),
            ("positioned_block", "positioned fp32 D128"),
            *(("positioned_block", f"positioned bf16 D128 {sizes}") for sizes in ("128x128", "64x64")),
            *(("merge_states", case) for case in ("merge fp32 parts", "merge a bf16 part")),
        ]
        moves = [one.case for one in records if one.kernel == "move_kv"]
        assert moves == ["gather KV", "scatter KV"]


def test_a_kernel_that_spills_or_does_not_fit_is_a_problem() -> None:
    records = read_records()[TRITON_VERSION]
    spilling = records[0]._replace(spilled_bytes=8)
    assert problems([spilling]) == [f"{spilling.case}: {spilling.kernel} spills 8 bytes"]
    large = records[0]._replace(shared_bytes=240_000)
    assert [problem.partition(",")[0] for problem in problems([large])] == [
        f"{large.case}: {large.kernel} takes 240000 bytes of shared memory"
    ]
    with pytest.raises(ValueError, match=r"no <!-- made by"):
        with_table("no table", "")

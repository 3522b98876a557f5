"""The doctor's report: what counts as unfit, and how it is printed."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import pytest

from sglang_ext.engine import doctor
from sglang_ext.engine.device import Device, MachineFacts
from sglang_ext.engine.doctor import Finding
from sglang_ext.engine.verification import HookState, HookStatus

SMALL = MachineFacts(Device.CPU, (0, 1), 1 << 30)
LARGE = MachineFacts(Device.CPU, (0, 1), 16 << 30)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[HookStatus]:
    """States that the probe will find."""
    statuses = [HookStatus("a", HookState.IN_FORCE, "sglang.a")]
    monkeypatch.setattr(doctor, "_probe_hooks", lambda device: (statuses, None))
    return statuses


def unfit(machine: MachineFacts) -> set[str]:
    return {finding.subject for finding in doctor.examine(machine) if finding.is_required and not finding.is_ok}


def test_this_environment_is_fit(hooks: list[HookStatus]) -> None:
    assert unfit(LARGE) == set()


def test_too_little_memory_is_found(hooks: list[HookStatus]) -> None:
    assert unfit(SMALL) == {"machine"}


def test_broken_hook_is_found(hooks: list[HookStatus]) -> None:
    hooks.append(HookStatus("b", HookState.BROKEN, "gone"))
    assert unfit(LARGE) == {"hook b"}


def test_an_engine_packed_for_another_torch_is_found(
    hooks: list[HookStatus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = ".".join(platform.python_version_tuple()[:2])
    manifest = {"packages": {"sglang": "0.5.23"}, "torch": "2.11", "python": python, "gpus": "Hopper GPUs"}
    (tmp_path / "sglang_ext_engine.json").write_text(json.dumps(manifest))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "_version", lambda name: "2.11.0+cu130")
    (found,) = (finding for finding in doctor.examine(LARGE) if finding.subject == "packed engine")
    assert (found.is_ok, found.detail) == (True, "SGLang 0.5.23 packed for torch 2.11 and Hopper GPUs")
    monkeypatch.setattr(doctor, "_version", lambda name: "2.1.1")
    (found,) = (finding for finding in doctor.examine(LARGE) if finding.subject == "packed engine")
    assert found.detail == "SGLang 0.5.23 packed for torch 2.11 and Hopper GPUs; this machine has torch 2.1.1"
    assert found.remedy == "install torch 2.11, or pack the engine for what is there"
    assert "packed engine" in unfit(LARGE)


def test_optional_backend_does_not_matter(hooks: list[HookStatus], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.transfer.sglang.transfer_backend.import_problem", lambda module: "no such module")
    assert unfit(LARGE) == set()


def test_text_marks_and_remedies() -> None:
    text = doctor.render(
        [
            Finding("fine", True, "yes", "never shown"),
            Finding("extra", False, "absent", is_required=False),
            Finding("broken", False, "absent", "install it"),
        ],
        can_serve=False,
    )
    lines = text.splitlines()
    assert lines[0].startswith("ok")
    assert "never shown" not in text
    assert lines[1].startswith("no ")
    assert lines[2].startswith("FAIL")
    assert lines[3].endswith("-> install it")
    assert lines[-1].startswith("This machine cannot serve")


@pytest.mark.parametrize(("machine", "status"), [(LARGE, 0), (SMALL, 1)])
def test_exit_status_and_json(
    hooks: list[HookStatus],
    machine: MachineFacts,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "inspect_machine", lambda device: machine)
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args(["--json"])) == status
    report = json.loads(capsys.readouterr().out)
    assert report["can_serve"] is (status == 0)
    assert {finding["subject"] for finding in report["findings"]} >= {"machine", "torch", "sglang", "hook a"}

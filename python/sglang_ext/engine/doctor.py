"""`sglang-ext doctor`: what this machine can run, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext import __version__, cpu
from sglang_ext.engine.device import Device, MachineFacts, inspect_machine
from sglang_ext.engine.versions import OLDEST_SGLANG, SUPPORTED_SGLANG, installed_sglang
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.transfer.sglang.transfer_backend import BACKENDS, default_backend, unavailability
from sglang_ext.types import Role

if TYPE_CHECKING:  # needs numpy, which may be what is missing
    from sglang_ext.engine.verification import HookStatus

HOW_TO_INSTALL = {
    Device.CPU: "run `make env`; or install the wheel with [cpu], then `pip install --no-deps sglang==0.5.23`",
    Device.CUDA: "run `make env CUDA=1`; or install the wheel with [cuda]",
}
ENGINE_MEMORY_BYTES = 1_500_000_000
HOOK_PROBE_TIMEOUT_S = 180
# `tools/pack_engine.py` lays it next to the packages that it unpacks.
PACKED_ENGINE_MANIFEST = "sglang_ext_engine.json"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. A finding that is not required never makes the machine unfit."""

    subject: str
    is_ok: bool
    detail: str
    remedy: str | None = None
    is_required: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sglang-ext doctor`."""
    parser.add_argument("--device", choices=["auto", *Device], default="auto", help="what to check for")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found. Returns 0 when this machine can serve, 1 when it cannot."""
    machine = inspect_machine(None if arguments.device == "auto" else Device(arguments.device))
    findings = examine(machine)
    can_serve = all(finding.is_ok for finding in findings if finding.is_required)
    if arguments.json:
        report = {
            "version": __version__,
            "device": machine.device.value,
            "cores": len(machine.core_ids),
            "memory_bytes": machine.memory_bytes,
            "can_serve": can_serve,
            "findings": [asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        print(render(findings, can_serve))
    return 0 if can_serve else 1


def examine(machine: MachineFacts) -> list[Finding]:
    """Everything that serving depends on, in the order in which to repair it."""
    findings = [_machine_finding(machine), _python_finding(), *_packed_engine_findings()]
    packages = [_package_finding(name, machine.device) for name in ("torch", "sglang", "transformers")]
    findings += packages
    findings += [_backend_finding(name, machine.device) for name in BACKENDS]
    if machine.device is Device.CPU:
        findings.append(_stand_in_finding())
    if all(package.is_ok for package in packages):
        findings += _hook_findings(machine.device)
    return findings


def render(findings: Sequence[Finding], can_serve: bool) -> str:
    """The findings as text, one a line, remedies below."""
    lines = []
    for finding in findings:
        mark = "ok  " if finding.is_ok else "FAIL" if finding.is_required else "no  "
        lines.append(f"{mark}  {finding.subject:<30} {finding.detail}")
        if finding.remedy and not finding.is_ok:
            lines.append(f"      {'':<30} -> {finding.remedy}")
    lines.append("")
    lines.append(
        "This machine can serve." if can_serve else "This machine cannot serve yet; see the lines marked FAIL."
    )
    return "\n".join(lines)


def _machine_finding(machine: MachineFacts) -> Finding:
    gib = machine.memory_bytes / 2**30
    return Finding(
        "machine",
        machine.memory_bytes >= 2 * ENGINE_MEMORY_BYTES,
        f"{machine.device}, {len(machine.core_ids)} cores, {gib:.1f} GiB of memory",
        f"a prefill and a decode engine on a CPU need about {2 * ENGINE_MEMORY_BYTES / 2**30:.1f} GiB",
    )


def _python_finding() -> Finding:
    return Finding("python", sys.version_info >= (3, 11), platform.python_version(), "Python 3.11 or newer is needed")


def _packed_engine_findings() -> list[Finding]:
    """Return a finding where the engine was unpacked from an archive: it loads into one torch and one Python only."""
    manifest_path = next(
        (path for folder in sys.path if (path := Path(folder) / PACKED_ENGINE_MANIFEST).is_file()), None
    )
    if manifest_path is None:
        return []
    manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    packed = {"torch": manifest["torch"], "Python": manifest["python"]}
    found = {"torch": _version("torch"), "Python": platform.python_version()}
    detail = f"SGLang {manifest['packages']['sglang']} packed for torch {packed['torch']} and {manifest['gpus']}"
    wrong = [name for name in packed if not f"{found[name]}.".startswith(f"{packed[name]}.")]
    if wrong:
        detail += "; this machine has " + ", ".join(f"{name} {found[name] or '(none)'}" for name in wrong)
    remedy = " and ".join(f"install {name} {packed[name]}" for name in wrong)
    return [Finding("packed engine", not wrong, detail, f"{remedy}, or pack the engine for what is there")]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package_finding(name: str, device: Device) -> Finding:
    version = _version(name)
    if name == "sglang" and (installed := installed_sglang()) is not None and installed < OLDEST_SGLANG:
        return Finding(name, False, f"{version} is too old", f"install SGLang {SUPPORTED_SGLANG}")
    return Finding(name, version is not None, version or "not installed", HOW_TO_INSTALL[device])


def _backend_finding(name: str, device: Device) -> Finding:
    problem = unavailability(name, device)
    is_default = name == default_backend(device)
    note = "available, default" if is_default else "available"
    return Finding(f"KV transfer {name}", problem is None, problem or note, is_required=is_default)


def _stand_in_finding() -> Finding:
    absent = ", ".join(cpu.absent_packages())
    detail = (
        f"stand-ins for {absent}, of which no CPU builds are published"
        if absent
        else "all packages that SGLang imports are installed"
    )
    return Finding("CPU platform", True, detail)


def _hook_findings(device: Device) -> list[Finding]:
    from sglang_ext.engine.verification import HookState

    statuses, problem = _probe_hooks(device)
    if problem is not None:
        remedy = HOW_TO_INSTALL[device] if "No module named" in problem else "report this with the versions above"
        return [Finding("hooks into SGLang", False, problem, remedy)]
    return [
        Finding(
            f"hook {status.name}",
            status.state is not HookState.BROKEN,
            f"{status.state}: {status.detail}",
            f"install SGLang {SUPPORTED_SGLANG}",
        )
        for status in statuses
    ]


def _probe_hooks(device: Device) -> tuple[list[HookStatus], str | None]:
    """States of the hooks in a fresh process, or why that process failed."""
    from sglang_ext.engine.options import ExtensionOptions
    from sglang_ext.engine.verification import HookState, HookStatus

    print("checking the hooks into SGLang, which imports it (about 15 s) ...", file=sys.stderr, flush=True)
    environment = {**os.environ, **ExtensionOptions(Role.BOTH, device, LapsOptions()).to_environment()}
    if device is Device.CPU:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    try:
        probe = subprocess.run(
            [sys.executable, "-m", "sglang_ext.engine.doctor"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=HOOK_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], f"importing SGLang took more than {HOOK_PROBE_TIMEOUT_S} s"
    if probe.returncode != 0:
        last_line = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        return [], f"SGLang cannot be imported: {last_line}"
    records = json.loads(probe.stdout.strip().splitlines()[-1])
    return [HookStatus(record["name"], HookState(record["state"]), record["detail"]) for record in records], None


def _print_hook_states() -> None:
    """Load SGLang with the hooks and print their state as JSON.

    A process of its own does it (`python -m` this module), because it imports all of SGLang and changes it.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        cpu.install()
    from sglang.srt.plugins import load_plugins

    from sglang_ext.engine.verification import inspect_hooks

    load_plugins()
    importlib.import_module("sglang.srt.entrypoints.http_server")  # an error names the package that is missing
    print(json.dumps([asdict(status) for status in inspect_hooks()]))


if __name__ == "__main__":
    _print_hook_states()

"""`make env` and `make demo` find out what the machine has: the environment, its packages, the engine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_GPU = "echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5a)'"
TWO_GPUS = f"{ONE_GPU}; echo 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-5b)'"
NO_DRIVER = 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9'
BLOCKED = "echo 'Failed to initialize NVML: GPU access blocked by the operating system'; exit 17"


def make(tmp_path: Path, nvidia_smi: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `make` would do where nvidia-smi does this; None: where there is none."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{nvidia_smi or 'exit 127'}\n")
    program.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "MAKE", "MFLAGS"))}
    return subprocess.run(
        # -B: all commands, also where the environment is there
        ["make", "-n", "-B", "--no-print-directory", *arguments],
        cwd=ROOT,
        env={**environment, "PATH": f"{tmp_path}:{environment['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def is_for_cuda(commands: str) -> bool:
    """Whether all of the commands are for the CUDA environment, rather than for the CPU's. A mixture fails."""
    environments = {".venv-cuda" in line for line in commands.splitlines() if ".venv" in line}
    assert len(environments) == 1, commands
    is_cuda = environments.pop()
    assert ("-r requirements/cuda.lock" in commands) == is_cuda
    assert ("-r requirements/cpu.lock" in commands) != is_cuda
    assert ("engine: SGLang on CUDA" in commands) == is_cuda
    assert ("engine: SGLang on the CPU" in commands) != is_cuda
    return is_cuda


@pytest.mark.full
@pytest.mark.parametrize(
    "nvidia_smi", [None, NO_DRIVER, BLOCKED, "true"], ids=["none", "no-driver", "blocked", "empty"]
)
def test_without_a_gpu_the_engine_is_the_cpu_s(tmp_path: Path, nvidia_smi: str | None) -> None:
    done = make(tmp_path, nvidia_smi, "demo")
    assert done.returncode == 0, done.stderr
    assert not is_for_cuda(done.stdout)
    assert "examples/demo.py --device cpu" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("nvidia_smi", [ONE_GPU, TWO_GPUS], ids=["one", "two"])
def test_with_a_gpu_the_engine_is_cuda_s(tmp_path: Path, nvidia_smi: str) -> None:
    done = make(tmp_path, nvidia_smi, "demo", "KEEP=1")
    assert done.returncode == 0, done.stderr
    assert is_for_cuda(done.stdout)
    assert "examples/demo.py --device cuda --keep" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("nvidia_smi", "chosen"), [(ONE_GPU, "0"), (None, "1")])
def test_the_engine_can_be_chosen(tmp_path: Path, nvidia_smi: str | None, chosen: str) -> None:
    assert is_for_cuda(make(tmp_path, nvidia_smi, "env", f"CUDA={chosen}").stdout) == (chosen == "1")


def test_another_value_is_refused_by_name(tmp_path: Path) -> None:
    done = make(tmp_path, ONE_GPU, "env", "CUDA=/usr/local/cuda")
    assert done.returncode != 0
    assert "CUDA is /usr/local/cuda: 0 is the CPU, 1 is CUDA" in done.stderr


@pytest.mark.slow
def test_the_cpu_s_packages_come_as_before(tmp_path: Path) -> None:
    """torch by its usual dependencies, all else as the lock has it."""
    commands = make(tmp_path, None, "env").stdout.splitlines()
    lines = [line for line in commands if "pip install" in line][:3]  # what follows is made by a second make
    options = "-qq --disable-pip-version-check"
    assert [" ".join(line.split()) for line in lines] == [
        f".venv/bin/python -m pip install {options} --no-compile torch==2.13.0",
        f".venv/bin/python -m pip install {options} --no-deps --no-compile -r requirements/cpu.lock",
        f".venv/bin/python -m pip install {options} --no-deps --no-build-isolation -e .",
    ]

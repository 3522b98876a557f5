"""`sglang.bench_serving`, unmodified, as a process: its command line and its result file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 900.0
# It imports PyTorch and transformers, which serving programs that share the cores need less than it does.
_COMMAND = [sys.executable, str(Path(__file__).with_name("run_sglang_tool.py")), "sglang.bench_serving"]


class BenchServingError(RuntimeError):
    """The load generator failed; the message is one line."""


class ClassLoad(NamedTuple):
    """The requests of one length class."""

    requests: int
    rate_per_s: float  # of a Poisson process
    longest_prompt_tokens: int  # lengths are uniform from half of it
    longest_output_tokens: int  # likewise
    seed: int


class ClassResult(NamedTuple):
    """Describes what the load generator measured, one entry per completed request."""

    ttft_ms: list[float]
    tpot_ms: list[float]
    input_tokens: int
    output_tokens: int
    duration_s: float
    end_s: float  # when the file was written, as time.time()


class BenchServing:
    """One running load generator; a context manager that ends it."""

    def __init__(self, load: ClassLoad, base_url: str, model: str, tokenizer: Path, result: Path) -> None:
        self._load = load
        self._result = result
        self._log = result.with_suffix(".log")
        command = [*_COMMAND, "--backend", "sglang", "--base-url", base_url, "--model", model]
        command += ["--tokenizer", str(tokenizer), "--dataset-name", "random-ids", "--tokenize-prompt"]
        command += ["--num-prompts", str(load.requests), "--request-rate", f"{load.rate_per_s:g}"]
        command += ["--random-input-len", str(load.longest_prompt_tokens)]
        command += ["--random-output-len", str(load.longest_output_tokens), "--random-range-ratio", "0.5"]
        command += ["--seed", str(load.seed), "--warmup-requests", "1", "--disable-tqdm"]
        command += ["--output-file", str(result), "--output-details"]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)

    def __enter__(self) -> BenchServing:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, progress: Callable[[str], None]) -> ClassResult:
        """Wait for its end and read its result; `progress` gets a line every ten seconds."""
        waited_s = 0.0
        while True:
            try:
                status = self._process.wait(10)
                break
            except subprocess.TimeoutExpired:
                waited_s += 10
                progress(f"{waited_s:.0f} s: {self._load.requests} prompts at {self._load.rate_per_s:g} per second")
                if waited_s >= TIMEOUT_S:
                    self._process.kill()
        if status or not self._result.exists():
            tail = " / ".join(self._log.read_text(errors="replace").splitlines()[-5:])
            raise BenchServingError(f"sglang.bench_serving ended with status {status}: {tail}")
        return read_result(self._result)


def read_result(path: Path) -> ClassResult:
    """Read the last line of a file written with `--output-details`; failed requests are left out."""
    record = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    ttft_ms, tpot_ms = [], []
    for ttft_s, gaps_s, output_tokens, error in zip(
        record["ttfts"], record["itls"], record["output_lens"], record["errors"], strict=True
    ):
        if error or output_tokens < 1:
            continue
        ttft_ms.append(ttft_s * 1e3)
        tpot_ms.append(sum(gaps_s) / max(1, output_tokens - 1) * 1e3)
    return ClassResult(
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        input_tokens=record["total_input_tokens"],
        output_tokens=record["total_output_tokens"],
        duration_s=record["duration"],
        end_s=path.stat().st_mtime,
    )

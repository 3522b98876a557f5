"""A million requests through `sglang-ext batch run`, which is killed twenty times on the way.

    python bench/batch_million.py [--rows 1000000] [--kills 20] [--seed 0]

The endpoint is a stand-in that answers at once, in a process of its own: what is measured is the run itself (reading,
store, dispatch, export). Every kill is `kill -9` at a random moment; the same command is then started again. A first
run without kills gives the rate. The last line is `RESULT {json}`: rows per second of that run from start to end,
the largest resident set of any of the processes, how many restarts there were, and whether every `custom_id` is in
the output once, with nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from contextlib import closing
from pathlib import Path

import psutil

from sglang_ext.ports import pick_free_ports
from support.result import BenchmarkRun, give_up, progress

_FOLDER = Path(__file__).parent
_SAMPLE_S = 0.25
_START_S = 2.0  # what a start takes before it does anything
_READING_SHARE = 0.1  # of the work


def write_input(path: Path, rows: int) -> None:
    """Prompts of some 60 to 800 bytes, fifty different beginnings, and ids that name their row."""
    draw = random.Random(0)
    beginnings = ["".join(draw.choices("abcdefghij ", k=200)) for _ in range(50)]
    with path.open("w") as opened:
        for row in range(rows):
            prompt = f"{beginnings[row % 50][: 60 + row % 140]} {row} {'word ' * (row % 120)}"
            body = {"model": "stand-in", "prompt": prompt, "max_tokens": 8}
            line = {"custom_id": f"row-{row}", "method": "POST", "url": "/v1/completions", "body": body}
            opened.write(json.dumps(line) + "\n")


class Run:
    """The command, its memory, and its end."""

    def __init__(self, folder: Path, port: int, name: str) -> None:
        self.output = folder / f"{name}.jsonl"
        self._log = (folder / f"{name}.log").open("ab")
        arguments = ["batch", "run", "--input", str(folder / "in.jsonl"), "--output", str(self.output)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang_ext.cli", *arguments, "--endpoint", f"http://127.0.0.1:{port}"],
            stdout=self._log,
            stderr=self._log,
        )
        self.peak_rss_bytes = 0
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        try:
            watched = psutil.Process(self.process.pid)
            while self.process.poll() is None:
                self.peak_rss_bytes = max(self.peak_rss_bytes, watched.memory_info().rss)
                time.sleep(_SAMPLE_S)
        except psutil.Error:
            pass

    @property
    def store(self) -> Path:
        """Return where the run keeps what it knows."""
        return self.output.with_name(f"{self.output.name}.store")

    def wait_until_s(self, end_s: float) -> None:
        """Wait until then, or until the process has ended."""
        while time.monotonic() < end_s and self.process.poll() is None:
            time.sleep(0.02)

    def end(self) -> int:
        """Wait for the end and return the exit status."""
        status = self.process.wait()
        self._watcher.join()
        self._log.close()
        return status

    def kill(self) -> bool:
        """`kill -9`; False when it had ended before."""
        was_running = self.process.poll() is None
        self.process.send_signal(signal.SIGKILL)
        self.end()
        return was_running


def done_rows(store: Path) -> int:
    """Count the rows that have a result while another process writes them; 0 before the store exists."""
    try:
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as reader:
            row = reader.execute("SELECT succeeded FROM jobs").fetchone()
    except sqlite3.Error:
        return 0
    return int(row[0]) if row else 0


def each_once(path: Path, rows: int) -> bool:
    """Return whether the output has every id once and nothing else."""
    seen = array("B", bytes(rows))
    count = 0
    with path.open("rb") as opened:
        for line in opened:
            row = int(json.loads(line)["custom_id"].removeprefix("row-"))
            seen[row] += 1
            count += 1
    return count == rows and all(times == 1 for times in seen)


def main() -> None:
    """Run and print the result line."""
    arguments = _arguments()
    benchmark = BenchmarkRun("sglang-ext", "aiohttp", "orjson")
    draw = random.Random(arguments.seed)
    port = pick_free_ports("127.0.0.1", 1, draw=random.SystemRandom())[0]
    with tempfile.TemporaryDirectory(prefix="batch-million-") as scratch:
        folder = Path(scratch)
        write_input(folder / "in.jsonl", arguments.rows)
        progress(f"{arguments.rows} rows, {os.path.getsize(folder / 'in.jsonl') / 1e6:.0f} MB")
        stand_in = subprocess.Popen(
            [sys.executable, "-m", "support.batch_stand_in", str(port), "--delay-ms", "5"],
            cwd=_FOLDER,
            stderr=subprocess.DEVNULL,
        )
        try:
            result = _measure(folder, port, arguments.rows, arguments.kills, draw)
        finally:
            stand_in.kill()
            stand_in.wait()
    benchmark.end(result)


def _measure(folder: Path, port: int, rows: int, kills: int, draw: random.Random) -> dict[str, object]:
    began_s = time.monotonic()
    whole = Run(folder, port, "whole")
    if whole.end() != 0:
        give_up(f"the run without kills failed:\n{(folder / 'whole.log').read_text()[-2000:]}")
    wall_s = time.monotonic() - began_s
    is_whole = each_once(whole.output, rows)
    progress(f"without kills: {wall_s:.1f} s, {rows / wall_s:.0f} rows/s, {whole.peak_rss_bytes / 2**20:.0f} MiB")
    for file in folder.glob("whole.jsonl*"):
        file.unlink()
    peak_bytes = whole.peak_rss_bytes
    restarts = 0
    began_s = time.monotonic()
    for moment in sorted(draw.random() for _ in range(kills)):
        # The share of the work that is done when the kill comes: some kills meet the reading of the input, others the
        # sending and the writing.
        run = Run(folder, port, "killed")
        if moment < _READING_SHARE:
            run.wait_until_s(time.monotonic() + _START_S * (0.5 + draw.random()))
        else:
            while run.process.poll() is None and done_rows(run.store) < moment * rows:
                time.sleep(0.05)
            run.wait_until_s(time.monotonic() + draw.random())
        if not run.kill():
            progress("done before a kill")
        else:
            restarts += 1
        peak_bytes = max(peak_bytes, run.peak_rss_bytes)
    last = Run(folder, port, "killed")
    if last.end() != 0:
        give_up(f"the last start failed:\n{(folder / 'killed.log').read_text()[-2000:]}")
    killed_wall_s = time.monotonic() - began_s
    peak_bytes = max(peak_bytes, last.peak_rss_bytes)
    progress(f"with {restarts} kills: {killed_wall_s:.1f} s")
    return {
        "rows": rows,
        "rows_per_s": round(rows / wall_s),
        "wall_s": round(wall_s, 1),
        "peak_rss_mib": round(peak_bytes / 2**20),
        "restarts": restarts,
        "wall_with_restarts_s": round(killed_wall_s, 1),
        "each_once": is_whole and each_once(last.output, rows),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.rows < 1 or arguments.kills < 0:
        parser.error("--rows must be at least 1 and --kills at least 0")
    return arguments


if __name__ == "__main__":
    main()

"""Compile the modules that every request runs through to native code with mypyc: the router's request path, and what a
prefill instance decides before each iteration.

The sources stay what they are, typed Python that also runs uncompiled, only slower: the router then takes about
1.8 times the processor time per request, a decision about three times. Usage:

    python tools/compile_hot_path.py            # next to the sources, for an editable installation
    python tools/compile_hot_path.py --remove   # back to plain Python

mypyc bakes the types in: what a compiled class has, and of which type, cannot be changed at run time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"sglang_ext": ROOT / "python", "sglang_ext_router": ROOT / "router"}
HOT_MODULES = (
    "sglang_ext/graphs/decide/graph_grid.py",
    *(f"sglang_ext/laps/decide/{name}.py" for name in (
        *("boundary", "cost_model", "instance_model", "nnls", "on_time", "packed_batch"),
        *("packed_choice", "policy", "prefill_queue", "round_plan", "short_batch", "urgency"),
        "wait_depth",
    )),
    *(f"sglang_ext/live/decide/{name}.py" for name in ("encoding", "view")),
    *(f"sglang_ext_router/decide/{name}.py" for name in (
        *("admission", "budgets", "circuit_breaker", "decode_choice", "fair_admission"),
        *("pd_actions", "pd_protocol", "tenants"),
        *("pool_choice", "prefill_choice", "prefill_progress", "prefix_index", "retry_budget", "token_estimate"),
    )),
    *(f"sglang_ext_router/http/{name}.py" for name in (
        "access", "http1", "replies", "request_parser", "unread_replies",
    )),
    *(f"sglang_ext_router/instances/{name}.py" for name in ("registry", "workers")),
    *(f"sglang_ext_router/observe/{name}.py" for name in ("histograms", "metrics", "request_record")),
    *(f"sglang_ext_router/request/{name}.py" for name in (
        *("aborting", "attempt", "counting", "flow", "known_prefixes", "migration", "prepared_request", "prompt"),
        *("relay", "request_body", "request_fields", "request_ids", "routing", "services", "upstream"),
    )),
    "sglang_ext_router/tenants/accounts.py",
)  # fmt: skip
MANIFEST = ROOT / "router/sglang_ext_router/compiled_sources.json"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def source_path(module: str) -> Path:
    """Return where a module's source lies in the checkout."""
    return PACKAGES[module.split("/")[0]] / module


def compiled_files() -> list[Path]:
    """Return every file that an earlier compilation left next to the sources."""
    compiled = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {}  # which may have moved since
    extensions = [source_path(module).with_suffix(SUFFIX) for module in {*HOT_MODULES, *compiled}]
    return [file for file in (*extensions, MANIFEST) if file.exists()] + list(
        (ROOT / "router").glob(f"*__mypyc{SUFFIX}")
    )


def compile_in(folder: Path, change: Callable[[Path], None] = lambda folder: None) -> list[Path]:
    """Compile copies of the packages in `folder`, once `change` has made of these what it wants; the extension modules,
    relative to it.

    subprocess.CalledProcessError, with its output, when mypyc or the C compiler refuses, or when a compiled module
    cannot be imported: a value of another type than its annotation says is found then.
    """
    for package, root in PACKAGES.items():
        shutil.copytree(root / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    change(folder)
    environment = {**os.environ, "MYPYPATH": ".", "MYPYC_DEBUG_LEVEL": "0", "MYPY_CACHE_DIR": str(folder / "cache")}
    compiling = ("-m", "mypyc", "--ignore-missing-imports", "--follow-imports=silent", *HOT_MODULES)
    # In pip's own environment for a build the variable leads to what was installed there.
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    importing = ("-c", "import " + ", ".join(name.removesuffix(".py").replace("/", ".") for name in HOT_MODULES))
    for command in (compiling, importing):
        subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            check=True,
            env={**environment, "PYTHONPATH": paths} if command is importing else environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    built = [file for pattern in (f"*{SUFFIX}", f"*/**/*{SUFFIX}") for file in folder.glob(pattern)]
    return sorted({file.relative_to(folder) for file in built if file.relative_to(folder).parts[0] != "build"})


def destination(built: Path) -> Path:
    """Return where an extension module belongs in the checkout; the shared part lies next to the router's package."""
    root = PACKAGES.get(built.parts[0], ROOT / "router")
    return root / built


def manifest_of_sources(path_of: Callable[[str], Path] = source_path) -> str:
    """Return the manifest by which compiled modules are compared with their sources later."""
    return json.dumps({module: hashlib.sha256(path_of(module).read_bytes()).hexdigest() for module in HOT_MODULES})


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the router's hot path with mypyc.")
    parser.add_argument("--remove", action="store_true", help="remove what was compiled")
    parser.add_argument("--list", action="store_true", help="print the files whose change asks for a new compilation")
    arguments = parser.parse_args()
    if arguments.list:
        files = [Path(__file__).resolve(), source_path("sglang_ext/types.py"), *map(source_path, HOT_MODULES)]
        print(*(file.relative_to(ROOT) for file in files))
        return 0
    for file in compiled_files():
        file.unlink()
    if arguments.remove:
        return 0
    if shutil.which(os.environ.get("CC", "cc")) is None:
        print("no C compiler found: the router runs as plain Python, which is slower", file=sys.stderr)
        return 0
    started_s = time.monotonic()
    print(f"compiling {len(HOT_MODULES)} modules (about a minute) ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="sglang-ext-compile-") as folder:
        try:
            built = compile_in(Path(folder))
        except subprocess.CalledProcessError as error:
            print(error.stdout[-4000:], file=sys.stderr)
            print("compilation failed; the router runs as plain Python", file=sys.stderr)
            return 1
        for file in built:
            shutil.copy2(Path(folder) / file, destination(file))
        MANIFEST.write_text(manifest_of_sources(lambda module: Path(folder) / module))
    print(f"compiled in {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

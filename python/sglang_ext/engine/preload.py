"""An engine's imports, made once in a process that its own processes, or whole engines, are forked from.

SGLang spawns a scheduler per rank and a detokenizer, and each of them imports torch and SGLang again: on a CPU that
is most of an engine's start. Here they are forked instead. That is sound while the process that forks has one
thread, has run no torch operation on several threads, and has imported nothing that read a setting which the child
has otherwise; threads and settings are checked. A GPU engine is never forked: its imports initialise CUDA.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import context, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sglang_ext.engine.hook_table import HOOK_TABLE
from sglang_ext.engine.process_lifetime import OrphanError, join_process_tree

MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.model_loader.loader",
    "sglang.srt.models.registry",
    "sglang.srt.models.llama",
    *sorted({hook.implementation.partition(":")[0] for hook in HOOK_TABLE}),
)
# Looks at PROMETHEUS_MULTIPROC_DIR, which is an engine's own, once, when it is imported.
NOT_BEFORE_THE_ENGINE = ("prometheus_client",)
# What C libraries read once, when they are loaded; what Python code reads is recorded.
READ_BY_LIBRARIES = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "ATEN_", "TORCH_", "NPY_", "KINETO_"),
    *("LD_", "MALLOC_", "GLIBC_", "PYTHON", "LC_", "LANG", "TZ"),
)
# Put right after the fork where they differ.
SET_AFTER_FORK = frozenset({"OMP_NUM_THREADS"})
# Marks of who started a process; no import depends on them.
NOT_SETTINGS = frozenset({"SGLANG_EXT_PARENT_PID", "SGLANG_EXT_CLUSTER_ID"})


class CannotForkError(RuntimeError):
    """This process must not be forked; the message says why."""


@dataclass(frozen=True)
class Imports:
    """The part of the environment that the imports read."""

    read_variables: frozenset[str]
    environment: Mapping[str, str]  # before
    set_variables: Mapping[str, str] = field(default_factory=dict)  # by the imports themselves

    def conflicts(self, wanted: Mapping[str, str]) -> list[str]:
        """Variables that the imports read and that `wanted` has otherwise: such an engine needs its own imports."""
        by_libraries = {name for name in {*wanted, *self.environment} if name.startswith(READ_BY_LIBRARIES)}
        relevant = (self.read_variables | by_libraries) - SET_AFTER_FORK - NOT_SETTINGS
        return sorted(name for name in relevant if wanted.get(name) not in self._seen(name))

    def applied_to(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """`wanted` as it is after the imports, which would have set some variables themselves."""
        own = {name: value for name, value in self.set_variables.items() if wanted.get(name) in self._seen(name)}
        return {**wanted, **own}

    def _seen(self, name: str) -> set[str | None]:
        """Return the values with which the imports behave as they did: the earlier value, and the values they set."""
        before = self.environment.get(name)
        return {before, self.set_variables.get(name, before)}


def preload() -> Imports:
    """Import all that an engine's processes need. Call once, before any thread is started.

    The environment is that of `launch_plan.shared_cpu_environment`, or of a CPU engine.

    Raises CannotForkError when something started a thread, or was imported too early.
    """
    gc.disable()  # collections would take a fifth of the time, and hardly any object of the imports is garbage
    try:
        return _preload()
    finally:
        gc.freeze()  # collections in the children do not touch, and so do not copy, what is shared
        gc.enable()


def _preload() -> Imports:
    seen = dict(os.environ)
    with _recorded_reads() as names, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in MODULES:
            importlib.import_module(module)
    early = [name for name in NOT_BEFORE_THE_ENGINE if name in sys.modules]
    if early:
        raise CannotForkError(f"{', '.join(early)} was imported, and it has read an engine's own settings then")
    _require_one_thread()
    changed = {name: value for name, value in os.environ.items() if seen.get(name) != value}
    return Imports(frozenset(names), seen, changed)


def become_engine(environment: Mapping[str, str], imports: Imports) -> None:
    """Take over an engine's environment in a process that was forked from one with its `imports`.

    The number of torch's threads is left to the engine's own processes, which compute: setting it here would start
    threads, and this process could not be forked any more.
    """
    import numpy as np

    os.environ.clear()
    os.environ.update(imports.applied_to(environment))
    join_process_tree(os.environ, is_child=False)
    np.random.seed(int.from_bytes(os.urandom(4), "little"))  # Python's own generator sees to this by itself


def fork_instead_of_spawn() -> None:
    """Fork SGLang's processes from this one from now on, also where it asks for them to be spawned.

    What a spawned child does by running the main module again is done after the fork. Where this process runs
    several threads when one is started, that one is spawned, and it says so. Contexts that are asked for by name
    are left as they are.
    """
    set_start_method = multiprocessing.set_start_method
    default: Any = context.Process
    start_by_default = default._Popen

    def choose(method: str | None, force: bool = False) -> None:
        resource_tracker.ensure_running()  # one for all processes of the engine, as with spawn
        set_start_method("fork" if method == "spawn" else method, force=force)

    def start(process: BaseProcess) -> Any:
        if multiprocessing.get_start_method(allow_none=True) != "fork":
            return start_by_default(process)
        try:
            _require_one_thread()
        except CannotForkError as error:
            print(f"sglang-ext: {process.name} is spawned: {error}", file=sys.stderr)
            spawning: Any = context.SpawnProcess
            return spawning._Popen(process)
        _Child.is_ours = True
        try:
            return start_by_default(process)
        finally:
            _Child.is_ours = False

    multiprocessing.set_start_method = choose
    default._Popen = staticmethod(start)
    util.register_after_fork(_Child, _enter_child)


def spawn_reason(server_args: Any) -> str | None:
    """Return why an engine with these arguments has to spawn its processes, None when they can be forked."""
    if server_args.dp_size > 1:
        return "--dp-size above 1 starts its schedulers from threads"
    if getattr(server_args, "ep_join_mode", None) == "scale":
        return "--ep-join-mode scale starts its schedulers from threads"
    if server_args.tokenizer_worker_num > 1:
        return "--tokenizer-worker-num above 1 starts processes of its own"
    return None


class _Child:
    """Return whether a process that was just forked is a process that SGLang meant to spawn."""

    is_ours = False


def _enter_child(_: object) -> None:
    if not _Child.is_ours:
        return
    _Child.is_ours = False
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # the parent's handler ends the whole engine
    try:
        join_process_tree(os.environ, is_child=True)
    except OrphanError:
        os._exit(1)  # an exception would be swallowed here
    _replace_thread_pool()


def _replace_thread_pool() -> None:
    """Have torch make the thread pool again that a fork has left without threads, while this is the only thread.

    torch does so by itself at the first operation that is large enough, and there without a lock: of two threads
    that begin together, as SGLang's loaders of weights do, one finds no pool ("Invalid thread pool!"). The number is
    that of the environment, which the OpenMP library has read when it was loaded, maybe for another engine.
    """
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))


def _require_one_thread() -> None:
    tasks = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len(tasks) > 1:
        raise CannotForkError(f"threads {', '.join(sorted(tasks))} run, which a fork would lose")


@contextmanager
def _recorded_reads() -> Iterator[set[str]]:
    """Names that Python code asks os.environ for; a copy of all of it does not count."""
    kind: Any = type(os.environ)
    names: set[str] = set()
    walked: deque[str] = deque()  # a copy reads in the order in which it walks
    read, walk = kind.__getitem__, kind.__iter__

    def recording_read(self: Any, name: str) -> Any:
        if walked and walked[0] == name:
            walked.popleft()
        else:
            walked.clear()
            names.add(name)
        return read(self, name)

    def noting_walk(self: Any) -> Iterator[str]:
        walked.clear()
        for name in walk(self):
            walked.append(name)
            yield name

    kind.__getitem__, kind.__iter__ = recording_read, noting_walk
    try:
        yield names
    finally:
        kind.__getitem__, kind.__iter__ = read, walk

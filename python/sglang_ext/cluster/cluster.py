"""A cluster as one object: prepare the model, pick ports, start, keep, stop."""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Protocol
from urllib.parse import quote

from sglang_ext.cluster import plan as planning
from sglang_ext.cluster.argument_checks import check_arguments, engine_checks, located
from sglang_ext.cluster.cluster_file import load_cluster
from sglang_ext.cluster.config import ClusterConfig, ConfigError
from sglang_ext.cluster.model import PreparedModel, prepare_model
from sglang_ext.cluster.plan import ClusterPlan
from sglang_ext.cluster.state import (
    ClusterState,
    ProgramState,
    lock_folder,
    remove_state,
    write_pool_key,
    write_state,
)
from sglang_ext.cluster.supervisor import TICK_S, Listener, RefusedArgumentsError, SupervisedProgram, Supervisor
from sglang_ext.ports import is_port_free, pick_free_ports


class Display(Protocol):
    """Shows a person what the cluster's programs do."""

    def changed(self, member: SupervisedProgram, line: str) -> None:
        """One program changed its phase; `line` says how."""

    def refresh(self, members: list[SupervisedProgram]) -> None:
        """Called often while the cluster starts."""

    def started(self) -> None:
        """The start is over, well or not; from here on only `changed` is called."""


def plan_cluster(config: ClusterConfig, model: PreparedModel) -> ClusterPlan:
    """Lay out the cluster on this machine with ports that are free now. Raises ConfigError."""
    given_ports = dict(config.given_ports())
    for path, port in given_ports.items():
        host = config.router.host if path == "router.port" else config.host
        if not path.startswith("router.args") and not is_port_free(host, port):
            raise ConfigError(path, f"port {port} of {host} cannot be listened on: in use, or not permitted")
    free_ports = pick_free_ports(
        config.host,
        planning.count_ports(config),
        avoid=given_ports.values(),
        draw=random.SystemRandom(),
    )
    return planning.make_plan(
        config,
        model=model,
        machine=planning.find_machine(),
        free_ports=free_ports,
        admin_key=_given_admin_key(config) or secrets.token_urlsafe(24),
    )


def check_cluster(config: ClusterConfig, plan: ClusterPlan) -> None:
    """Refuse everything that a start of the plan would refuse, and start nothing. Raises ConfigError, or StartError."""
    with TemporaryDirectory(prefix="sglang-ext-") as name:
        folder = Path(name)
        plan = plan.with_files_in(folder)
        if plan.pool_key_file is not None:
            write_pool_key(plan.pool_key_file)
        check_arguments(config, plan)
        supervisor = _supervisor(config, plan, folder, lambda member, line: None, lambda: False)
        try:
            _check_engines(config, plan, supervisor, lambda: None)
        finally:
            supervisor.stop(lambda: True)


def _check_engines(
    config: ClusterConfig, plan: ClusterPlan, supervisor: Supervisor, on_tick: Callable[[], None]
) -> bool:
    """Let an engine of each pool check its arguments; return False where that was cancelled. Raises ConfigError."""
    try:
        return supervisor.check(engine_checks(plan), on_tick)
    except RefusedArgumentsError as error:
        raise located(config, error.program, error.problem) from None


def _supervisor(
    config: ClusterConfig, plan: ClusterPlan, folder: Path, listener: Listener, is_cancelled: Callable[[], bool]
) -> Supervisor:
    return Supervisor(
        plan,
        folder / "logs",
        start_timeout_s=config.start.timeout_s,
        drain_s=config.stop.drain_s,
        grace_s=config.stop.grace_s,
        restarts=config.restart == "on-failure",
        liveness=config.liveness,
        listener=listener,
        is_cancelled=is_cancelled,
    )


def _given_admin_key(config: ClusterConfig) -> str | None:
    return planning.admin_key_of(config) or os.environ.get(planning.ADMIN_KEY_VARIABLE)


class NoDisplay:
    """Show nothing."""

    def changed(self, member: SupervisedProgram, line: str) -> None:
        """Ignore the change."""

    def refresh(self, members: list[SupervisedProgram]) -> None:
        """Show nothing while the cluster starts."""

    def started(self) -> None:
        """Show nothing when the start is over."""


class Cluster:
    """A running cluster; a context manager that starts it and leaves nothing running.

        with Cluster.from_yaml("examples/cluster.yaml") as cluster:
            print(cluster.url)

    Entering returns when the router serves. It raises ClusterInUseError, ConfigError, ModelError or StartError, and has
    stopped everything then.
    """

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """Return the cluster that a YAML file describes (docs/reference/cluster-file.md).

        Raises ConfigError, which names the setting.
        """
        return cls(load_cluster(Path(path)))

    def __init__(
        self,
        config: ClusterConfig,
        display: Display | None = None,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
        checks_engines: bool = True,
    ) -> None:
        """`checks_engines`: let SGLang check its arguments before anything starts; without, a start fails later."""
        self.config = config
        self.folder = config.folder.resolve()
        self._display: Display = display or NoDisplay()
        self._is_cancelled = is_cancelled
        self._checks_engines = checks_engines
        self._hurry: Callable[[], bool] = lambda: False
        self.is_ready = False

    @property
    def url(self) -> str:
        """The router's address, such as http://127.0.0.1:30000."""
        return self.plan.router.url

    @property
    def page_url(self) -> str | None:
        """The live page, which opens at once where the admin key was made here; None where the router has none.

        The key is in the fragment, which a browser keeps to itself. A given key is not repeated: the page asks.
        """
        url = self.plan.page_url
        if url is None or _given_admin_key(self.config):
            return url
        return f"{url}#key={quote(self.plan.admin_key, safe='')}"

    @property
    def members(self) -> list[SupervisedProgram]:
        """Every program with its phase, the router last."""
        return self._supervisor.members

    def name_of(self, url: str) -> str:
        """Return the name of the instance with this URL (`short-0`), or the URL where it is unknown."""
        return next((m.program.name for m in self.members if m.program.url == url), url)

    def __enter__(self) -> Cluster:
        model = prepare_model(self.config)
        self._lock = lock_folder(self.folder)
        try:
            self.plan = plan_cluster(self.config, model)
            if self.plan.pool_key_file is not None:
                write_pool_key(self.plan.pool_key_file)
            check_arguments(self.config, self.plan)
            self._supervisor = _supervisor(self.config, self.plan, self.folder, self._changed, self._is_cancelled)
        except BaseException:
            self._lock.close()
            raise
        try:
            is_checked = not self._checks_engines or _check_engines(
                self.config, self.plan, self._supervisor, self._refresh
            )
            self.is_ready = is_checked and self._supervisor.start(self._refresh)
        except BaseException:
            self._display.started()
            self._stop()
            raise
        self._display.started()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def stop_at_once_when(self, hurry: Callable[[], bool]) -> None:
        """While stopping, kill everything as soon as `hurry` returns true."""
        self._hurry = hurry

    def serve(self, is_done: Callable[[], bool]) -> None:
        """Keep the programs running until `is_done` returns true."""
        while not is_done():
            self._supervisor.tick()
            time.sleep(TICK_S)

    @contextmanager
    def kept_running(self) -> Iterator[None]:
        """During the block, keep the programs running from a thread of its own."""
        is_over = threading.Event()
        thread = threading.Thread(target=self.serve, args=(is_over.is_set,), name="cluster")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _refresh(self) -> None:
        self._display.refresh(self.members)

    def _stop(self) -> None:
        try:
            self._supervisor.stop(self._hurry)
        finally:
            remove_state(self.folder)
            self._lock.close()

    def _changed(self, member: SupervisedProgram, line: str) -> None:
        write_state(self.folder, self._state())
        self._display.changed(member, line)

    def _state(self) -> ClusterState:
        return ClusterState(
            name=self.config.name,
            pid=os.getpid(),
            url=self.plan.router.url,
            model=self.plan.model_name,
            admin_api_key=self.plan.admin_key,
            programs=tuple(
                ProgramState(
                    name=member.program.name,
                    role=str(member.program.role or member.program.name),
                    phase=str(member.phase),
                    url=member.program.url,
                    bootstrap_port=member.program.bootstrap_port,
                    pid=member.pid,
                    restarts=member.restarts,
                    log=str(member.log),
                )
                for member in self.members
            ),
        )

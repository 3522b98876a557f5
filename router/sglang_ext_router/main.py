"""`sglang-ext router`: one process or several on one port, from its options to its end; logs, and what is compiled."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import ipaddress
import json
import logging
import resource
import signal
import socket
import sqlite3
import ssl
import sys
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple

import uvloop

from sglang_ext_router.command_line import SETTINGS, add_arguments, config_from_arguments
from sglang_ext_router.compiled import describe_compiled
from sglang_ext_router.config import RouterConfig, RouterConfigError
from sglang_ext_router.group.peers import Peers
from sglang_ext_router.group.supervisor import process_place, supervise
from sglang_ext_router.http.tls import client_context, worker_context
from sglang_ext_router.instances.discovery import role_rules
from sglang_ext_router.instances.kubernetes_api import connect_kubernetes
from sglang_ext_router.observe.access_log import AccessLog
from sglang_ext_router.router import Router
from sglang_ext_router.sglang_router_options import WITHOUT_EFFECT
from sglang_ext_router.tenants.usage import open_usage_database

__all__ = ["SETTINGS", "add_arguments", "run", "serve"]
logger = logging.getLogger(__name__)
LISTEN_BACKLOG = 4096
SPARE_DESCRIPTORS = 256


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal stops it; return the exit status."""
    place = process_place()
    try:
        config = config_from_arguments(arguments)
        is_supervisor = config.processes > 1 and place is None
        sockets = listen(config, reuse_port=place is not None)
        if is_supervisor:
            sockets.close()  # an address that cannot be had was reported now, and once
        tls = client_context(config)
        link = Peers(config, _listen_for_peers(config)) if config.peer_port else None
        _check_surroundings(config)
    except RouterConfigError as error:
        print(f"sglang-ext router: {error}", file=sys.stderr)
        return 2
    set_up_logging(config.log_level, config.log_json)
    is_wrong, state = describe_compiled()
    logger.log(logging.WARNING if is_wrong else logging.INFO, state)
    if not config.workers and not config.service_discovery:
        logger.warning("no workers given: add some with POST /workers")
    if place is None:
        for option in arguments.without_effect:
            logger.warning("%s of sglang_router has no effect: %s", option, WITHOUT_EFFECT[option][1])
        _warn_of_open_ports(config)
        _raise_descriptor_limit(config.max_connections)
    if is_supervisor:
        return supervise(config, sys.argv[2:])
    if place is None:
        return _run(serve(config, sockets, tls, siblings=link))
    link = Peers(config, socket.socket(fileno=place.listener), place)
    return _run(serve(config, sockets, tls, place.number, link, ends_with_stdin=True))


def check(arguments: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Refuse what `run` refuses in this environment, and leave nothing open. Raise RouterConfigError."""
    config = config_from_arguments(arguments, environment)
    listen(config).close()
    if config.peer_port:
        _listen_for_peers(config).close()
    client_context(config)
    _check_surroundings(config)


def _check_surroundings(config: RouterConfig) -> None:
    """Raise RouterConfigError for certificates, selectors, an API server or an access log that cannot be used."""
    worker_context(config)
    if config.service_discovery or config.controller_lease:
        role_rules(config)
        connect_kubernetes(config)
    if config.access_log:
        check_access_log(config.access_log)
    if config.usage_db:
        _check_usage_database(config.usage_db)


def _run(serving: Coroutine[Any, Any, int]) -> int:
    status: int = uvloop.run(serving)
    return status


class Listening(NamedTuple):
    """The bound sockets of a router: for clients and, where they have a port of their own, reports and the page."""

    clients: socket.socket
    reports: socket.socket | None = None
    page: socket.socket | None = None

    def close(self) -> None:
        """Close them all."""
        for opened in self:
            if opened is not None:
                opened.close()


def listen(config: RouterConfig, reuse_port: bool = False) -> Listening:
    """The sockets; RouterConfigError if one cannot be had."""
    listening = Listening(_listen(config.host, config.port, "", reuse_port))
    try:
        if config.metrics_port:
            reports = _listen(config.metrics_host, config.metrics_port, "metrics-", reuse_port)
            listening = listening._replace(reports=reports)
        if config.ui_port:
            listening = listening._replace(page=_listen(config.ui_host, config.ui_port, "ui-", reuse_port))
    except RouterConfigError:
        listening.close()
        raise
    return listening


def _listen_for_peers(config: RouterConfig) -> socket.socket:
    return _listen(config.peer_host, config.peer_port, "peer-", False)


def _listen(host: str, port: int, prefix: str, reuse_port: bool) -> socket.socket:
    sock: socket.socket | None = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        sock.listen(LISTEN_BACKLOG)
        sock.setblocking(False)
    except (OSError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        remedy = (
            f"; choose another --{prefix}port" if isinstance(error, OSError) and error.errno == errno.EADDRINUSE else ""
        )
        raise RouterConfigError(f"--{prefix}host {host} --{prefix}port {port}: {reason}{remedy}") from None
    return sock


def check_access_log(target: str) -> None:
    """RouterConfigError if the access log cannot be opened."""
    try:
        AccessLog(target).close()
    except OSError as error:
        raise RouterConfigError(f"--access-log {target}: {error.strerror or error}") from None


def _check_usage_database(path: str) -> None:
    try:
        open_usage_database(path).close()
    except sqlite3.Error as error:
        raise RouterConfigError(f"--usage-db {path}: {error}") from None


def _warn_of_open_ports(config: RouterConfig) -> None:
    if not config.needs_client_key and not _is_loopback(config.host):
        logger.warning(
            "anyone who reaches %s may send requests: set --api-key, --api-keys-file or --tenants-file", config.host
        )
    if config.metrics_port and not _is_loopback(config.metrics_host):
        logger.warning("anyone who reaches %s may read the metrics: no key is asked for there", config.metrics_host)
    if config.ui_port and not config.admin_api_key and not config.needs_client_key and not _is_loopback(config.ui_host):
        logger.warning("anyone who reaches %s may look at the live page: set --admin-api-key", config.ui_host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _raise_descriptor_limit(connections: int) -> None:
    """Raise the descriptor limit of this process and its children to the connections of clients and to instances."""
    wanted = 3 * connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < connections + SPARE_DESCRIPTORS:
        logger.warning("%d file descriptors are fewer than limits.max_connections %d needs", most, connections)


async def serve(
    config: RouterConfig,
    sockets: Listening,
    tls: ssl.SSLContext | None = None,
    process_index: int = 0,
    siblings: Peers | None = None,
    ends_with_stdin: bool = False,
) -> int:
    """Serve on listening sockets (see `listen`) until SIGTERM or SIGINT, or the end of standard input, then drain."""
    loop = asyncio.get_running_loop()
    router = Router(config, loop, process_index, siblings)
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    if router.access_log is not None:
        loop.add_signal_handler(signal.SIGHUP, router.access_log.reopen)
    if ends_with_stdin:
        loop.add_reader(sys.stdin.fileno(), stop.set)
    router.control_plane()  # built before the first client connects
    await router.start()
    server = await router.ports.listen(router.connection, sockets.clients, LISTEN_BACKLOG, tls)
    if sockets.reports is not None:
        await router.ports.listen(router.report_connection, sockets.reports, LISTEN_BACKLOG)
    if sockets.page is not None:
        await router.ports.listen(router.page_connection, sockets.page, LISTEN_BACKLOG, tls)
    # What lives until the end is not looked at again by the collector, and it runs less often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    host, port = sockets.clients.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    logger.info("listening on %s://%s:%d with %d workers", scheme, host, port, len(router.registry))
    await stop.wait()
    if ends_with_stdin:
        loop.remove_reader(sys.stdin.fileno())
    router.announce_end()
    if config.drain_delay_secs:
        logger.info("stopping in %g s: requests are still taken", config.drain_delay_secs)
        stop.clear()  # another signal ends the delay
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), config.drain_delay_secs)
    logger.info("stopping: %d requests run, %d wait", router.requests_in_flight, router.requests_queued)
    server.close()
    await router.drain(config.shutdown_grace_period_secs)
    await router.stop()
    return 0


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def set_up_logging(level: str, as_json: bool) -> None:
    """Configure the root logger; third parties stay at warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for package in ("sglang_ext", "sglang_ext_router"):
        logging.getLogger(package).setLevel(level.upper())

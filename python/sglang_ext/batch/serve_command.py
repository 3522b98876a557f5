"""`sglang-ext batch serve`: OpenAI's files and batches as a service in front of an endpoint."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from sglang_ext.batch.database import StoreError
from sglang_ext.batch.endpoint import EndpointClient
from sglang_ext.batch.object_storage import StorageError, place_of
from sglang_ext.batch.runner import JobRunner
from sglang_ext.batch.sending_options import (
    API_KEY_VARIABLE,
    RunError,
    add_sending_arguments,
    rate_limit,
    runner_settings,
)
from sglang_ext.batch.service.api import build_app
from sglang_ext.batch.service.batch_service import BatchService, ServiceLimits
from sglang_ext.batch.service.client_keys import ClientKeys
from sglang_ext.batch.service.dispatcher import Dispatcher
from sglang_ext.batch.service.file_bytes import FileBytes, open_bytes
from sglang_ext.batch.store import BatchStore
from sglang_ext.key_hashes import ApiKeyFileError
from sglang_ext.tenants_file import TenantKeys

logger = logging.getLogger(__name__)
ENDPOINT_KEY_VARIABLE = "SGLANG_EXT_ENDPOINT_API_KEY"
GRACE_S = 5
OK, USAGE = 0, 2


class ServeError(Exception):
    """The service cannot start; one line says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sglang-ext batch serve` to `parser`."""
    add = parser.add_argument
    add("--endpoint", required=True, metavar="URL", help="URL of the router, or of any OpenAI-compatible server")
    add(
        "--store",
        required=True,
        metavar="DIR|URL",
        help="folder for uploaded files, requests and results; or postgresql://... , which several services may share",
    )
    add(
        "--files",
        metavar="DIR|URL",
        help="folder of the files, or s3://BUCKET/FOLDER; shared as the store is (default: STORE/files)",
    )
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on")
    add("--port", type=int, default=30100, metavar="N", help="port to listen on")
    add(
        "--api-key",
        default="",
        metavar="KEY",
        help=f"key that clients must send as a bearer token (default: {API_KEY_VARIABLE})",
    )
    add(
        "--tenants-file",
        default="",
        metavar="FILE",
        help="the router's YAML file of tenants: clients have a tenant's key, and see its files and batches",
    )
    add(
        "--endpoint-api-key",
        default="",
        metavar="KEY",
        help=f"API key of the endpoint (default: {ENDPOINT_KEY_VARIABLE}, then --api-key)",
    )
    add("--model", metavar="NAME", help="model of lines that name none")
    add("--max-lines", type=int, default=50_000, metavar="N", help="largest number of requests in a batch")
    add("--max-file-mb", type=int, default=200, metavar="N", help="largest size of an uploaded file, in MiB")
    add_sending_arguments(parser)
    add(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="lowest level that is logged"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops it, and return the exit status."""
    try:
        _check(args)
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
        logging.getLogger("sglang_ext").setLevel(args.log_level.upper())
        status: int = uvloop.run(_serve(args))
    except (RunError, ServeError, StoreError, StorageError) as error:
        print(f"sglang-ext batch serve: {error}", file=sys.stderr)
        return USAGE
    return status


def _check(args: argparse.Namespace) -> None:
    for name in ("max_lines", "max_file_mb"):
        if getattr(args, name) < 1:
            raise ServeError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not 0 <= args.port < 65536:
        raise ServeError(f"--port must be from 0 to 65535, got {args.port}")
    for name, variable in (("api_key", API_KEY_VARIABLE), ("endpoint_api_key", ENDPOINT_KEY_VARIABLE)):
        # Other users of the machine can read a command line.
        if not getattr(args, name):
            setattr(args, name, os.environ.get(variable, "").strip())
        if any(c.isspace() or not c.isprintable() for c in getattr(args, name)):
            raise ServeError(f"--{name.replace('_', '-')} must be printable, without blanks")
    if _is_shared(args.store):
        if args.files is None:
            place = "s3://BUCKET/FOLDER, or a folder that every service on this store has"
            raise ServeError(f"--files is needed with PostgreSQL: {place}")
        if args.store_limit_mib is not None:
            raise ServeError("--store-limit-mib is for a folder; PostgreSQL has limits of its own")
        return
    args.files = args.files or str(Path(args.store, "files"))
    try:
        Path(args.store).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServeError(f"--store {args.store}: {error.strerror}") from None


def _is_shared(store: str) -> bool:
    return store.startswith(("postgresql://", "postgres://"))


def _open_store(store: str, limit_bytes: int | None) -> BatchStore:
    if _is_shared(store):
        return BatchStore.open_shared(store)
    # SQLite sorts on disk; its temporary files go where the store is.
    os.environ.setdefault("SQLITE_TMPDIR", str(Path(store).absolute()))
    return BatchStore.open(Path(store, "batches.sqlite"), limit_bytes)


def _open_files(place: str) -> FileBytes:
    try:
        return open_bytes(place_of(place))
    except OSError as error:
        raise ServeError(f"--files {place}: {error.strerror}") from None
    except StorageError as error:
        raise ServeError(f"--files: {error}") from None


def _client_keys(args: argparse.Namespace) -> ClientKeys:
    try:
        return ClientKeys(args.api_key, TenantKeys(args.tenants_file) if args.tenants_file else None)
    except ApiKeyFileError as error:
        raise ServeError(f"--tenants-file: {error}") from None


def _listen(host: str, port: int) -> socket.socket:
    sock: socket.socket | None = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ServeError(f"--host {host} --port {port}: {reason}") from None
    return sock


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`: uvicorn would raise them again when it has ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(args: argparse.Namespace) -> int:
    try:
        client = EndpointClient(args.endpoint, api_key=args.endpoint_api_key or args.api_key or None)
    except ValueError as error:
        raise ServeError(f"--endpoint: {error}") from None
    settings = runner_settings(args)
    requests_limit = rate_limit("--limit-requests-per-s", args.limit_requests_per_s)
    tokens_limit = rate_limit("--limit-tokens-per-s", args.limit_tokens_per_s)
    keys = _client_keys(args)
    limit_mib = args.store_limit_mib
    sock = _listen(args.host, args.port)
    limit_bytes = None if limit_mib is None else int(limit_mib * (1 << 20))
    with sock, _open_store(args.store, limit_bytes) as store:
        async with client:
            dispatcher = Dispatcher(
                lambda: JobRunner(
                    store,
                    client,
                    settings,
                    requests_limit=requests_limit,
                    tokens_limit=tokens_limit,
                    limits_of=keys.limits_of,
                    on_note=logger.warning,
                )
            )
            limits = ServiceLimits(args.max_lines, args.model)
            service = BatchService(store, dispatcher, _open_files(args.files), limits, limits_of=keys.limits_of)
            app = build_app(service, keys, args.max_file_mb << 20)
            server = _Server(
                uvicorn.Config(
                    app,
                    http="httptools",  # reads on behind an early answer: the client sees it, and not a lost connection
                    log_config=None,
                    access_log=False,
                    lifespan="off",
                    server_header=False,
                    timeout_graceful_shutdown=GRACE_S,
                )
            )
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
            await service.start()
            try:
                host, port = sock.getsockname()[:2]
                logger.info("listening on http://%s:%d, in front of %s", host, port, client.url)
                await server.serve([sock])
            finally:
                await service.stop()
    return OK

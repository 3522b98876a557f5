"""`sglang-ext coordinator`: options, event loop, signals."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import signal
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from sglang_ext import settings
from sglang_ext.costs.engine_profile import ProfileError, load_profile
from sglang_ext.long_pool.coordinator.coordinator_server import CoordinatorServer, ListenError, make_app
from sglang_ext.long_pool.coordinator.pool_cost import (
    PoolCosts,
    UnknownCostError,
    prior_candidates,
    profiled_candidates,
)
from sglang_ext.long_pool.coordinator.pool_protocol import PoolProtocol
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.decide.price_planner import IS_NATIVE
from sglang_ext.long_pool.decide.sharding import Interleaving
from sglang_ext.long_pool.decide.sp_cost import SpCandidate
from sglang_ext.settings import Setting, SettingsError
from sglang_ext.shared_key import KeyFileError, read_key_file

logger = logging.getLogger(__name__)

_STREAMED, _COLLECTED = "streamed", "collected"
_GATHERED, _SPREAD = "gathered", "spread"
_LEAST_TIMEOUT_MS = 100.0


class OptionError(ValueError):
    """An option makes no sense; the text is one line that names it."""


class CoordinatorOptions(NamedTuple):
    """The options, checked."""

    host: str
    port: int
    http_port: int
    key: bytes
    candidates: tuple[SpCandidate, ...]
    is_prior: bool  # there is no profile
    settings: PoolSettings


_DEFAULT = PoolSettings()
_POOL = partial(Setting, "pool")
SETTINGS = (
    _POOL(
        "interleaving",
        str,
        str(_DEFAULT.interleaving),
        "how the tokens of a chunk are dealt out",
        tuple(str(kind) for kind in Interleaving),
    ),
    _POOL(
        "ending",
        str,
        _STREAMED,
        "what follows the last chunk of a prompt whose KV members have sent straight to decode: its first token, "
        "without its KV at its own instance; or that KV is collected there first, and kept in its prefix cache, which "
        "takes the time and the memory for it",
        (_STREAMED, _COLLECTED),
    ),
    _POOL(
        "kept_rows",
        str,
        _GATHERED,
        "what becomes of KV that several instances keep of a prompt: one of them gets all of it before the next turn "
        "comes; or it stays where it was computed, and each next turn decides",
        (_GATHERED, _SPREAD),
    ),
    _POOL(
        "cross_node_factor",
        float,
        _DEFAULT.cross_node_factor,
        "how many times as long a group takes over more nodes than it needs; inf: no such groups",
    ),
    _POOL(
        "max_chunk_ms",
        float,
        None,
        "longest time of a chunk, as predicted, for which other work of its instances waits (default: what the short "
        "prompts that arrive allow); a chunk takes at least four times what every chunk costs again",
    ),
    _POOL(
        "step_timeout_ms",
        float,
        1000 * _DEFAULT.step_timeout_s,
        "the members' cdsp.step_timeout_s; a member that has not answered twice as long after a failure is lost",
    ),
    _POOL(
        "member_timeout_ms",
        float,
        1000 * _DEFAULT.member_timeout_s,
        "a member that sends nothing for this long is lost, as is one whose engine does nothing for this long and "
        "twice the time of what others wait for there",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sglang-ext coordinator`."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on, for members and for HTTP")
    add("--port", type=int, default=8990, help="port for members; 0: any free one")
    add("--http-port", type=int, default=8991, help="port of /status, /metrics and /health; 0: any free one")
    add(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="a key that every member must know (its --cdsp-key-file), at least 16 bytes (default: none, any "
        "process that reaches the port may join)",
    )
    add("--sp-sizes", default="1,2,4", metavar="N,N", help="how many instances may compute a chunk together")
    add("--profile", type=Path, metavar="FILE", help="costs, as `sglang-ext profile` writes them")
    add(
        "--ttft-slo-ms",
        type=float,
        metavar="MS",
        default=1e3 * _DEFAULT.ttft_slo_s,
        help="TTFT objective of a prompt that a router announces without one of its own (default: %(default)g), or",
    )
    add(
        "--slo-stretch",
        type=float,
        metavar="F",
        default=_DEFAULT.slo_stretch,
        help="this many times its time on an idle pool if that is more (default: %(default)g)",
    )
    add(
        "--min-chunk-tokens",
        type=int,
        metavar="N",
        default=_DEFAULT.min_chunk_tokens,
        help="shortest chunk of a plan with several",
    )
    settings.add_arguments(parser, SETTINGS)
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info", help="least severe message")


def options_from(arguments: argparse.Namespace) -> CoordinatorOptions:
    """Check the options and settings. OptionError."""
    try:
        arguments = settings.with_settings(arguments, SETTINGS, arguments.config)
    except SettingsError as error:
        raise OptionError(str(error)) from None
    for name in ("port", "http_port"):
        if not 0 <= getattr(arguments, name) < 65536:
            raise OptionError(f"--{name.replace('_', '-')} must be a port, got {getattr(arguments, name)}")
    if not arguments.cross_node_factor >= 1:
        raise OptionError(f"pool.cross_node_factor must be at least 1, got {arguments.cross_node_factor}")
    if arguments.min_chunk_tokens < 1:
        raise OptionError(f"--min-chunk-tokens must be at least 1, got {arguments.min_chunk_tokens}")
    if not 1 <= arguments.slo_stretch < math.inf:
        raise OptionError(f"--slo-stretch must be a number of at least 1, got {arguments.slo_stretch}")
    pool = PoolSettings(
        Interleaving(arguments.interleaving),
        arguments.min_chunk_tokens,
        arguments.cross_node_factor,
        _seconds("pool.step_timeout_ms", arguments.step_timeout_ms, _LEAST_TIMEOUT_MS),
        _seconds("pool.member_timeout_ms", arguments.member_timeout_ms, _LEAST_TIMEOUT_MS),
        arguments.ending == _COLLECTED,
        None if arguments.max_chunk_ms is None else _seconds("pool.max_chunk_ms", arguments.max_chunk_ms, 1.0),
        ttft_slo_s=_seconds("--ttft-slo-ms", arguments.ttft_slo_ms, 1.0),
        slo_stretch=arguments.slo_stretch,
        gathers_rows=arguments.kept_rows == _GATHERED,
    )
    return CoordinatorOptions(
        arguments.host,
        arguments.port,
        arguments.http_port,
        _key(arguments.key_file),
        _candidates(_sizes(arguments.sp_sizes), arguments.profile),
        arguments.profile is None,
        pool,
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal to stop; the exit status."""
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    try:
        asyncio.run(serve(options_from(arguments)))
    except (OptionError, ListenError) as error:
        print(f"sglang-ext coordinator: {error}", file=sys.stderr)
        return 2
    return 0


async def serve(options: CoordinatorOptions) -> None:
    """Serve until SIGTERM or SIGINT. ListenError."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    protocol = PoolProtocol(options.settings, PoolCosts(options.candidates, is_prior=options.is_prior))
    server = CoordinatorServer(protocol, options.settings.member_timeout_s, options.key)
    port = await server.listen(options.host, options.port)
    runner = web.AppRunner(make_app(protocol, server.status, server.desk), handler_cancellation=True)
    await runner.setup()
    try:
        http_port = await _serve_http(runner, options.host, options.http_port)
        logger.info(
            "cdsp: coordinator of a long pool on %s:%d, http://%s:%d/status; it plans in %s",
            *(options.host, port, options.host, http_port, "C++" if IS_NATIVE else "Python"),
        )
        # A coordinator in which something has gone wrong must not look alive: its members go on by themselves without
        # it.
        ticking = asyncio.create_task(server.run())
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait({ticking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        ticking.cancel()
    finally:
        await server.close()
        await runner.cleanup()


async def _serve_http(runner: web.AppRunner, host: str, port: int) -> int:
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except (OSError, UnicodeError) as error:
        raise ListenError(f"--host {host} --http-port {port}", error) from None
    return int(runner.addresses[0][1])


def _key(path: Path | None) -> bytes:
    try:
        return read_key_file(path)
    except KeyFileError as error:
        raise OptionError(f"--key-file {error}") from None


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise OptionError(f"--sp-sizes must be numbers with commas between them, got {text!r}") from None
    if sizes[0] < 1:
        raise OptionError(f"--sp-sizes must be at least 1, got {text!r}")
    return tuple(sizes)


def _candidates(sizes: tuple[int, ...], profile: Path | None) -> tuple[SpCandidate, ...]:
    if profile is None:
        return prior_candidates(sizes)
    try:
        return profiled_candidates(load_profile(profile), sizes)
    except ProfileError as error:
        raise OptionError(f"--profile {error}") from None
    except UnknownCostError as error:
        raise OptionError(f"--profile {profile}: {error}") from None


def _seconds(option: str, value_ms: float, min_ms: float) -> float:
    if not (math.isfinite(value_ms) and value_ms >= min_ms):
        raise OptionError(f"{option} must be at least {min_ms:g}, got {value_ms:g}")
    return value_ms / 1000

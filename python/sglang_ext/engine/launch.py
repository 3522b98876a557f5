"""`python -m sglang_ext.engine.launch FLAGS`: `sglang.launch_server` with this project's extensions.

This module is the `__main__` of the engine on purpose. SGLang spawns its processes with multiprocessing, which
runs the top level of the main module in each child before anything else; so the CPU platform is in place
there before SGLang is imported, and each child is bound to its parent's life.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from sglang_ext.engine.process_lifetime import join_process_tree
from sglang_ext.types import Role

MIN_EVENT_PAGE_TOKENS = 16

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_ext.engine.options import ExtensionOptions

if __name__ in {"__main__", "__mp_main__"}:
    join_process_tree(os.environ, is_child=__name__ == "__mp_main__")

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from sglang_ext import cpu

    cpu.install()


def main(argv: Sequence[str], *, has_imports: bool = False) -> int:
    """Serve until the server ends. Returns the exit status of the process.

    `has_imports`: this process was forked from a process that has SGLang imported. Behind the word `--check` the
    arguments are checked, and nothing is started.
    """
    _end_when_asked()
    from sglang_ext.engine.launch_plan import CHECK_FLAG, START_METHOD_VARIABLE, StartMethod
    from sglang_ext.engine.options import InvalidOptionsError, options_from_environment
    from sglang_ext.engine.verification import HookNotInForceError, verify_hooks

    try:
        options = options_from_environment(os.environ)
        if options is None:
            return _refuse("start this engine with `sglang-ext worker`, which sets its options")
    except InvalidOptionsError as error:
        return _refuse(str(error))
    is_check = list(argv[:1]) == [CHECK_FLAG]
    can_fork = os.environ.get(START_METHOD_VARIABLE) == StartMethod.FORK and not is_check
    if can_fork:
        from sglang_ext.engine import preload

        if not has_imports:
            try:
                preload.preload()
            except preload.CannotForkError as error:
                print(f"sglang-ext: processes are spawned: {error}", file=sys.stderr)
                can_fork = False

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from sglang_ext.command_parser import one_line_errors

    load_plugins()
    try:
        verify_hooks()
    except HookNotInForceError as error:
        return _refuse(str(error))
    try:
        with one_line_errors("sglang-ext worker"):
            server_args = prepare_server_args(list(argv[is_check:]))
    except Exception as error:
        if not is_check:
            raise
        return _refuse(f"SGLang: {' '.join(str(error).split()) or type(error).__name__}")
    problem = _conflict(server_args, options)
    if problem is not None:
        return _refuse(problem)
    if is_check:
        return 0
    _reserve_rendezvous(server_args)
    _publish_events(server_args, options)
    from sglang.srt.entrypoints.http_server import app

    from sglang_ext.engine.hooks.shutdown import ShutdownMiddleware

    app.add_middleware(ShutdownMiddleware)
    if options.laps is not None:
        from sglang_ext.laps.sglang.status import add_routes

        add_routes(app)
    if can_fork:
        reason = preload.spawn_reason(server_args)
        if reason is None:
            preload.fork_instead_of_spawn()
        else:
            print(f"sglang-ext: processes are spawned: {reason}", file=sys.stderr)
            can_fork = False
    os.environ[START_METHOD_VARIABLE] = StartMethod.FORK if can_fork else StartMethod.SPAWN
    if can_fork:
        from sglang_ext.engine.hooks import shared_tokenizer

        shared_tokenizer.load(server_args)
    try:
        run_server(server_args)
    except OSError as error:
        if "huggingface.co" not in str(error):
            raise
        problem = f"SGLang: {' '.join(str(error).split())}"  # no such model, or no way to it
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0 if problem is None else _refuse(problem)


def _conflict(server_args: ServerArgs, options: ExtensionOptions) -> str | None:
    """Return which of SGLang's arguments, a file's included, goes with none of this project's options, and why."""
    from sglang.srt.environ import envs

    from sglang_ext.cpu.unserved_models import argument_conflict as cpu_conflict
    from sglang_ext.laps.sglang.laps_options import conflict as laps_conflict
    from sglang_ext.long_pool.sglang.cdsp_options import conflict as pool_conflict
    from sglang_ext.transfer.sglang.transfer_options import conflict as transfer_conflict

    problem = None
    if options.transfer is not None:
        problem = transfer_conflict(server_args, has_staging_buffer=envs.SGLANG_DISAGG_STAGING_BUFFER.get())
    if problem is None and options.laps is not None:
        problem = laps_conflict(server_args)
        if problem is None and options.cdsp is not None:
            problem = pool_conflict(server_args)
    return problem or cpu_conflict(server_args)


def _reserve_rendezvous(server_args: ServerArgs) -> None:
    """Give the ranks a port for their rendezvous that no other process here draws before they bind it, in seconds.

    SGLang draws a port that is free now: of several instances that start together one may find it taken. Ranks on
    several machines meet at the address that they were given, and each data-parallel replica at a port of its own,
    which SGLang draws and holds.
    """
    from sglang_ext.ports import pick_free_ports

    is_replicated = server_args.dp_size > 1 and not server_args.enable_dp_attention
    if server_args.nccl_port is None and server_args.dist_init_addr is None and not is_replicated:
        (server_args.nccl_port,) = pick_free_ports("0.0.0.0", 1, draw=random.SystemRandom())


def _publish_events(server_args: ServerArgs, options: ExtensionOptions) -> None:
    """Have the engine publish its load, and the events of its prefix cache unless pages are small.

    With small pages every token would be a block of its own, which the engine hashes and every router follows. A decode
    instance has a prefix cache only where it is asked for. SGLang's own arguments win.
    """
    from sglang_ext.ports import pick_port_ranges

    asked = options.kv_events
    if asked is None:
        return
    try:
        address = ipaddress.ip_address(socket.gethostbyname(asked.host))
    except (OSError, ValueError):  # ZeroMQ's sockets here are of IPv4
        print(f"sglang-ext: no KV events and no load: --host {asked.host} has no IPv4 address", file=sys.stderr)
        return
    host = "*" if address.is_unspecified else str(address)
    ranks = max(1, server_args.dp_size)
    free = iter(pick_port_ranges(str(address), 3, ranks, draw=random.SystemRandom()))
    has_prefixes = asked.has_blocks and not server_args.disable_radix_cache
    if options.role is Role.DECODE:
        has_prefixes &= server_args.disaggregation_decode_enable_radix_cache
    if has_prefixes and not server_args.kv_events_config and (server_args.page_size or 1) >= MIN_EVENT_PAGE_TOKENS:
        config = {
            "publisher": "zmq",
            "endpoint": f"tcp://{host}:{asked.port or next(free)}",
            "replay_endpoint": f"tcp://{host}:{asked.replay_port or next(free)}",
            "bind": True,  # a publisher would connect to an address that is no wildcard
        }
        server_args.kv_events_config = json.dumps(config)
    load = replace(asked, host=host, load_port=0)
    if server_args.load_publish_endpoint is None and (asked.load_port or not asked.port):  # else it may be shut off
        load = replace(load, load_port=asked.load_port or next(free))
    os.environ.update(replace(options, kv_events=load).to_environment())


def _end_when_asked() -> None:
    """End at SIGTERM while the model loads; SGLang takes the signal over once it serves.

    The first process of a container has no default for it: without a handler the container would be killed at the end
    of its grace period.
    """
    owner = os.getpid()

    def end(number: int, _: FrameType | None) -> None:
        if os.getpid() != owner:  # a process that was forked from this one
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        try:
            # It may be half imported now. Before it is there are no children, and each ends with its parent anyway.
            kill_tree = getattr(sys.modules.get("sglang.srt.utils"), "kill_process_tree", None)
            if kill_tree is not None:
                kill_tree(owner, include_parent=False)
        finally:
            os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _refuse(reason: str) -> int:
    print(f"sglang-ext: {reason}", file=sys.stderr)
    return 3


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fork-server"]:
        from sglang_ext.engine import fork_server

        sys.exit(fork_server.run(int(sys.argv[2]), lambda flags: main(flags, has_imports=True)))
    sys.exit(main(sys.argv[1:]))

"""A process with an engine's imports that starts engines on request, by forking.

Its client (`sglang_ext.cluster.fork_client`) holds the other end of the socket that it serves; it ends with that.
A request is one packet, a JSON object, with the descriptors for stdin, stdout and stderr:

    {"arguments": [of `sglang-ext worker`], "environment": {…}, "folder": "…", "cores": [0, 1], "client": PID}

The answer is {"pid": N} or {"error": "…"}. An engine is forked twice and so becomes a child of the client, which
has asked the kernel for that (PR_SET_CHILD_SUBREAPER): the client waits for it and signals it as if it had started
it itself, the kernel sends it SIGTERM when the client ends, and the end of this process touches no engine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from sglang_ext.command_parser import CommandParser
from sglang_ext.engine import worker
from sglang_ext.engine.launch_plan import FLAGS_START, LaunchCommand
from sglang_ext.engine.preload import Imports, become_engine, preload
from sglang_ext.engine.process_lifetime import end_with_parent

MAX_REQUEST_BYTES = 1 << 18
ADOPTION_TIMEOUT_S = 5.0  # less than the client waits
Serve = Callable[[list[str]], int]


def run(descriptor: int, serve: Serve) -> int:
    """Serve the socket with this descriptor until its other end closes; `serve` runs an engine with its flags.

    Returns 0 in the fork server itself and the engine's exit status in an engine.
    """
    from setproctitle import setproctitle

    setproctitle("sglang-ext::fork_server")  # called first now: later it could not find where the title is kept
    connection = socket.socket(fileno=descriptor)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its client
    imports = preload()
    sys.stdout.flush()  # what is buffered here would be written by every engine
    connection.send(b"{}")
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
        if not data:
            return 0
        request = json.loads(data)
        middle = os.fork()
        if middle == 0:
            try:
                engine = os.fork()
            except OSError as error:
                connection.send(json.dumps({"error": f"cannot fork: {error}"}).encode())
                os._exit(1)
            if engine:
                os._exit(0)
            return _engine(request, descriptors, connection, imports, serve)
        for received in descriptors:
            os.close(received)
        os.waitpid(middle, 0)


def _engine(
    request: Mapping[str, Any], descriptors: list[int], connection: socket.socket, imports: Imports, serve: Serve
) -> int:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not _wait_for_adoption(request["client"]):
        connection.send(b'{"error": "the kernel did not make the engine a child of the client"}')
        os._exit(1)
    end_with_parent(request["client"], signal.SIGTERM)
    connection.send(json.dumps({"pid": os.getpid()}).encode())
    connection.close()
    for target, received in enumerate(descriptors):
        os.dup2(received, target)
    for received in descriptors:
        if received > 2:
            os.close(received)
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cores"])
    os.environ.clear()
    os.environ.update(request["environment"])

    def become(command: LaunchCommand) -> int:
        from setproctitle import setproctitle

        environment = command.full_environment(os.environ)
        conflicts = imports.conflicts(environment)
        if conflicts:
            print(f"sglang-ext: imports SGLang again, for another {', '.join(conflicts)}", file=sys.stderr)
            return worker.replace_process(command)
        become_engine(environment, imports)
        sys.argv = list(command.argv[2:])
        setproctitle(" ".join(command.argv))
        return serve(list(command.argv[FLAGS_START:]))

    parser = CommandParser(prog="sglang-ext worker")
    worker.add_arguments(parser)
    return worker.run(parser.parse_args(request["arguments"]), become, parent_pid=request["client"])


def _wait_for_adoption(client: int) -> bool:
    """Return whether `client` becomes the parent, which it is as soon as the process between has ended."""
    deadline_s = time.monotonic() + ADOPTION_TIMEOUT_S
    while os.getppid() != client:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.001)
    return True

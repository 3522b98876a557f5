"""`sglang-ext worker`: one SGLang instance with a role in the cluster."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_ext import settings
from sglang_ext.command_parser import USAGE_ERROR, any_of
from sglang_ext.cpu import unserved_models
from sglang_ext.cpu.models import smollm2
from sglang_ext.engine.device import Device, MachineFacts, inspect_machine
from sglang_ext.engine.launch_plan import (
    PIPELINE_PARALLEL_FLAGS,
    LaunchCommand,
    StartMethod,
    WorkerOptions,
    build_launch,
    decode_context_model_problem,
    size_of,
)
from sglang_ext.engine.model_facts import has_tied_embeddings, read_architecture, read_model_facts
from sglang_ext.engine.options import KvEventsOptions
from sglang_ext.engine.process_lifetime import end_with_parent
from sglang_ext.engine.versions import OLDEST_SGLANG, SUPPORTED_SGLANG, installed_sglang
from sglang_ext.graphs.sglang import graph_options
from sglang_ext.laps.sglang import laps_options
from sglang_ext.laps.sglang.pipeline_stages import tied_head_problem
from sglang_ext.long_pool.sglang import cdsp_options
from sglang_ext.long_pool.sglang.cdsp_options import MeshKind, architecture_conflict
from sglang_ext.transfer.sglang import transfer_options
from sglang_ext.transfer.sglang.transfer_backend import BACKENDS, default_backend, unavailability
from sglang_ext.types import Role

SETTINGS = (*laps_options.SETTINGS, *graph_options.SETTINGS, *cdsp_options.SETTINGS, *transfer_options.SETTINGS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sglang-ext worker`."""
    parser.add_argument(
        "--role", type=any_of(Role), choices=list(Role), required=True, help="what this instance serves"
    )
    parser.add_argument(
        "--model-path", required=True, help="local folder or Hugging Face name of the model; smollm2: a small one"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=_port, default=30000, help="HTTP port")
    parser.add_argument(
        "--bootstrap-port", type=_port, default=8998, help="port where decode instances find this prefill instance"
    )
    parser.add_argument(
        "--advertise-host",
        default=None,
        help="address that other instances reach this one at; needed where --host is a wildcard and the "
        "machine has several addresses",
    )
    parser.add_argument(
        "--revision",
        default="",
        help="name of what is rolled out: routers pair only prefill and decode instances of one revision "
        "(SGLang's option of this name goes after --)",
    )
    parser.add_argument(
        "--kv-events",
        choices=["auto", "off"],
        default="auto",
        help="publish which KV blocks the prefix cache holds, where a page has 16 tokens or more, and the instance's "
        "load, for routers; off: neither. Events of blocks carry the token ids of prompts, unencrypted, to every "
        "client that can connect",
    )
    parser.add_argument(
        "--kv-events-port", type=_port, default=None, help="port where they are published (default: a free one)"
    )
    parser.add_argument(
        "--kv-events-replay-port",
        type=_port,
        default=None,
        help="port where the last 10,000 batches of them are sent again (default: a free one)",
    )
    parser.add_argument(
        "--load-events-port",
        type=_port,
        default=None,
        help="port where the instance's load is published, which routers ask for otherwise (default: a free one; none "
        "where --kv-events-port is given)",
    )
    parser.add_argument("--device", choices=["auto", *Device], default="auto", help="what to run on")
    parser.add_argument(
        "--transfer-backend",
        choices=["auto", *BACKENDS],
        default="auto",
        help="how KV cache travels from prefill to decode",
    )
    parser.add_argument(
        "--threads",
        type=_positive,
        default=None,
        help="cores of a CPU engine, per rank (tensor-parallel ranks times pipeline stages; default: half of the "
        "cores, divided by the ranks)",
    )
    parser.add_argument(
        "--kv-memory-mib", type=_positive, default=512, help="memory for the KV cache of a CPU engine, in MiB"
    )
    parser.add_argument(
        "--exit-with-parent",
        action="store_true",
        help="end this instance when the process that started it ends, however that happens (Linux)",
    )
    parser.add_argument(
        "--start-method",
        choices=["auto", *StartMethod],
        default="auto",
        help="how the processes of the engine start: forked from a process that has imported SGLang, or spawned, each "
        "with imports of its own; auto: fork on a CPU",
    )
    laps_options.add_laps_arguments(parser)
    graph_options.add_graph_arguments(parser)
    cdsp_options.add_cdsp_arguments(parser)
    transfer_options.add_transfer_arguments(parser)
    settings.add_arguments(parser, SETTINGS, file=None)
    parser.add_argument("--dry-run", action="store_true", help="print the command instead of running it")
    parser.add_argument(
        "--check",
        action="store_true",
        help="import SGLang, check all options and SGLang's arguments as a start does, and end: 0, or a line that says "
        "what is refused, and 2 or 3",
    )
    parser.add_argument(
        "engine_arguments",
        nargs="*",
        metavar="-- SGLANG ARGUMENTS",
        help="everything after -- goes to sglang.launch_server and wins over what is chosen here",
    )


def replace_process(command: LaunchCommand) -> int:
    """Replace this process by the command, so that signals reach SGLang directly. Does not return."""
    sys.stdout.flush()
    os.execve(command.argv[0], list(command.argv), command.full_environment(os.environ))


def run(
    arguments: argparse.Namespace,
    become: Callable[[LaunchCommand], int] = replace_process,
    parent_pid: int | None = None,
) -> int:
    """Become the engine, by `become`. Returns what that returns, 2 for wrong usage, 0 for --dry-run.

    `parent_pid` is the process that --exit-with-parent means; None: the present parent. Raises
    OrphanError when that has ended.
    """
    if arguments.exit_with_parent and not arguments.dry_run:
        # First of all: the parent of a process whose own has ended meanwhile is another one.
        end_with_parent(parent_pid or os.getppid(), signal.SIGTERM)
    try:
        command = launch_command(arguments)
    except ValueError as error:
        print(f"sglang-ext worker: {error}", file=sys.stderr)
        return USAGE_ERROR
    if arguments.dry_run:
        print(command)
        return 0
    return become(command.checking() if arguments.check else command)


def launch_command(arguments: argparse.Namespace) -> LaunchCommand:
    """Return the command that starts the engine. Raises ValueError: one line that says what is refused, and why.

    With --dry-run this machine may lack what the engine needs.
    """
    if arguments.model_path == smollm2.SHORT_NAME and not Path(smollm2.SHORT_NAME).exists():
        arguments = _with_small_model(arguments)
    machine = inspect_machine(None if arguments.device == "auto" else Device(arguments.device))
    arguments = settings.with_settings(arguments, SETTINGS)
    options = _worker_options(arguments, machine.device)
    problem = None if arguments.dry_run else _problem(options, machine)
    if problem is not None:
        raise ValueError(problem)
    return build_launch(options, machine, read_model_facts(options.model_path))


def _with_small_model(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with the small model's folder, made first where it is not there, and its name in the API."""
    try:
        folder = smollm2.ensure_smollm2()
    except smollm2.ModelError as error:
        raise ValueError(f"--model-path {smollm2.SHORT_NAME}: {error}") from None
    names = ("--served-model-name", smollm2.MODEL_NAME)
    given = {**vars(arguments), "model_path": str(folder), "engine_arguments": (*names, *arguments.engine_arguments)}
    return argparse.Namespace(**given)


def _worker_options(arguments: argparse.Namespace, device: Device) -> WorkerOptions:
    backend = arguments.transfer_backend
    laps, engine_arguments = laps_options.laps_options(arguments.role, arguments, arguments.engine_arguments)
    default = graph_options.default_capture(arguments.role, device, laps is not None, engine_arguments)
    graphs, engine_arguments = graph_options.graph_options(arguments.role, arguments, engine_arguments, default)
    name = f"{arguments.advertise_host or arguments.host}:{arguments.port}"
    cdsp = cdsp_options.cdsp_options(arguments, arguments.role, name, arguments.advertise_host)
    if cdsp is not None and laps is None:
        raise ValueError("--cdsp-coordinator: needs --laps-mode other than off")
    return WorkerOptions(
        role=arguments.role,
        model_path=arguments.model_path,
        model_is_local=Path(arguments.model_path).is_dir(),
        host=arguments.host,
        port=arguments.port,
        bootstrap_port=arguments.bootstrap_port,
        transfer_backend=None if backend == "auto" else backend,
        advertise_host=arguments.advertise_host,
        threads=arguments.threads,
        kv_memory_mib=arguments.kv_memory_mib,
        start_method=None if arguments.start_method == "auto" else StartMethod(arguments.start_method),
        laps=laps,
        cdsp=cdsp,
        transfer=transfer_options.transfer_options(arguments, arguments.role, device),
        graphs=graphs,
        revision=arguments.revision,
        kv_events=_kv_events(arguments, is_shared=cdsp is not None),
        engine_arguments=engine_arguments,
    )


def _kv_events(arguments: argparse.Namespace, *, is_shared: bool) -> KvEventsOptions | None:
    """Return where an instance publishes its events; the members of a long pool hold prompts together."""
    if arguments.kv_events == "off":
        return None
    ports = (arguments.kv_events_port, arguments.kv_events_replay_port, arguments.load_events_port)
    given = [port for port in ports if port]
    if len(set(given)) < len(given):
        raise ValueError(
            "--kv-events-port, --kv-events-replay-port and --load-events-port must be different: "
            + ", ".join(map(str, given))
        )
    events, replays, load = (port or 0 for port in ports)
    return KvEventsOptions(arguments.host, events, replays, load, not is_shared)


def _problem(options: WorkerOptions, machine: MachineFacts) -> str | None:
    """Return why this worker cannot start on this machine, found before SGLang's slow imports."""
    installed = installed_sglang()
    if installed is None:
        return "SGLang is not installed; `sglang-ext doctor` says how to install it"
    if installed < OLDEST_SGLANG:
        return f"SGLang {installed} is too old; install SGLang {SUPPORTED_SGLANG}"
    if options.model_path.startswith((".", "/", "~")) and not options.model_is_local:
        return f"--model-path {options.model_path}: there is no such folder"
    if options.start_method is StartMethod.FORK and machine.device is not Device.CPU:
        return f"--start-method fork: not on {machine.device}, where importing SGLang initialises the device"
    if options.cdsp is not None and options.cdsp.mesh is MeshKind.NCCL and machine.device is Device.CPU:
        return "cdsp.mesh nccl: NCCL moves memory of GPUs, and this engine has none"
    if options.cdsp is not None and options.model_is_local:
        on_gpu = machine.device is not Device.CPU
        problem = architecture_conflict(read_architecture(options.model_path), on_gpu=on_gpu)
        if problem is not None:
            return problem
    if options.model_is_local and size_of(options.engine_arguments, PIPELINE_PARALLEL_FLAGS) > 1:
        architecture = read_architecture(options.model_path)
        problem = tied_head_problem(architecture, is_tied=has_tied_embeddings(options.model_path))
        if problem is not None:
            return problem
    architecture = read_architecture(options.model_path) if options.model_is_local else None
    if machine.device is Device.CPU:
        problem = unserved_models.refusal(architecture)
        if problem is not None:
            return problem
    problem = decode_context_model_problem(options.engine_arguments, architecture)
    if problem is not None:
        return problem
    problem = unavailability(options.transfer_backend or default_backend(machine.device), machine.device)
    if problem is None:
        problem = _port_problem("--port", options.host, options.port)
    if problem is None and options.role.is_prefill:
        problem = _port_problem("--bootstrap-port", options.host, options.bootstrap_port)
    return problem


def _port_problem(option: str, host: str, port: int) -> str | None:
    """Return why nothing can listen on a port, None where it is free."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return f"--host {host} {option} {port}: {error.strerror}; choose another {option}"
    return None


def _port(text: str) -> int:
    port = int(text)
    if not 0 < port < 65536:
        raise argparse.ArgumentTypeError(f"{port} is not a port")
    return port


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number

"""`sglang-ext up`: a whole cluster from options or a YAML file, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from sglang_ext.cluster.cluster import Cluster, plan_cluster
from sglang_ext.cluster.cluster_file import load_settings, read_record
from sglang_ext.cluster.config import ClusterConfig, ConfigError
from sglang_ext.cluster.display import make_display
from sglang_ext.cluster.model import DEMONSTRATION_MODEL, prepare_model
from sglang_ext.cluster.ports import NoFreePortError
from sglang_ext.cluster.state import STATE_FILE, ClusterInUseError
from sglang_ext.cluster.supervisor import StartError
from sglang_ext.cpu.models.smollm2 import ModelError

_METAVARS = {str: "TEXT", int: "N", float: "X"}
ROLES = ("short", "long", "both", "decode")
PREFILL_ROLES = ROLES[:-1]
ROUTER_ARGS, SGLANG_ARGS = "--router-args", "--sglang-args"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sglang-ext up`; each replaces the setting of the same name in the file."""
    absent = argparse.SUPPRESS
    parser.add_argument("--config", type=Path, metavar="FILE", default=absent, help="cluster in YAML")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and start nothing")
    parser.add_argument(
        "positional_model", metavar="MODEL", nargs="?", default=absent, help="model folder or name, as --model"
    )
    parser.add_argument(
        "--model", metavar="M", default=absent, help="model folder or name; smollm2: demonstration model"
    )
    for role in ROLES:
        kind = "decode" if role == "decode" else f"prefill ({role})"
        otherwise = "; 1 where only prefill instances are given" if role == "decode" else ""
        parser.add_argument(f"--{role}", type=int, metavar="N", default=absent, help=f"{kind} instances{otherwise}")
    for role in ROLES:
        parser.add_argument(
            f"--{role}-tp",
            type=int,
            metavar="N",
            default=absent,
            help=f"tensor-parallel ranks per {role} instance",
        )
    for role in PREFILL_ROLES:
        parser.add_argument(
            f"--{role}-pp", type=int, metavar="N", default=absent, help=f"pipeline stages per {role} instance"
        )
    parser.add_argument(
        "--decode-dcp",
        type=int,
        metavar="N",
        default=absent,
        help="KV-parallel decode: ranks of a decode instance that divide a sequence's KV among them (GPUs)",
    )
    parser.add_argument(
        "--coordinator",
        action="store_true",
        default=absent,
        help="long instances share their prompts, chunk by chunk",
    )
    value_options: tuple[tuple[str, type[str] | type[int] | type[float], str], ...] = (
        ("--name", str, "name of the cluster; its folder is RUN_DIR/NAME"),
        ("--run-dir", str, "where clusters keep logs and state"),
        ("--device", str, "auto, cpu or cuda"),
        ("--served-model-name", str, "name of the model in the API"),
        ("--host", str, "address that the router listens on"),
        ("--port", int, "port that the router listens on; 0 picks a free one"),
        ("--length-boundary-tokens", int, "longest short prefill, in new tokens"),
        ("--start-timeout-s", float, "longest wait for an instance to become healthy"),
        ("--start-method", str, "fork or spawn: how CPU instances start"),
        ("--restart", str, "never or on-failure: start an instance again that dies while serving"),
    )
    for option, value_type, text in value_options:
        parser.add_argument(option, type=value_type, default=absent, help=text, metavar=_METAVARS[value_type])
    parser.add_argument(
        ROUTER_ARGS,
        action="append",
        metavar="ARGS",
        default=absent,
        help="further router arguments: a quoted string, or words up to the next option of this command",
    )
    parser.add_argument(
        SGLANG_ARGS,
        action="append",
        metavar="ARGS",
        default=absent,
        help="SGLang server arguments of every instance, a quoted string; or plain words after --",
    )


def arrange_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The words as `parser` can read them: those for the router and for SGLang, which look like options, as values."""
    cut = words.index("--") if "--" in words else len(words)
    own = {option for action in parser._actions for option in action.option_strings}
    arranged: list[str] = []
    rest = deque(words[:cut])
    while rest:
        word = rest.popleft()
        if word != ROUTER_ARGS or not rest:
            arranged.append(word)
        elif not rest[0].startswith("-") or any(map(str.isspace, rest[0])):
            arranged.append(f"{ROUTER_ARGS}={rest.popleft()}")
        else:
            taken: list[str] = []
            while rest and rest[0].partition("=")[0] not in own:
                taken.append(rest.popleft())
            arranged.append(f"{ROUTER_ARGS}={shlex.join(taken)}" if taken else ROUTER_ARGS)
    if cut < len(words) - 1:
        arranged.append(f"{SGLANG_ARGS}={shlex.join(words[cut + 1 :])}")
    return arranged


def config_from_arguments(args: argparse.Namespace) -> ClusterConfig:
    """Resolve the file and the options into one configuration. Raises ConfigError."""
    given = vars(args)
    settings = load_settings(given["config"]) if "config" in given else {}
    has_pools_in_file = "pools" in settings
    for option, path in (
        ("model", ("model",)),
        ("name", ("name",)),
        ("run_dir", ("run_dir",)),
        ("device", ("device",)),
        ("served_model_name", ("served_model_name",)),
        ("restart", ("restart",)),
        ("coordinator", ("coordinator", "enabled")),
        ("host", ("router", "host")),
        ("port", ("router", "port")),
        ("length_boundary_tokens", ("router", "length_boundary_tokens")),
        ("start_timeout_s", ("start", "timeout_s")),
        ("start_method", ("start", "method")),
        *((role, ("pools", role, "count")) for role in ROLES),
        *((f"{role}_tp", ("pools", role, "tp")) for role in ROLES),
        *((f"{role}_pp", ("pools", role, "pp")) for role in PREFILL_ROLES),
        ("decode_dcp", ("pools", "decode", "dcp")),
    ):
        if option in given:
            _put(settings, path, given[option])
    if "positional_model" in given:
        if "model" in given:
            raise ConfigError("--model", f"{given['model']!r} was given, and {given['positional_model']!r} as MODEL")
        settings["model"] = given["positional_model"]
    for option, path in ((ROUTER_ARGS, ("router", "args")), (SGLANG_ARGS, ("args",))):
        texts = given.get(option[2:].replace("-", "_"), [])
        if texts:
            more = [word for text in texts for word in _split(option, text)]
            _put(settings, path, [*_list_at(settings, path), *more])
    if "pools" not in settings:
        settings["pools"] = {role: {"count": 1} for role in ("short", "long", "decode")}
    elif not has_pools_in_file:
        pools = settings["pools"]
        assert isinstance(pools, dict)
        pools.setdefault("decode", {"count": 1})
    settings.setdefault("model", DEMONSTRATION_MODEL)
    return read_record(ClusterConfig, settings)


def run(args: argparse.Namespace) -> int:
    """Run the cluster until told to stop; 0: clean stop, 1: it cannot start, 2: bad input, 130: cancelled."""
    try:
        config = config_from_arguments(args)
        if args.dry_run:
            for line in plan_cluster(config, prepare_model(config.model)).shell_lines():
                print(line)
            return 0
        return _serve(config)
    except ConfigError as error:
        return _fail(str(error), 2)
    except StartError as error:
        lines = "".join(f"  | {line}\n" for line in error.log_lines)
        return _fail(f"{error}; everything is stopped. End of {error.log}:\n{lines}".rstrip(), 1)
    except (ModelError, ClusterInUseError, NoFreePortError, OSError) as error:
        return _fail(str(error), 1)


def _serve(config: ClusterConfig) -> int:
    asked = _StopSignals()
    cluster = Cluster(config, make_display(), is_cancelled=asked.once)
    cluster.stop_at_once_when(asked.twice)
    with asked, cluster:
        if not cluster.is_ready:
            return 130
        print(f"serving {cluster.plan.model_name} at {cluster.url}")
        if cluster.page_url is not None:
            print(f"live page: {cluster.page_url}")
        print(f"logs and {STATE_FILE} are in {cluster.folder}; Ctrl-C stops", flush=True)
        cluster.serve(asked.once)
        print("stopping (Ctrl-C again: at once)", file=sys.stderr, flush=True)
    return 0


class _StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP while it is entered."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._count = 0

    def once(self) -> bool:
        return self._count >= 1

    def twice(self) -> bool:
        return self._count >= 2

    def __enter__(self) -> None:
        self._previous = [(number, signal.getsignal(number)) for number in self._NUMBERS]
        for number, handler in self._previous:
            if handler is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous:
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1


def _put(settings: dict[str, object], path: tuple[str, ...], value: object) -> None:
    *outer, last = path
    for key in outer:
        inner = settings.setdefault(key, {})
        if not isinstance(inner, dict):
            return  # the file is wrong here; reading it says so
        settings = inner
    settings[last] = value


def _list_at(settings: dict[str, object], path: tuple[str, ...]) -> list[object]:
    value: object = settings
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, list) else []


def _split(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(option, f"{text!r} cannot be split into words: {error}") from None


def _fail(message: str, status: int) -> int:
    print(f"sglang-ext up: error: {message}", file=sys.stderr)
    return status

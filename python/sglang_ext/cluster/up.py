"""`sglang-ext up`: a whole cluster from options or a YAML file, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import yaml

from sglang_ext.cluster.cluster import Cluster, check_cluster, plan_cluster
from sglang_ext.cluster.cluster_file import load_settings, read_record
from sglang_ext.cluster.config import ClusterConfig, ConfigError
from sglang_ext.cluster.display import make_display
from sglang_ext.cluster.model import prepare_model
from sglang_ext.cluster.state import STATE_FILE, ClusterInUseError
from sglang_ext.cluster.supervisor import StartError
from sglang_ext.cpu.models.smollm2 import SHORT_NAME, ModelError
from sglang_ext.engine.device import Device, inspect_machine
from sglang_ext.long_pool.sglang.cdsp_options import architecture_conflict
from sglang_ext.ports import NoFreePortError

ROLES = ("short", "long", "decode", "plain")
_KINDS = {"decode": "decode", "plain": "undivided"}  # prefill of a class otherwise
# What options of SGLang's server and of other commands are here.
_INSTEAD = {
    "--model": "MODEL as a word of its own",
    "--model-path": "MODEL as a word of its own",
    "--name": "--set name=NAME",
    "--host": "--set router.host=ADDRESS",
    "--api-key": "--set router.api_key=KEY",
    "--tp": "--set pools.ROLE.tp=N",
    "--tp-size": "--set pools.ROLE.tp=N",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sglang-ext up`; each replaces the setting of the same name in the file."""
    absent = argparse.SUPPRESS
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=absent,
        help="model folder or Hugging Face name; smollm2, or left out: demonstration model",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", default=absent, help="cluster in YAML")
    parser.add_argument(
        "--dry-run", action="store_true", help="check all settings, print the commands and start nothing"
    )
    parser.add_argument(
        "--prefill",
        type=int,
        metavar="N",
        default=absent,
        help="prefill instances that serve all prompts, and share the long ones among them",
    )
    for role in ROLES:
        kind = _KINDS.get(role, f"prefill ({role})")
        otherwise = "; 1 where only prefill instances are given" if role == "decode" else ""
        parser.add_argument(f"--{role}", type=int, metavar="N", default=absent, help=f"{kind} instances{otherwise}")
    parser.add_argument(
        "--coordinator",
        action="store_true",
        default=absent,
        help="with --long: long instances share their prompts, chunk by chunk",
    )
    parser.add_argument(
        "--port", type=int, metavar="N", default=absent, help="port that the router listens on; 0 picks a free one"
    )
    parser.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        default=[],
        help="any other setting of the file, such as pools.long.tp=2 or device=cpu; VALUE is read as YAML. "
        "Words after -- are SGLang server arguments of every instance",
    )


def arrange_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the words before `--` for `parser`; the words after it become `sglang_arguments`."""
    cut = words.index("--") if "--" in words else len(words)
    for word in words[:cut]:
        option = word.partition("=")[0]
        if option in _INSTEAD:
            parser.error(f"unrecognized arguments: {option}; give {_INSTEAD[option]}")
    parser.set_defaults(sglang_arguments=list(words[cut + 1 :]))
    return list(words[:cut])


def config_from_arguments(args: argparse.Namespace) -> ClusterConfig:
    """Resolve the file and the options into one configuration. Raises ConfigError."""
    given = vars(args)
    settings = load_settings(given["config"]) if "config" in given else {}
    has_pools_in_file = "pools" in settings
    for text in given["set"]:
        _put(settings, *_assignment(text))
    for option, path in (
        ("model", ("model",)),
        ("coordinator", ("coordinator", "enabled")),
        ("port", ("router", "port")),
        ("prefill", ("pools", "both", "count")),
        *((role, ("pools", role, "count")) for role in ROLES),
    ):
        if option in given:
            _put(settings, path, given[option])
    if given.get("prefill", 0) > 1:
        _share_long_prompts(settings)
    if given["sglang_arguments"]:
        before = settings.get("args")
        settings["args"] = [*(before if isinstance(before, list) else []), *given["sglang_arguments"]]
    if "pools" not in settings:
        settings["pools"] = {"both": {"count": 2}, "decode": {"count": 1}}
        _share_long_prompts(settings)
    elif not has_pools_in_file:
        pools = settings["pools"]
        if isinstance(pools, dict) and pools.keys() - {"plain"}:
            pools.setdefault("decode", {}).setdefault("count", 1)
    settings.setdefault("model", SHORT_NAME)
    return read_record(ClusterConfig, settings)


def _share_long_prompts(settings: dict[str, object]) -> None:
    """Start a coordinator, unless the settings say otherwise or several instances cannot compute this model."""
    coordinator = settings.setdefault("coordinator", {})
    if isinstance(coordinator, dict) and _can_be_shared(
        str(settings.get("model", SHORT_NAME)), str(settings.get("device", "auto"))
    ):
        coordinator.setdefault("enabled", True)


def _can_be_shared(model: str, device: str) -> bool:
    """Return whether nothing in a model's folder speaks against it; a model without a folder here is not known."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    names = config.get("architectures") if isinstance(config, dict) else None
    name = str(names[0]) if isinstance(names, list) and names else None
    on_gpu = device == "cuda" or (device == "auto" and inspect_machine().device is not Device.CPU)
    return architecture_conflict(name, on_gpu=on_gpu) is None


def run(args: argparse.Namespace) -> int:
    """Run the cluster until a signal stops it; 0: clean stop, 1: it cannot start, 2: bad input, 130: cancelled."""
    try:
        config = config_from_arguments(args)
        if args.dry_run:
            plan = plan_cluster(config, prepare_model(config))
            check_cluster(config, plan)
            print("\n".join(plan.shell_lines()))
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
    cluster = Cluster(config, make_display(sys.stderr), is_cancelled=asked.once)
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
                signal.signal(number, self._count_signal)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous:
            signal.signal(number, handler)

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1


def _put(settings: dict[str, object], path: tuple[str, ...], value: object) -> None:
    *outer, last = path
    for key in outer:
        inner = settings.setdefault(key, {})
        if not isinstance(inner, dict):
            return  # the file is wrong here; reading it says so
        settings = inner
    settings[last] = value


def _assignment(text: str) -> tuple[tuple[str, ...], object]:
    """Split `pools.long.tp=2` into the path of the setting and its value. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError("--set", f"{text!r} is not of the form KEY=VALUE")
    try:
        return tuple(key.split(".")), yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError("--set", f"{value!r} is not YAML") from None


def _fail(message: str, status: int) -> int:
    print(f"sglang-ext up: error: {message}", file=sys.stderr)
    return status

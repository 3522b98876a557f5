"""The command line of `sglang-ext router`: flags, the file of settings, and the instances."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from sglang_ext import settings
from sglang_ext.settings import Setting, SettingsError
from sglang_ext.types import Role
from sglang_ext_router.config import KEYS, RouterConfig, RouterConfigError, WorkerAddress, flag_of, parse_worker_url
from sglang_ext_router.decide.decode_choice import DECODE_POLICIES
from sglang_ext_router.decide.prefill_choice import PREFILL_POLICIES
from sglang_ext_router.sglang_router_options import JoinedValues, add_sglang_router_arguments

_POLICIES = {"prefill_policy": PREFILL_POLICIES, "decode_policy": DECODE_POLICIES}
_SELECTORS = ("prefill_short_selector", "prefill_long_selector", "prefill_selector", "decode_selector")
_PREFILL_OPTIONS = (
    ("--prefill-short", Role.SHORT, "prefill instance for short prompts"),
    ("--prefill-long", Role.LONG, "prefill instance for long prompts"),
    ("--prefill", Role.BOTH, "prefill instance for both"),
)


SETTINGS = tuple(
    Setting(
        section,
        entry.name.removeprefix(section + "_"),
        type(entry.default),
        entry.default,
        entry.metadata["help"],
        entry.metadata.get("choices") or (),
        dest=entry.name,
    )
    for entry in fields(RouterConfig)
    if (section := entry.metadata.get("section")) is not None
)
"""Settings of the file: the fields of RouterConfig that have a section."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag per field of RouterConfig without a section, the file of settings, and the workers' options."""
    parser.add_argument(
        "--pd-disaggregation",
        action="store_true",
        help="accepted for compatibility with sglang_router; --prefill, --decode and --plain say what each instance is",
    )
    parser.add_argument(
        "--policy",
        choices=PREFILL_POLICIES,
        help="policy for prefill and, where it has one of that name, for decode; the two options below win over it",
    )
    for option, role, what in _PREFILL_OPTIONS:
        parser.add_argument(
            option,
            nargs="+",
            action="append",
            default=[],
            dest=f"prefill_{role}",
            metavar=("URL", "BOOTSTRAP_PORT"),
            help=f"{what}; repeat for more. The bootstrap port is read from the instance if not given",
        )
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="decode instance; repeat for more")
    parser.add_argument(
        "--plain", action="append", default=[], metavar="URL", help="undivided instance, for prefill and decode; repeat"
    )
    settings.add_arguments(parser, SETTINGS)
    for entry in fields(RouterConfig):
        if entry.name == "workers" or "section" in entry.metadata:
            continue
        default = entry.default
        assert default is not MISSING
        options: dict[str, Any] = {"default": default, "help": entry.metadata["help"]}
        if isinstance(default, bool):
            options["action"] = argparse.BooleanOptionalAction if default else "store_true"
        elif isinstance(default, tuple):
            options |= {"action": "append", "default": [], "metavar": entry.metadata["metavar"]}
        else:
            options["type"] = type(default)
            options["choices"] = entry.metadata.get("choices")
            if options["choices"] is None:
                options["metavar"] = {"int": "N", "float": "X", "str": "TEXT"}[type(default).__name__]
        if entry.name in _POLICIES:  # None: it was not given, next to --policy
            options["default"] = None
            options["help"] += f" (default: --policy, or {default})"
        if entry.name in _SELECTORS:  # sglang_router takes KEY=VALUE KEY=VALUE
            options |= {"nargs": "+", "metavar": "KEY=VALUE", "action": JoinedValues}
        parser.add_argument(flag_of(entry.name), **options)
    add_sglang_router_arguments(parser)


def config_from_arguments(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> RouterConfig:
    """Resolve parsed arguments, with the keys of the environment; RouterConfigError when they contradict each other."""
    workers: list[WorkerAddress] = []
    for option, role, _ in _PREFILL_OPTIONS:
        for values in getattr(arguments, f"prefill_{role}"):
            if len(values) > 2:
                raise RouterConfigError(f"{option} takes a URL and at most one port, not {' '.join(values)!r}")
            url = parse_worker_url(values[0], option)
            workers.append(WorkerAddress(url, role, _bootstrap_port(values[1], option) if len(values) == 2 else None))
    workers += [WorkerAddress(parse_worker_url(url, "--decode"), Role.DECODE) for url in arguments.decode]
    workers += [WorkerAddress(parse_worker_url(url, "--plain"), Role.PLAIN) for url in arguments.plain]
    for name, known in _POLICIES.items():
        if getattr(arguments, name) is None:
            default = RouterConfig.__dataclass_fields__[name].default
            setattr(arguments, name, arguments.policy if arguments.policy in known else default)
    for name in KEYS:
        # Other users of the machine can read a command line.
        if not getattr(arguments, name):
            setattr(arguments, name, environment.get(f"SGLANG_EXT_{name.upper()}", "").strip())
    values = {
        entry.name: getattr(arguments, entry.name)
        for entry in fields(RouterConfig)
        if entry.name != "workers" and "section" not in entry.metadata
    }
    try:
        values |= settings.read(SETTINGS, arguments.config, arguments.set)
    except SettingsError as error:
        raise RouterConfigError(str(error)) from None
    if values["max_concurrent_requests"] == -1:  # sglang_router's way to say no limit
        values["max_concurrent_requests"] = 0
    values["model_alias"], values["peer"] = tuple(values["model_alias"]), tuple(values["peer"])
    return RouterConfig(workers=tuple(workers), **values)


def _bootstrap_port(text: str, option: str) -> int | None:
    if text.lower() == "none":  # as sglang_router spells it
        return None
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise RouterConfigError(f"{option}: {text!r} is not a port")
    return int(text)

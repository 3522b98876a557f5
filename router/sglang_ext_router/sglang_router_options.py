"""The options of `sglang_router` 0.3.2 that this router has under another name, does without, or cannot do.

A launch line of `python -m sglang_router.launch_router` is taken as it is: `RENAMED` is read as our own option, and
`WITHOUT_EFFECT` is read and reported once in the log. An option whose loss would change what is served, or to whom, is
refused with one line that says what to use (`REFUSED`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

# Each with the option that it is here.
RENAMED: Mapping[str, str] = {
    "--prometheus-port": "--metrics-port",
    "--prometheus-host": "--metrics-host",
    "--tls-cert-path": "--ssl-certfile",
    "--tls-key-path": "--ssl-keyfile",
    "--ca-cert-paths": "--worker-ca-file",
    "--cors-allowed-origins": "--cors-allow-origins",
}
# The same of SGLang's experimental sgl-router.
RENAMED_OF_SGL_ROUTER: Mapping[str, str] = {"--bucket-config": "--length-classes"}
_OF_ANOTHER_POLICY = "it tunes sglang_router's own policies; see --prefill-policy and --decode-policy"
_OF_INSTANCES = "the instances do that; give it to them"
_NOT_NEEDED = "it is always so here"
_NO_CACHE = "there is no such cache"
# Each with the number of its values ("*": any), and the reason.
WITHOUT_EFFECT: Mapping[str, tuple[int | str, str]] = {
    **dict.fromkeys(
        ("--cache-threshold", "--balance-abs-threshold", "--balance-rel-threshold", "--bucket-adjust-interval-secs"),
        (1, _OF_ANOTHER_POLICY),
    ),
    **dict.fromkeys(
        ("--eviction-interval-secs", "--max-tree-size", "--max-idle-secs", "--assignment-mode"),
        (1, _OF_ANOTHER_POLICY),
    ),
    **dict.fromkeys(("--chat-template", "--reasoning-parser", "--tool-call-parser"), (1, _OF_INSTANCES)),
    **dict.fromkeys(("--mini-lb", "--enable-igw"), (0, _NOT_NEEDED)),
    **dict.fromkeys(("--tokenizer-cache-enable-l0", "--tokenizer-cache-enable-l1"), (0, _NO_CACHE)),
    **dict.fromkeys(("--tokenizer-cache-l0-max-entries", "--tokenizer-cache-l1-max-memory"), (1, _NO_CACHE)),
    "--enable-trace": (0, "--otlp-traces-endpoint turns traces on by itself"),
    "--model-path": (1, "it names a tokenizer, which is read where the instances have theirs; see --tokenizer-path"),
    "--worker-startup-timeout-secs": (1, "an instance gets requests as soon as it is ready, however late that is"),
    "--worker-startup-check-interval": (1, "see --health-check-interval-secs"),
    "--retry-jitter-factor": (1, "it is 0.2"),
    "--health-success-threshold": (1, "one good check makes an instance ready"),
    "--prometheus-duration-buckets": ("*", "the buckets are SGLang's"),
    "--request-id-headers": ("*", "x-request-id is read"),
}
_GIVE_WORKERS = (
    "give each ordinary server with --plain URL, or each divided one with --prefill-short, --prefill-long, --prefill "
    "or --decode"
)
_NO_HISTORY = "conversations are not stored; put a service that does in front of this router"
_OWN_KEYS = "use --api-keys-file for several clients' keys, and --admin-api-key for changes"
_NO_CLIENT_CERTIFICATE = "instances are sent a key (--worker-api-key), no certificate"
# Each with what to use.
REFUSED: Mapping[str, str] = {
    "--worker-urls": _GIVE_WORKERS,
    "--selector": "use --prefill-short-selector, --prefill-long-selector, --prefill-selector and --decode-selector",
    "--dp-aware": "an instance has one scheduler; start more instances instead of data-parallel ranks",
    "--log-dir": "the log goes to standard error; redirect it, or use --access-log FILE for a line per request",
    "--rate-limit-tokens-per-second": "use --max-concurrent-requests and --queue-size",
    "--health-check-endpoint": "/health is asked; see --health-check-interval-secs",
    "--disable-health-check": "use a longer --health-check-interval-secs",
    "--backend": "the instances are SGLang's; leave it out",
    "--mcp-config-path": "tools are called by the client",
    **dict.fromkeys(("--control-plane-api-keys", "--control-plane-audit-enabled"), _OWN_KEYS),
    **dict.fromkeys(("--jwt-issuer", "--jwt-audience", "--jwt-jwks-uri", "--jwt-role-mapping"), _OWN_KEYS),
    **dict.fromkeys(("--client-cert-path", "--client-key-path"), _NO_CLIENT_CERTIFICATE),
    "--history-backend": _NO_HISTORY,
    **dict.fromkeys(
        ("--oracle-wallet-path", "--oracle-tns-alias", "--oracle-connect-descriptor", "--oracle-username"), _NO_HISTORY
    ),
    **dict.fromkeys(("--oracle-password", "--oracle-pool-min", "--oracle-pool-max"), _NO_HISTORY),
    **dict.fromkeys(("--oracle-pool-timeout-secs", "--postgres-db-url", "--postgres-pool-max"), _NO_HISTORY),
    **dict.fromkeys(("--redis-url", "--redis-pool-max", "--redis-retention-days"), _NO_HISTORY),
}
# Values with which an option that is refused says what is so here anyway.
_HARMLESS = {
    "--backend": "sglang",
    "--health-check-endpoint": "/health",
    "--history-backend": "none",
}


def add_sglang_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Add these options, hidden from the help, to a parser that has our own."""
    own = {flag: action for action in parser._actions for flag in action.option_strings}
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS}
    for option, ours in {**RENAMED, **RENAMED_OF_SGL_ROUTER}.items():
        action = own[ours]
        takes: dict[str, Any] = {"type": action.type}
        if option in {"--ca-cert-paths", "--cors-allowed-origins"}:
            takes = {"nargs": "*", "action": JoinedValues}
        parser.add_argument(option, dest=action.dest, default=action.default, **takes, **hidden)
    for option, (count, _) in WITHOUT_EFFECT.items():
        nargs = count if count != 1 else None
        parser.add_argument(option, nargs=nargs, action=_Ignored, dest="without_effect", default=(), **hidden)
    for option in REFUSED:
        parser.add_argument(option, nargs="*", action=_Refused, dest=argparse.SUPPRESS, **hidden)


class JoinedValues(argparse.Action):
    """Several values, where our option takes one text with commas between them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, ",".join(values))


class _Ignored(argparse.Action):
    """Remember that the option was given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given: Sequence[str] = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (*given, self.option_strings[0]))


class _Refused(argparse.Action):
    """Refuse the option, unless it says what is so anyway."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        option = self.option_strings[0]
        if "".join(values) != _HARMLESS.get(option):
            parser.error(f"{option} is sglang_router's: {REFUSED[option]}")

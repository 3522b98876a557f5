"""Options of the router, resolved once into a frozen record; field metadata is the help text (`command_line.py`).

What an operator changes often is a flag; the rest is a setting of a section of the file that `--config` names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_ext.key_hashes import ApiKeyFileError
from sglang_ext.laps.decide.boundary import DEFAULT_BOUNDARY_TOKENS
from sglang_ext.tenants_file import read_tenants_file
from sglang_ext.types import Role
from sglang_ext_router.decide.decode_choice import DECODE_POLICIES
from sglang_ext_router.decide.instance_pressure import PressureSettings
from sglang_ext_router.decide.prefill_choice import PREFILL_POLICIES
from sglang_ext_router.decide.served_models import parse_alias
from sglang_ext_router.http.api_keys import read_api_keys
from sglang_ext_router.length_classes_file import check_instances, read_length_classes
from sglang_ext_router.worker_urls import is_host, normal_url


class RouterConfigError(ValueError):
    """An option that cannot be used; the message is one line and names the option."""


def may_be_forwarded(name: str) -> bool:
    """Return whether a client's header may go to instances: it is no key, of no connection, and steers nothing."""
    is_name = re.fullmatch(r"[a-z0-9!#$%&'*+.^_`|~-]+", name) is not None
    return is_name and name not in _KEPT_BACK and not name.startswith(("x-override-", "proxy-"))


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Describes where an instance is, and of which revision: its HTTP endpoint and, for prefill, its bootstrap server's
    port.

    A missing bootstrap port is learned from the instance's `/server_info`.
    """

    url: str
    role: Role
    bootstrap_port: int | None = None
    revision: str | None = None  # None: the instance says it, or has none
    topology: str = ""  # domains divided by "/", the widest first
    token_range: tuple[int, int] | None = None  # of the requests that it is for, by its labels


IP_FAMILIES = ("ipv4", "ipv6")
LOG_LEVELS = ("debug", "info", "warn", "warning", "error")
_KEPT_BACK = frozenset(
    {
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length"),
        *("content-type", "expect", "authorization", "cookie", "x-api-key", "x-request-id", "x-data-parallel-rank"),
    }
)


def _option(default: Any, help_text: str, **details: Any) -> Any:
    """A field with its help text. With `section` it is a setting of that section of the file, else a flag."""
    return field(default=default, metadata={"help": help_text, **details})


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything the router was asked to do. Times in seconds, sizes as named."""

    workers: tuple[WorkerAddress, ...] = ()
    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(30000, "port to listen on")
    processes: int = _option(1, "router processes that share the port (SO_REUSEPORT)")
    # Which pool, which instance
    length_boundary_tokens: int = _option(
        0,
        "a prefill of at most this many new tokens is short, a larger one long; 0: what the prefill instances say, "
        f"{DEFAULT_BOUNDARY_TOKENS} while none does",
    )
    length_classes: str = _option(
        "",
        "YAML or JSON file, or JSON itself, of more than two length classes with their instances: of prefill by new "
        "tokens, with an objective each, of decode by the tokens of prompt and reply",
    )
    image_tokens: int = _option(
        1024,
        "tokens that an image in a prompt is taken for when its class is chosen; a video counts as 16 images",
        section="placement",
    )
    audio_tokens: int = _option(750, "tokens that a piece of audio is taken for", section="placement")
    prefill_policy: str = _option("predicted_wait", "how a prefill instance is chosen", choices=PREFILL_POLICIES)
    decode_policy: str = _option("freeness", "how a decode instance is chosen", choices=DECODE_POLICIES)
    max_local_prefill_length: int = _option(
        0,
        "most new tokens that an undivided instance (--plain) prefills where the request can be divided; 0: those of a "
        "short prompt",
    )
    pool_spill: bool = _option(
        True,
        "serve a request in the other prefill pool while its own has no instance that can be used, or overflows",
        section="placement",
    )
    pool_overflow_share: float = _option(
        0.5,
        "a pool overflows when a request would wait there for more than this share of controller.short_slo_secs, or "
        "of -long-, and less than half as long in the other; 0: never",
        section="placement",
    )
    prefer_same_topology: bool = _option(
        False, "send KV to decode instances of the same node, else of the same domain, while these have room for it"
    )
    prefix_index_blocks: int = _option(
        65536, "prefix-cache blocks remembered per prefill instance", section="placement"
    )
    kv_events: bool = _option(
        True, "go by the KV events of instances that publish some, else by what they were sent", section="placement"
    )
    event_blocks: int = _option(
        4_000_000, "most KV blocks known of a rank that publishes KV events", section="placement"
    )
    coordinator_url: str = _option(
        "",
        "HTTP address of the long pool's coordinator: shown by GET /pools, and asked which instance gets a long prompt",
    )
    coordinator_offer_timeout_secs: float = _option(
        60.0,
        "longest wait, and not beyond --queue-timeout-secs, until the coordinator names an instance for a long prompt; "
        "then it is routed as any other; 0: it is not asked",
        section="placement",
    )
    tokenizer_path: str = _option(
        "", "folder with tokenizer.json, of all models; default: where the workers of each have theirs, if local"
    )
    # Models
    model_alias: tuple[str, ...] = _option(
        (), "a further name NAME of the served model MODEL; repeat for more", metavar="NAME=MODEL"
    )
    accept_any_model: bool = _option(
        False, "while a single model is served, serve it for any model that a request names; else unknown ones get 404"
    )
    # Admission
    max_concurrent_requests: int = _option(0, "requests served at once; 0 is no limit")
    max_sequences_per_request: int = _option(
        256, "sequences that one request may make, its prompts times n; more get 400", section="limits"
    )
    queue_size: int = _option(100, "requests that wait beyond that; more get 429")
    queue_timeout_secs: float = _option(
        60.0, "longest wait in that queue, then 408; and for an instance to return where none is ready, then 503"
    )
    max_evictions: int = _option(
        0,
        "times that a running request of low priority gives its place to a waiting one that has used up half of "
        "its time; 0: never",
    )
    request_timeout_secs: float = _option(1800.0, "longest life of a request; then 504 and both legs are aborted")
    # Failure
    retry_max_retries: int = _option(5, "attempts after the first, on other instances where there are any")
    retry_initial_backoff_ms: int = _option(50, "wait before the first retry")
    retry_max_backoff_ms: int = _option(5000, "longest wait before a retry")
    retry_backoff_multiplier: float = _option(2.0, "growth of that wait")
    retry_budget_ratio: float = _option(
        0.2, "retries of the last 10 s, as a share of the requests of that time or of those under way", section="limits"
    )
    retry_budget_min_per_sec: float = _option(
        10.0, "retries a second that are allowed in addition to that share", section="limits"
    )
    max_migrations: int = _option(
        1, "times that a stream whose instance is lost goes on on others; 0: it ends with an error event"
    )
    disable_retries: bool = _option(False, "never retry, and let no stream go on elsewhere")
    cb_failure_threshold: int = _option(5, "failures in the window that open an instance's circuit breaker")
    cb_success_threshold: int = _option(2, "successes that close it again")
    cb_timeout_duration_secs: float = _option(30.0, "how long it stays open before a trial")
    cb_window_duration_secs: float = _option(60.0, "window in which failures count")
    disable_circuit_breaker: bool = _option(False, "never take an instance out for failed requests")
    # Health and load
    health_check_interval_secs: float = _option(5.0, "time between health checks of an instance")
    health_check_timeout_secs: float = _option(5.0, "longest wait for a health check's answer")
    health_failure_threshold: int = _option(3, "failed checks in a row that take an instance out")
    liveness_interval_secs: float = _option(
        1.0, "time between liveness checks of an instance's server process", section="health"
    )
    liveness_timeout_secs: float = _option(
        3.5,
        "wait for a liveness check's answer, or for anything else from the instance, that is a miss",
        section="health",
    )
    liveness_failure_threshold: int = _option(
        1,
        "misses in a row that take an instance out as frozen, where another one of its role answers; what it was "
        "serving is lost then",
        section="health",
    )
    first_byte_timeout_secs: float = _option(
        0.0,
        "longest wait for a stream's first byte once it was sent, counted again for a retry; 0 is no limit",
        section="limits",
    )
    stream_stall_timeout_secs: float = _option(
        300.0, "longest time without a byte within a stream that its client reads; 0 is no limit", section="limits"
    )
    load_poll_interval_secs: float = _option(1.0, "time between readings of an instance's load", section="health")
    # Instances that change their pool
    controller: str = _option(
        "off",
        "move instances between the short and the long pool, and between prefill and decode where they can change "
        "their role: not, only say what it would do, or do it",
        choices=("off", "advise", "on"),
    )
    controller_interval_secs: float = _option(5.0, "time between its decisions", section="controller")
    controller_cooldown_secs: float = _option(30.0, "time after a move before the next one", section="controller")
    controller_hysteresis: float = _option(
        0.25, "how much more pressed a pool must be to be given an instance, a share", section="controller"
    )
    controller_min_pressure: float = _option(0.75, "pressure below which a pool is given none", section="controller")
    controller_min_short: int = _option(
        1, "instances that the short pool keeps; 0: it may be emptied", section="controller"
    )
    controller_min_long: int = _option(
        1, "instances that the long pool keeps; 0: it may be emptied", section="controller"
    )
    controller_confirm_rounds: int = _option(3, "decisions in a row that must want the same move", section="controller")
    controller_drain_timeout_secs: float = _option(
        30.0, "longest wait for a moving instance's requests to end", section="controller"
    )
    controller_backlog_weight: float = _option(
        1.0, "weight of an instance's backlog in its pressure", section="controller"
    )
    controller_sla_weight: float = _option(1.0, "weight of its late prefills", section="controller")
    controller_utilisation_weight: float = _option(0.5, "weight of its utilisation", section="controller")
    controller_short_slo_secs: float = _option(1.0, "backlog of short prefills that counts as 1", section="controller")
    controller_long_slo_secs: float = _option(5.0, "backlog of long prefills that counts as 1", section="controller")
    # Client connections
    controller_lease: str = _option(
        "", "name of a Lease in Kubernetes: of the routers that share it, its holder's controller moves instances"
    )
    # Limits
    max_connections: int = _option(8192, "open connections of clients; more get 503 and are closed", section="limits")
    max_payload_size: int = _option(
        64 << 20, "largest body in bytes of a request that brings a prompt; larger ones get 413"
    )
    max_control_payload_size: int = _option(
        64 << 10, "largest body in bytes of any other request; larger ones get 413", section="limits"
    )
    max_pipelined_size: int = _option(
        1 << 20,
        "bytes of requests behind the one being served on a connection, before no more is read from it",
        section="limits",
    )
    max_buffered_size: int = _option(
        1 << 30,
        "bytes of requests of all connections, being received, waiting or served; what exceeds it gets 503",
        section="limits",
    )
    max_header_size: int = _option(64 << 10, "largest request head in bytes; larger ones get 431", section="limits")
    header_timeout_secs: float = _option(
        10.0, "time a client may take to send a request's head; then 408", section="limits"
    )
    body_timeout_secs: float = _option(
        60.0, "time a client may take to send a request's body; then 408", section="limits"
    )
    client_write_timeout_secs: float = _option(
        30.0, "time a client may take nothing of what is written for it; then its connection is cut", section="limits"
    )
    sse_keep_alive_secs: float = _option(
        15.0,
        "time after which a stream that brings nothing is sent an empty line, so that no proxy ends it; 0: never",
        section="limits",
    )
    keep_alive_timeout_secs: float = _option(75.0, "time an idle client connection is kept", section="limits")
    drain_delay_secs: float = _option(
        0.0, "time after SIGTERM in which /readyz answers 503 and requests are still taken; then the port closes"
    )
    shutdown_grace_period_secs: float = _option(120.0, "time for running requests to end after that")
    # Keys and origins
    api_key: str = _option("", "clients must send it as a bearer token; also read from SGLANG_EXT_API_KEY")
    api_keys_file: str = _option(
        "", "file of several clients' keys, lines NAME:SHA256-HEX of the key; read again when it changes"
    )
    tenants_file: str = _option(
        "", "YAML file of tenants, with the keys, weight and limits of each; read again when it changes"
    )
    usage_db: str = _option(
        "", "SQLite file for the tenants' usage and budgets, which then outlive the router; each router has its own"
    )
    worker_api_key: str = _option(
        "", "bearer token for the workers, also read from SGLANG_EXT_WORKER_API_KEY; default: --api-key"
    )
    admin_api_key: str = _option(
        "",
        "bearer token for changing /workers and the like, also read from SGLANG_EXT_ADMIN_API_KEY; "
        "without it changes are refused",
    )
    forward_headers: str = _option("", "headers of clients that instances get as well, separated by commas")
    cors_allow_origins: str = _option("", "origins whose pages may use the router, separated by commas; * is any")
    ssl_certfile: str = _option("", "certificate chain in PEM: clients are served over TLS")
    ssl_keyfile: str = _option("", "its key in PEM; default: in the same file")
    worker_ca_file: str = _option("", "CA certificates in PEM for https:// workers; default: those of this machine")
    # Reports
    metrics_port: int = _option(
        0, "port of their own for /metrics, /docs and /openapi.json, without a key; 0: at --port, with a client's key"
    )
    metrics_host: str = _option("127.0.0.1", "address for --metrics-port")
    disable_ui: bool = _option(False, "no live page: neither /ui nor /ui/stream")
    ui_port: int = _option(
        0, "port of their own for /ui and /ui/stream, with the same keys and over TLS where --port is; 0: at --port"
    )
    ui_host: str = _option("127.0.0.1", "address for --ui-port")
    access_log: str = _option(
        "", "file that gets a line of JSON per request, - is standard output; opened again when renamed, and on SIGHUP"
    )
    otlp_traces_endpoint: str = _option("", "URL of a collector of OpenTelemetry traces, by OTLP/HTTP; empty: none")
    otlp_sample_ratio: float = _option(1.0, "part of the requests without a traceparent of their own that is traced")
    peer_port: int = _option(0, "port for the other routers of a group, which then share what they know; 0: no group")
    peer_host: str = _option("0.0.0.0", "address for --peer-port", section="group")
    peer: tuple[str, ...] = _option((), "another router's --peer-port; repeat for more", metavar="HOST:PORT")
    peer_service: str = _option("", "name that resolves to all routers of the group, as a headless Service does")
    peer_key: str = _option("", "secret that all of them have; also read from SGLANG_EXT_PEER_KEY")
    service_discovery: bool = _option(False, "find instances by the EndpointSlices of their Services in Kubernetes")
    service_discovery_namespace: str = _option("", "namespace of those Services; default: the router's own")
    service_discovery_port: int = _option(0, "port of instances whose Service names none http; 0: its only one")
    prefill_short_selector: str = _option(
        "", "labels KEY=VALUE[,...] of the EndpointSlices for short prompts; default: sglang-ext.io/role=prefill-short"
    )
    prefill_long_selector: str = _option("", "the same for long prompts; default: sglang-ext.io/role=prefill-long")
    prefill_selector: str = _option("", "the same for both; default: sglang-ext.io/role=prefill")
    decode_selector: str = _option("", "the same for decode; default: sglang-ext.io/role=decode")
    discovery_ip_family: str = _option(
        "ipv4",
        "which address of a pod is used where it has one of each family",
        section="discovery",
        choices=IP_FAMILIES,
    )
    kubernetes_url: str = _option(
        "", "address of the API server; default: what a pod finds in its environment", section="discovery"
    )
    kubernetes_token_file: str = _option("", "bearer token for it; default: the pod's own", section="discovery")
    kubernetes_ca_file: str = _option("", "its CA certificate in PEM; default: the pod's own", section="discovery")

    disable_route_headers: bool = _option(False, "leave out the headers that name the instances of a reply")
    log_level: str = _option("info", "least severe message to log", choices=LOG_LEVELS)
    log_json: bool = _option(False, "log JSON lines")

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) >= 1:  # NaN included
                raise RouterConfigError(f"{flag_of(name)} must be at least 1, not {getattr(self, name)}")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise RouterConfigError(f"{flag_of(name)} must not be negative, not {getattr(self, name)}")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _MAY_BE_OFF:
                if not 0 <= value < math.inf:
                    raise RouterConfigError(f"{flag_of(entry.name)} must be a number of at least 0, not {value}")
            elif entry.name.endswith("_secs") and not value > 0:
                raise RouterConfigError(f"{flag_of(entry.name)} must be greater than 0, not {value}")
            choices = entry.metadata.get("choices")
            if choices and value not in choices:
                raise RouterConfigError(f"{flag_of(entry.name)}: {value!r} is not one of {', '.join(choices)}")
        for name in KEYS:
            if any(not character.isprintable() for character in getattr(self, name)):
                raise RouterConfigError(f"{flag_of(name)} holds a character that cannot be in a header")
        for name in ("port", "metrics_port", "ui_port"):
            if getattr(self, name) > 65535:
                raise RouterConfigError(f"{flag_of(name)} must be at most 65535, not {getattr(self, name)}")
        self._check_access()
        self._check_peers()
        if self.tokenizer_path and not (Path(self.tokenizer_path) / "tokenizer.json").is_file():
            raise RouterConfigError(f"--tokenizer-path: no tokenizer.json in {self.tokenizer_path}")
        if self.coordinator_url:
            parse_worker_url(self.coordinator_url, "--coordinator-url", ("http",))
        if self.otlp_traces_endpoint:
            _check_collector_url(self.otlp_traces_endpoint)
        if self.max_header_size < 1024:
            raise RouterConfigError(f"limits.max_header_size must be at least 1024, not {self.max_header_size}")
        if self.max_buffered_size < self.max_payload_size:
            raise RouterConfigError("limits.max_buffered_size must not be less than --max-payload-size")
        if self.retry_max_backoff_ms < self.retry_initial_backoff_ms:
            raise RouterConfigError("--retry-max-backoff-ms must not be less than --retry-initial-backoff-ms")
        if not self.otlp_sample_ratio <= 1:
            raise RouterConfigError(f"--otlp-sample-ratio must be at most 1, not {self.otlp_sample_ratio}")
        self._check_aliases()
        self._check_controller()
        urls = [worker.url for worker in self.workers]
        for url in urls:
            if urls.count(url) > 1:
                raise RouterConfigError(f"the worker {url} is given twice")
        self._check_length_classes()

    def _check_length_classes(self) -> None:
        try:
            classes = read_length_classes(self.length_classes)
            if self.workers and not self.service_discovery:  # else instances come later
                check_instances(classes, {worker.url: worker.role for worker in self.workers})
        except ValueError as error:
            raise RouterConfigError(f"--length-classes: {error}") from None

    def _check_aliases(self) -> None:
        try:
            aliases = self.aliases
        except ValueError as error:
            raise RouterConfigError(f"--model-alias: {error}") from None
        models = dict(aliases)
        for name, model in aliases:
            if models[name] != model:
                raise RouterConfigError(f"--model-alias: {name} cannot stand for both {model} and {models[name]}")

    def _check_access(self) -> None:
        if self.metrics_port == self.port:
            raise RouterConfigError(f"--metrics-port must not be --port, {self.port}")
        if self.ui_port and self.ui_port in {self.port, self.metrics_port}:
            raise RouterConfigError(f"--ui-port must be a port of its own, not {self.ui_port}")
        if self.ui_port and self.disable_ui:
            raise RouterConfigError("--ui-port is for the page that --disable-ui turns off")
        if self.api_keys_file:
            try:
                read_api_keys(self.api_keys_file)
            except ApiKeyFileError as error:
                raise RouterConfigError(f"--api-keys-file: {error}") from None
        if self.tenants_file:
            try:
                read_tenants_file(self.tenants_file)
            except ApiKeyFileError as error:
                raise RouterConfigError(f"--tenants-file: {error}") from None
        if self.usage_db and not self.tenants_file:
            raise RouterConfigError("--usage-db needs --tenants-file")
        for name in self.forwarded_headers:
            if not may_be_forwarded(name):
                raise RouterConfigError(f"--forward-headers: {name!r} is no header that can be passed on")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9.:\[\]-]+", origin):
                raise RouterConfigError(f"--cors-allow-origins: {origin!r} is neither * nor of the form https://HOST")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise RouterConfigError("--ssl-keyfile needs --ssl-certfile")

    def _check_peers(self) -> None:
        if not self.peer_port:
            for name in ("peer", "peer_service"):
                if getattr(self, name):
                    raise RouterConfigError(f"{flag_of(name)} needs --peer-port")
            return
        if not self.peer_key:
            raise RouterConfigError("--peer-port needs --peer-key, or SGLANG_EXT_PEER_KEY")
        if self.peer_port in {self.port, self.metrics_port, self.ui_port}:
            raise RouterConfigError(f"--peer-port must be a port of its own, not {self.peer_port}")
        if self.processes > 1:
            raise RouterConfigError(
                f"--peer-port needs --processes 1, not {self.processes}: start more routers instead"
            )
        for text in self.peer:
            host, _, port = text.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise RouterConfigError(f"--peer: {text!r} is not of the form HOST:PORT")

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Alias and model of every `--model-alias`."""
        return tuple(parse_alias(text) for text in self.model_alias)

    @property
    def needs_client_key(self) -> bool:
        """Return whether clients must send a key."""
        return bool(self.api_key or self.api_keys_file or self.tenants_file)

    @property
    def key_for_workers(self) -> str:
        """Return what the router itself sends the workers; empty for nothing."""
        return self.worker_api_key or self.api_key

    @property
    def forwarded_headers(self) -> tuple[str, ...]:
        """The names of `--forward-headers`, in lower case."""
        return tuple(name.lower() for part in self.forward_headers.split(",") if (name := part.strip()))

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """The origins of `--cors-allow-origins`."""
        return tuple(origin for part in self.cors_allow_origins.split(",") if (origin := part.strip()))

    def _check_controller(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name.startswith("controller_") and not isinstance(value, str) and not math.isfinite(value):
                raise RouterConfigError(f"{flag_of(entry.name)} must be a finite number, not {value}")
        if not self.controller_hysteresis > 0:
            raise RouterConfigError(f"controller.hysteresis must be greater than 0, not {self.controller_hysteresis}")
        weights = (self.controller_backlog_weight, self.controller_sla_weight, self.controller_utilisation_weight)
        if not any(weights):
            raise RouterConfigError(
                "controller.backlog_weight, controller.sla_weight and controller.utilisation_weight must not all be 0"
            )
        if self.controller_cooldown_secs < self.controller_interval_secs:
            raise RouterConfigError("controller.cooldown_secs must not be less than controller.interval_secs")
        if self.controller_lease and self.controller != "on":
            raise RouterConfigError("--controller-lease needs --controller on")
        if self.controller != "off" and self.processes > 1:
            raise RouterConfigError(f"--controller {self.controller} needs --processes 1, not {self.processes}")

    @property
    def pressure_settings(self) -> PressureSettings:
        """The controller's parameters as its policy takes them."""
        return PressureSettings(
            backlog_weight=self.controller_backlog_weight,
            sla_weight=self.controller_sla_weight,
            utilisation_weight=self.controller_utilisation_weight,
            short_slo_s=self.controller_short_slo_secs,
            long_slo_s=self.controller_long_slo_secs,
            hysteresis=self.controller_hysteresis,
            cooldown_s=self.controller_cooldown_secs,
            min_short=self.controller_min_short,
            min_long=self.controller_min_long,
            min_pressure=self.controller_min_pressure,
            confirm_rounds=self.controller_confirm_rounds,
        )


_POSITIVE = (
    *("port", "processes", "prefix_index_blocks", "event_blocks", "max_payload_size"),
    *("max_connections", "max_control_payload_size", "max_pipelined_size"),
    *("cb_failure_threshold", "cb_success_threshold", "health_failure_threshold", "retry_backoff_multiplier"),
    *("liveness_failure_threshold", "max_sequences_per_request"),
    "controller_confirm_rounds",
)
KEYS = ("api_key", "admin_api_key", "worker_api_key", "peer_key")
_MAY_BE_OFF = (
    "sse_keep_alive_secs",
    "first_byte_timeout_secs",
    "stream_stall_timeout_secs",
    "coordinator_offer_timeout_secs",
    "drain_delay_secs",
    "pool_overflow_share",
)  # by 0
_NOT_NEGATIVE = (
    *("length_boundary_tokens", "max_local_prefill_length", "image_tokens", "audio_tokens"),
    *("metrics_port", "ui_port", "peer_port", "service_discovery_port"),
    *("otlp_sample_ratio", "retry_budget_ratio", "retry_budget_min_per_sec"),
    *("max_concurrent_requests", "max_evictions", "queue_size", "retry_max_retries", "max_migrations"),
    "retry_initial_backoff_ms",
    *("controller_min_pressure", "controller_backlog_weight", "controller_sla_weight"),
    *("controller_utilisation_weight", "controller_min_short", "controller_min_long"),
)


def flag_of(name: str) -> str:
    """Return what a user calls a field: its flag, or its setting in the file, SECTION.KEY."""
    section = RouterConfig.__dataclass_fields__[name].metadata.get("section")
    return "--" + name.replace("_", "-") if section is None else f"{section}.{name.removeprefix(section + '_')}"


def _check_collector_url(text: str) -> None:
    """RouterConfigError for what is no address of a collector, with or without a path."""
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and is_host(parts.hostname or "")
        is_address = is_address and parts.port != 0  # ValueError for what is no port
    except ValueError:
        is_address = False
    if not is_address or parts.query or parts.fragment or parts.username or parts.password:
        raise RouterConfigError(f"--otlp-traces-endpoint: {text!r} is not of the form http://HOST:PORT")


def parse_worker_url(text: str, option: str, schemes: Sequence[str] = ("http", "https")) -> str:
    """Normalise `SCHEME://host:port`; RouterConfigError names the option otherwise."""
    try:
        return normal_url(text, schemes)
    except ValueError as error:
        raise RouterConfigError(f"{option}: {error}") from None

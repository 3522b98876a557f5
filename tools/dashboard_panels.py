"""Describes what the dashboard shows: rows of panels and their expressions. `render_monitoring.py` makes Grafana's file
of it."""

from __future__ import annotations

from typing import NamedTuple

ROUTER = "sglang_ext_router_"
LAPS = "sglang_ext:laps_"
TRANSFER = "sglang_ext:transfer_"
LONG_POOL = "sglang_ext:cdsp_"
SGLANG = "sglang:"

# Grafana puts in the namespaces that were chosen (all: `.*`, which also matches series without one), and a range that
# holds at least four scrapes.
NAMESPACE = 'namespace=~"$namespace"'
RANGE = "$__rate_interval"


class Target(NamedTuple):
    """One expression of a panel."""

    expression: str
    legend: str  # `{{label}}` stands for a label's value


class Panel(NamedTuple):
    """A diagram over time."""

    title: str
    unit: str  # Grafana's name of it
    about: str
    targets: tuple[Target, ...]


class Row(NamedTuple):
    """Panels that belong together."""

    title: str
    panels: tuple[Panel, ...]


def series(metric: str, *matchers: str) -> str:
    """The selector of a metric in the chosen namespaces."""
    return f"{metric}{{{', '.join((NAMESPACE, *matchers))}}}"


def rate(metric: str, by: str, *matchers: str) -> str:
    """Per second, added up."""
    return f"sum by ({by}) (rate({series(metric, *matchers)}[{RANGE}]))"


def quantiles(metric: str, by: str, *matchers: str, shares: tuple[float, ...] = (0.5, 0.9, 0.99)) -> tuple[Target, ...]:
    """Quantiles of a histogram, a target for each."""
    buckets = rate(f"{metric}_bucket", f"{by}, le", *matchers)
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return tuple(Target(f"histogram_quantile({share:g}, {buckets})", f"{legend} P{share * 100:g}") for share in shares)


def total(metric: str, by: str, *matchers: str) -> str:
    """A gauge, added up."""
    return f"sum by ({by}) ({series(metric, *matchers)})"


def of_workers(metric: str, by: str = "role") -> str:
    """A gauge of the instances, added up. Every router of a group reports every instance, so one router counts."""
    return f"sum by ({by}) (max by (worker, role) ({series(ROUTER + metric)}))"


BY_CLASS = Row(
    "Requests by length class",
    (
        Panel(
            "Time to first token",
            "s",
            "Arrival at a router to the first byte of a stream.",
            quantiles(ROUTER + "ttft_seconds", "length_class"),
        ),
        Panel(
            "Wait in the routers' queues",
            "s",
            "Until a router sends a request to its instances.",
            quantiles(ROUTER + "queue_wait_seconds", "length_class", shares=(0.5, 0.99)),
        ),
        Panel(
            "Class mix",
            "reqps",
            "Requests that have ended. none: ended before the class was known.",
            (Target(rate(ROUTER + "requests_total", "length_class"), "{{length_class}}"),),
        ),
        Panel(
            "Prefix hits",
            "percentunit",
            "Share of prompt tokens that the chosen instance was believed to hold. The class is by new tokens: long "
            "prompts that hit are mostly short.",
            (
                Target(
                    f"1 - {rate(ROUTER + 'new_tokens_sum', 'length_class')}"
                    f" / {rate(ROUTER + 'request_prompt_tokens_sum', 'length_class')}",
                    "{{length_class}}",
                ),
            ),
        ),
        Panel(
            "Time per output token",
            "s",
            "After the first one, of streams of one sequence.",
            quantiles(ROUTER + "tpot_seconds", "length_class", shares=(0.5, 0.99)),
        ),
        Panel(
            "Deadlines met",
            "percentunit",
            "Of requests with x-sgl-ttft-slo-ms.",
            (
                Target(
                    rate(ROUTER + "ttft_slo_total", "length_class", 'met="true"')
                    + " / "
                    + rate(ROUTER + "ttft_slo_total", "length_class"),
                    "{{length_class}}",
                ),
            ),
        ),
        Panel(
            "New tokens of a prompt",
            "short",
            "Tokens that the chosen instance was not believed to hold.",
            quantiles(ROUTER + "new_tokens", "length_class", shares=(0.5, 0.99)),
        ),
        Panel(
            "Prefill against prediction",
            "s",
            "By how much prefills took longer, and less, than was predicted when they were sent (P90).",
            tuple(
                quantile._replace(expression=sign + quantile.expression, legend=f"{quantile.legend} {which}")
                for which, sign in (("longer", ""), ("shorter", "-"))
                for quantile in quantiles(
                    f"{ROUTER}prefill_{which}_than_predicted_seconds", "length_class", shares=(0.9,)
                )
            ),
        ),
        Panel(
            "Longest stall of a stream",
            "s",
            "Between two pieces of it, while its client reads.",
            quantiles(ROUTER + "stream_stall_seconds", "length_class", shares=(0.99,)),
        ),
    ),
)

BY_POOL = Row(
    "Pools",
    (
        Panel(
            "Instances that take requests",
            "short",
            "As the routers see them.",
            (Target(of_workers("worker_up"), "{{role}}"),),
        ),
        Panel(
            "Backlog",
            "s",
            "Queued work in seconds of one instance: prompt tokens sent to a pool and not yet prefilled, over the rate "
            "of an instance. What a scaler of prefill goes by.",
            (
                Target(
                    f"max by (model, pool) ({series(ROUTER + 'pool_pending_tokens')})"
                    f" / max by (model, pool) ({series(ROUTER + 'pool_prefill_tokens_per_second')})",
                    "{{model}} {{pool}}",
                ),
            ),
        ),
        Panel(
            "Pressure",
            "short",
            "P90 over a pool's instances: queued work, missed deadlines and use. With a controller.",
            (Target(f"max by (model, pool) ({series(ROUTER + 'pool_pressure')})", "{{model}} {{pool}}"),),
        ),
        Panel(
            "Load offered, and instances",
            "short",
            "Load in instances' worth of work, and the number of instances.",
            (
                Target(
                    f"max by (model, pool) ({series(ROUTER + 'pool_offered_instances')})", "{{model}} {{pool}} load"
                ),
                Target(f"max by (model, pool) ({series(ROUTER + 'pool_instances')})", "{{model}} {{pool}} instances"),
            ),
        ),
        Panel(
            "Moves between pools",
            "short",
            "Moves that have ended, by outcome.",
            (
                Target(
                    f"sum by (source, target, outcome) (increase({series(ROUTER + 'pool_moves_total')}[{RANGE}]))",
                    "{{source}} to {{target}}: {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Decisions of the controller",
            "ops",
            "And why.",
            (Target(rate(ROUTER + "controller_decisions_total", "result, reason"), "{{result}}: {{reason}}"),),
        ),
        Panel(
            "Requests under way",
            "short",
            "A request has a part on a prefill and on a decode instance.",
            (Target(of_workers("worker_in_flight"), "{{role}}"),),
        ),
        Panel(
            "Queued in the instances",
            "s",
            "Predicted time to prefill what waits in the fullest instance.",
            (Target(f"max by (length_class) ({series(LAPS + 'queue_backlog_seconds')})", "{{length_class}}"),),
        ),
        Panel(
            "Circuits open, and failures of instances",
            "short",
            "Instances that get no requests after failures, and failed parts of requests per second.",
            (
                Target(of_workers("worker_circuit_open"), "{{role}}: circuits open"),
                Target(f"sum (rate({series(ROUTER + 'worker_failures_total')}[{RANGE}]))", "failures per second"),
            ),
        ),
    ),
)

BY_PHASE = Row(
    "Phases of a request, in the instances",
    (
        Panel(
            "Prefill: wait for its batch",
            "s",
            "Arrival in an instance to the first batch or chunk.",
            quantiles(LAPS + "dispatch_wait_seconds", "length_class", shares=(0.5, 0.99)),
        ),
        Panel(
            "Prefill: why batches leave",
            "ops",
            "Short batches and long chunks, by reason.",
            (Target(rate(LAPS + "dispatches_total", "length_class, reason"), "{{length_class}}: {{reason}}"),),
        ),
        Panel(
            "Prefill: requests in a short batch",
            "short",
            "",
            (
                Target(
                    f"sum (rate({series(LAPS + 'batch_requests_sum')}[{RANGE}]))"
                    f" / sum (rate({series(LAPS + 'batch_requests_count')}[{RANGE}]))",
                    "mean",
                ),
            ),
        ),
        Panel(
            "Prefill: SGLang's stages",
            "s",
            "P90 of each.",
            quantiles(
                SGLANG + "per_stage_req_latency_seconds", "stage", 'stage=~"prefill.*|chunked_prefill"', shares=(0.9,)
            ),
        ),
        Panel(
            "Transfer: KV to decode",
            "ms",
            "SGLang's measure, of every transfer backend.",
            quantiles(SGLANG + "kv_transfer_latency_ms", "engine_type", shares=(0.5, 0.99)),
        ),
        Panel(
            "Transfer: handshake backend",
            "s",
            "P90 from the first grant to the end, and of the wait that computing did not hide.",
            (
                *quantiles(TRANSFER + "seconds", "side", shares=(0.9,)),
                *(
                    quantile._replace(legend="exposed wait P90")
                    for quantile in quantiles(TRANSFER + "exposed_wait_seconds", "side", shares=(0.9,))
                ),
            ),
        ),
        Panel(
            "Transfer: how transfers end",
            "ops",
            "With the handshake backend. restarted: sent again.",
            (Target(rate(TRANSFER + "requests_total", "side, outcome"), "{{side}}: {{outcome}}"),),
        ),
        Panel(
            "Decode: SGLang's stages",
            "s",
            "P90 of each, until the first token.",
            quantiles(SGLANG + "per_stage_req_latency_seconds", "stage", 'stage=~"decode.*"', shares=(0.9,)),
        ),
        Panel(
            "Decode: time between tokens",
            "s",
            "",
            quantiles(SGLANG + "inter_token_latency_seconds", "engine_type", shares=(0.5, 0.99)),
        ),
        Panel(
            "Decode: requests",
            "short",
            "Running, and waiting for slots or for their KV.",
            tuple(
                Target(total(SGLANG + name, "engine_type", 'engine_type="decode"'), legend)
                for name, legend in (
                    ("num_running_reqs", "running"),
                    ("num_decode_prealloc_queue_reqs", "wait for slots"),
                    ("num_decode_transfer_queue_reqs", "wait for KV"),
                )
            ),
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            "Of the fullest instance.",
            (Target(f"max by (engine_type) ({series(SGLANG + 'token_usage')})", "{{engine_type}}"),),
        ),
        Panel(
            "Tokens generated",
            "short",
            "Per second.",
            (Target(rate(SGLANG + "generation_tokens_total", "engine_type", 'engine_type="decode"'), "tokens/s"),),
        ),
    ),
)

LONG_PROMPTS = Row(
    "Long pool: prompts that several instances compute",
    (
        Panel(
            "Members",
            "short",
            "Instances, and those of them that are counted upon for new chunks.",
            (
                Target(total(LONG_POOL + "members", "namespace"), "members"),
                Target(total(LONG_POOL + "members_ready", "namespace"), "ready"),
            ),
        ),
        Panel(
            "Chunks",
            "ops",
            "By the number of instances that computed one.",
            (Target(rate(LONG_POOL + "chunks_total", "sp_size"), "{{sp_size}}"),),
        ),
        Panel(
            "Prompts",
            "reqps",
            "How offers end: streamed to decode, collected by the owner, or why they were declined.",
            (Target(rate(LONG_POOL + "requests_ended_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            "Where members' time goes",
            "percentunit",
            "Instances' worth of it.",
            (Target(rate(LONG_POOL + "member_seconds_total", "activity"), "{{activity}}"),),
        ),
        Panel(
            "Transfers to decode",
            "percentunit",
            "Seconds per second: hidden behind computing, or exposed to the client.",
            (Target(rate(LONG_POOL + "transfer_seconds_total", "part"), "{{part}}"),),
        ),
        Panel(
            "Wait for the first step",
            "s",
            "Mean, from the offer of a prompt.",
            (
                Target(
                    f"{rate(LONG_POOL + 'first_step_wait_seconds_sum', 'namespace')}"
                    f" / {rate(LONG_POOL + 'first_step_wait_seconds_count', 'namespace')}",
                    "mean",
                ),
            ),
        ),
    ),
)

ROUTERS = Row(
    "Routers",
    (
        Panel(
            "Outcomes",
            "reqps",
            "What clients got.",
            (Target(rate(ROUTER + "requests_total", "outcome, status"), "{{outcome}} {{status}}"),),
        ),
        Panel(
            "Refused, repeated, given up",
            "ops",
            "",
            (
                Target(rate(ROUTER + "refused_total", "reason"), "refused: {{reason}}"),
                Target(rate(ROUTER + "retries_total", "leg"), "repeated: {{leg}}"),
                Target(rate(ROUTER + "aborts_total", "reason"), "given up: {{reason}}"),
            ),
        ),
        Panel(
            "Requests",
            "short",
            "",
            (
                Target(total(ROUTER + "requests_in_flight", "namespace"), "served"),
                Target(total(ROUTER + "requests_queued", "namespace"), "queued"),
            ),
        ),
        Panel(
            "Connections",
            "short",
            "",
            (
                Target(total(ROUTER + "client_connections", "instance"), "{{instance}}: clients"),
                Target(total(ROUTER + "instance_connections", "instance"), "{{instance}}: instances"),
            ),
        ),
        Panel(
            "Peers",
            "short",
            "Other routers of the group: found, connected to, and received from.",
            tuple(
                Target(total(ROUTER + f"peers_{state}", "instance"), f"{{{{instance}}}}: {state}")
                for state in ("found", "connected", "received")
            ),
        ),
        Panel(
            "Leader",
            "short",
            "1 for the router that holds the Lease and moves instances.",
            (Target(total(ROUTER + "controller_leader", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Discovery: last answer of the API server",
            "s",
            "A watch without events is renewed every 3 to 5 minutes.",
            (Target(total(ROUTER + "discovery_sync_age_seconds", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Discovery: instances found",
            "short",
            "In the EndpointSlices, as the router with the most sees them.",
            (Target(f"max by (state) ({series(ROUTER + 'discovery_endpoints')})", "{{state}}"),),
        ),
        Panel(
            "Event loop lag",
            "s",
            "P99; a router that is out of CPU answers late.",
            quantiles(ROUTER + "event_loop_lag_seconds", "instance", shares=(0.99,)),
        ),
        Panel(
            "CPU",
            "short",
            "Cores in use; a router process uses one at most.",
            (
                Target(
                    rate("process_cpu_seconds_total", "instance, process", 'process!=""'), "{{instance}} {{process}}"
                ),
            ),
        ),
        Panel(
            "Memory",
            "bytes",
            "Resident.",
            (
                Target(
                    total("process_resident_memory_bytes", "instance, process", 'process!=""'),
                    "{{instance}} {{process}}",
                ),
            ),
        ),
        Panel(
            "Versions",
            "short",
            "Routers of each; several only while an update rolls.",
            (Target(f"count by (version) ({series(ROUTER + 'build_info')})", "{{version}}"),),
        ),
    ),
)

ROWS = (BY_CLASS, BY_POOL, BY_PHASE, LONG_PROMPTS, ROUTERS)

"""A decode instance notices that a prefill instance was started again at the same address, or has become prefill again.

SGLang's decode keeps, for each bootstrap address, where the ranks behind it listen, until two health checks in a row
(5 s apart) have failed. An instance that is back sooner, as one forked on a CPU is, goes unnoticed: what its ranks are
sent goes to ports of the process before, and requests wait for minutes. An instance that was switched to decode and
back listens on other ports, too, while its bootstrap server has answered all the time. So every health check that
succeeds asks the bootstrap server where a rank listens now.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 3.0
RankAddress = tuple[str, str]  # host, port
_ATTRIBUTE = "_sglang_ext_rank_addresses"  # of a KV manager: bootstrap address → where one of its ranks listens


def drop_restarted(result: None, manager: Any, bootstrap_addr: str) -> None:
    """AFTER `CommonKVManager._on_heartbeat_success()`: forget a prefill instance whose ranks listen elsewhere now.

    Its requests fail; they could not have been served any more.
    """
    cached = cached_ranks(manager, bootstrap_addr)
    if not cached:
        return
    key, known = cached
    now = registered_rank(manager, bootstrap_addr, key)
    if now is None:
        return
    addresses: dict[str, RankAddress] = vars(manager).setdefault(_ATTRIBUTE, {})
    before = addresses.get(bootstrap_addr)
    addresses[bootstrap_addr] = now
    # With different numbers of ranks the rank asked for may not be known: ask only once.
    if before == now or (before is None and now in known):
        return
    logger.warning("the prefill instance at %s was started again", bootstrap_addr)
    manager._handle_node_failure(bootstrap_addr)


def cached_ranks(manager: Any, bootstrap_addr: str) -> tuple[str, set[RankAddress]] | None:
    """A key of the manager's cache for this address, and all ranks known there; None if there is none."""
    with manager.connection_lock:
        entries = {key: infos for key, infos in manager.connection_pool.items() if key.startswith(f"{bootstrap_addr}_")}
        found = {(str(info["rank_ip"]), str(info["rank_port"])) for infos in entries.values() for info in infos}
    return (next(iter(entries)), found) if found else None


def registered_rank(manager: Any, bootstrap_addr: str, key: str) -> RankAddress | None:
    """Ask the bootstrap server where the rank `key` (address_dp_cp_tp) listens; None if it does not answer."""
    dp_rank, cp_rank, tp_rank = key.removeprefix(f"{bootstrap_addr}_").split("_")
    query = {
        "prefill_dp_rank": dp_rank,
        "prefill_cp_rank": cp_rank,
        "target_tp_rank": tp_rank if tp_rank.isdecimal() else "0",
        "target_pp_rank": "0",
    }
    with manager.session_pool_lock:
        session = manager.session_pool[bootstrap_addr]
    try:
        answer = session.get(f"http://{bootstrap_addr}/route", params=query, timeout=ANSWER_TIMEOUT_S)
        found = answer.json() if answer.status_code == 200 else None
    except (OSError, ValueError):  # requests' own errors are OSErrors
        return None
    if not isinstance(found, dict) or "rank_ip" not in found or "rank_port" not in found:
        return None
    return str(found["rank_ip"]), str(found["rank_port"])

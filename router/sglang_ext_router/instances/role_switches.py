"""Reads the role of an instance, prefill or decode, and changes it (SGLang's `POST /pd_role_switch`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from sglang_ext.types import Role
from sglang_ext_router.decide.role_choice import Side
from sglang_ext_router.instances.laps_monitor import NoReportError, SwitchRefusedError
from sglang_ext_router.instances.probe import Prober, scheduler_state
from sglang_ext_router.instances.registry import WorkerRegistry
from sglang_ext_router.instances.workers import Worker

SWITCH_PATH = "/pd_role_switch"
RETRY_S = 0.1  # an instance whose last request has just ended may not be idle yet


class RoleSwitches:
    """The requests of role switches. Which instance changes its role is decided in `decide/role_choice.py`."""

    def __init__(self, registry: WorkerRegistry, prober: Prober, timeout_s: float) -> None:
        self._registry = registry
        self._prober = prober
        self._timeout_s = timeout_s

    async def read(self, worker: Worker) -> str:
        """Return `prefill` or `decode`, as the instance's scheduler says; NoReportError without an answer."""
        mode = (await self._state(worker)).get("disaggregation_mode")
        if mode not in tuple(Side):
            raise NoReportError(f"its scheduler reports the role {mode!r}")
        return str(mode)

    async def switch(self, worker: Worker, target: str) -> None:
        """Have an instance without requests change its role.

        Raises SwitchRefusedError, or an error of the HTTP client where no answer comes: it may have changed even so.
        """
        graphs = await self._decode_graphs(worker) if target == Side.DECODE else {}
        body = orjson.dumps({"new_role": target, **graphs})
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._timeout_s
        while True:
            status, answer = await self._prober.ask(worker, SWITCH_PATH, body, self._timeout_s)
            if status == 200:
                return
            refusal = _object(answer)
            is_safe = refusal.get("safe_to_restore") is True
            message = str(refusal.get("message") or answer[:200].decode("utf-8", "replace"))
            if not (is_safe and "not idle" in message and loop.time() < until_s):
                raise SwitchRefusedError(f"{SWITCH_PATH} answered {status}: {message}", status == 400 and not is_safe)
            await asyncio.sleep(RETRY_S)

    async def _decode_graphs(self, worker: Worker) -> dict[str, Any]:
        """Return the CUDA graphs that an instance which becomes decode shall capture: those of a decode instance."""
        for peer in (worker, *self._registry):
            if peer is not worker and not (peer.model == worker.model and peer.role is Role.DECODE and peer.is_healthy):
                continue
            try:
                state = await self._state(peer)
            except NoReportError:
                continue
            sizes, memory_gb = state.get("decode_cuda_graph_bs"), state.get("decode_cuda_graph_memory_gb")
            if peer is not worker or sizes:
                return {"decode_cuda_graph_bs": sizes or None, "decode_cuda_graph_memory_gb": memory_gb}
        return {}

    async def _state(self, worker: Worker) -> Mapping[str, Any]:
        try:
            info = await self._prober.get_json(worker, "/server_info")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise NoReportError(str(error) or type(error).__name__) from None
        return scheduler_state(info)


def _object(answer: bytes) -> Mapping[str, Any]:
    try:
        parsed = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}

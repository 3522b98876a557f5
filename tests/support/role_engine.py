"""A scripted instance whose role can be switched, as SGLang's `POST /pd_role_switch` does it.

engine = RoleEngine(Role.DECODE)
engine.behaviour = "busy"
"""

from __future__ import annotations

import json
from typing import Any

from sglang_ext.types import Role
from support.scripted_engine import Received, Script, ScriptedEngine, cut, reply


class RoleEngine(ScriptedEngine):
    """The effect of a switch is `behaviour`.

    obey; ignore: 200 and nothing else; refuse: 400 that is safe; break: 400 after which it has no role; cut: the switch
    is made, and the connection is closed instead of answered.
    """

    def __init__(self, role: Role, script: Script | None = None) -> None:
        super().__init__(role, script)
        self.started_as = "decode" if role is Role.DECODE else "prefill"
        self.mode = self.started_as
        self.behaviour = "obey"
        self.switches: list[dict[str, Any]] = []
        assert isinstance(self.info, dict)
        self.info |= {"enable_pd_role_switch": True, "sglang_ext": {"hooks": ["parallel-samples", "prefill-restarts"]}}

    def use(self, share: float) -> None:
        """Let so much of its KV cache be in use, of decode."""
        used_tokens = int(share * (1 << 20))
        load = {"num_running_reqs": 0, "num_used_tokens": used_tokens, "max_total_num_tokens": 1 << 20}
        self.loads = {"loads": [load]}

    def _control(self, request: Received) -> Script:
        if request.path == "/model_info":
            return reply({"disaggregation_mode": self.mode})
        if request.path == "/server_info":
            assert isinstance(self.info, dict)
            state = {
                "disaggregation_mode": self.mode,
                "decode_cuda_graph_bs": [1, 2],
                "decode_cuda_graph_memory_gb": 0.5,
            }
            return reply({**self.info, "disaggregation_mode": self.started_as, "internal_states": [state]})
        if request.path == "/pd_role_switch":
            return self._switch(json.loads(request.body))
        return super()._control(request)

    def _switch(self, asked: dict[str, Any]) -> Script:
        self.switches.append(asked)
        answer = {"old_role": self.mode, "new_role": asked["new_role"], "success": False, "safe_to_restore": True}
        if self.behaviour == "refuse":
            return reply({**answer, "message": "staging buffer is not supported with runtime role switch"}, 400)
        if self.behaviour == "break":
            self.health_status = 503
            return reply({**answer, "message": "role switch failed", "safe_to_restore": False}, 400)
        if self.turns:
            return reply({**answer, "message": "instance is not idle; drain all requests before switching"}, 400)
        if self.behaviour != "ignore":
            self.mode = asked["new_role"]
        if self.behaviour == "cut":
            return cut()
        return reply({**answer, "success": True, "message": "ok", "safe_to_restore": False})

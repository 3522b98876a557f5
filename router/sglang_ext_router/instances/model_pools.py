"""One served model: its ready instances by kind, and what is learned of its prompts.

Requests hold on to it from the moment their model is known, while instances come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_ext.laps.decide.boundary import DEFAULT_BOUNDARY_TOKENS
from sglang_ext.types import Role
from sglang_ext_router.decide.pool_choice import FixedBoundary
from sglang_ext_router.decide.token_estimate import TokenEstimator
from sglang_ext_router.request.tokenising import PromptTokeniser

if TYPE_CHECKING:
    from sglang_ext_router.instances.workers import Worker


class ModelPools:
    """Plain attributes: the data path reads them on every request."""

    def __init__(self, name: str) -> None:
        self.name = name  # empty: of instances that tell none
        self.ready_prefill: tuple[Worker, ...] = ()
        self.ready_decode: tuple[Worker, ...] = ()
        self.prefill_roles: tuple[Role, ...] = ()
        self.has_revisions = False  # ready instances are of several
        # Prompts up to the first fit every ready decode instance, beyond the second none.
        self.shortest_limit_tokens = 0
        self.longest_prompt_tokens: int | None = None
        self.longest_prefill_tokens: int | None = None  # for prompts that prefill serves alone
        self.boundary = FixedBoundary(DEFAULT_BOUNDARY_TOKENS)  # where short ends, as its prefill instances say
        self.estimator = TokenEstimator()
        self.tokeniser: PromptTokeniser | None = None  # comes once a tokenizer is known

    def set_ready(self, ready: Sequence[Worker]) -> None:
        """Take over the model's ready instances, without those whose revision has none of the other kind.

        Where there is no pair at all none is left out: prefill alone may be all that is wanted.
        """
        decode_revisions = {worker.revision for worker in ready if not worker.role.is_prefill}
        pairs = {worker.revision for worker in ready if worker.role.is_prefill and worker.revision in decode_revisions}
        if pairs:
            ready = [worker for worker in ready if worker.revision in pairs]
        self.ready_prefill = tuple(worker for worker in ready if worker.role.is_prefill)
        self.ready_decode = tuple(worker for worker in ready if not worker.role.is_prefill)
        self.prefill_roles = tuple(worker.role for worker in self.ready_prefill)
        self.has_revisions = len({worker.revision for worker in ready}) > 1
        self.longest_prefill_tokens = max((worker.max_prompt_tokens for worker in self.ready_prefill), default=None)
        limits = [worker.max_prompt_tokens for worker in self.ready_decode]
        self.longest_prompt_tokens = max(limits, default=None)
        self.shortest_limit_tokens = min(limits, default=0)

    def missing_roles(self) -> list[str]:
        """What keeps the model from being served: `prefill`, `decode`, both, a pair of one revision, or nothing."""
        missing = [] if self.ready_prefill else ["prefill"]
        if not self.ready_decode:
            return [*missing, "decode"]
        decode_revisions = {worker.revision for worker in self.ready_decode}
        if missing or any(worker.revision in decode_revisions for worker in self.ready_prefill):
            return missing
        return ["prefill and decode of one revision"]

    def lacks_pair(self) -> str:
        """That no revision has both kinds, in words."""
        return f"no prefill and decode instance{f' of {self.name}' if self.name else ''} of one revision are ready"

    def lacks(self, kind: str) -> str:
        """That there is no instance of this kind, in words."""
        return f"no {kind} instance{f' of {self.name}' if self.name else ''} is ready"

from collections.abc import Sequence

from sglang_ext.long_pool.decide.price_planner import Placement, WaitingPrompt

SOURCE_DIGEST: str

class PricePlanner:
    def __init__(
        self,
        sizes: list[int],
        costs: list[tuple[float, float, float, float] | tuple[list[float], list[float]]],
        min_chunk_tokens: int,
        page_tokens: int,
        cross_node_factor: float,
        tardiness_weight: float,
        min_price: float,
        max_considered: int,
        placement_record: type[Placement],
        /,
    ) -> None: ...
    def place(
        self,
        node_ids: Sequence[int],
        queue_delays_s: Sequence[float],
        free_kv_tokens: Sequence[int],
        prompts: Sequence[WaitingPrompt],
        others_price: float,
        /,
    ) -> list[Placement]: ...

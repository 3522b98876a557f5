from collections.abc import Sequence

from baselines.tetris_planner import ChunkPlan, PlannedChunk

SOURCE_DIGEST: str

class Planner:
    def __init__(
        self,
        sizes: list[int],
        costs: list[tuple[float, float, float, float] | tuple[list[float], list[float]]],
        min_chunk_tokens: int,
        page_tokens: int,
        is_chunking: bool,
        chunk_record: type[PlannedChunk],
        plan_record: type[ChunkPlan],
        /,
    ) -> None: ...
    def plan(
        self,
        node_ids: Sequence[int],
        queue_delays_s: Sequence[float],
        free_kv_tokens: Sequence[int],
        new_tokens: int,
        cached_tokens: int,
        group: Sequence[int],
        waited_s: float,
        improvement_rate: float,
        /,
    ) -> ChunkPlan | int: ...

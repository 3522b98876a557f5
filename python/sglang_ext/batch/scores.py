"""Scores: what the endpoint's log-probabilities of a sequence become, on the way into the store and out of it.

In the store a scored sequence is packed arrays: for 128 candidates about 780 bytes a token, far less than the JSON
that came. Exported, it is a row of Parquet or a line of JSON, or a row of the dataset that DistillKit trains from.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from sglang_ext.batch.endpoint import Answer
from sglang_ext.batch.lines import BatchLine

_HEADER = 3  # tokens, tokens of the prompt (-1: unknown), candidates per position


class Scores(NamedTuple):
    """Log-probabilities of one sequence of n tokens, K candidates at every position but the first."""

    token_ids: NDArray[np.int32]  # [n]
    prompt_len: int | None
    topk_ids: NDArray[np.int32]  # [n - 1, K]: row i is of position i + 1
    topk_logprobs: NDArray[np.float16]  # [n - 1, K]
    actual_logprobs: NDArray[np.float32]  # [n]: of the token that is there; the first is NaN


def pack_scores(line: BatchLine, answer: Answer) -> bytes:
    """Return what is stored of a scored sequence. Raises ValueError, which names what the reply lacks."""
    meta = answer.parsed.get("meta_info") if isinstance(answer.parsed, dict) else None
    actual = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(meta, dict) or not isinstance(actual, list) or not actual:
        raise ValueError("the reply has no input_token_logprobs: the endpoint does not return scores of the prompt")
    body = orjson.loads(line.body)
    candidates, asked = body.get("token_ids_logprob"), body.get("top_logprobs_num", 0)
    try:
        token_ids = np.array([entry[1] for entry in actual], np.int32)
        logprobs = np.array([np.nan if entry[0] is None else entry[0] for entry in actual], np.float32)
        name = "input_top_logprobs" if candidates is None else "input_token_ids_logprobs"
        wanted = asked if candidates is None else len(candidates)
        if f"{name}_shape" in meta:
            ids, values = _flat_candidates(meta, len(actual), wanted, name)
        else:
            ids, values = _candidates(meta.get(name), len(actual), wanted, name)
    except (TypeError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"the reply's log-probabilities cannot be read: {error!r}") from None
    given = body.get("input_ids")
    if given is not None:
        sent = np.array(given, np.int32)
        # SGLang calls a vocabulary's last token 0 there; the number is the right one's.
        if len(sent) != len(token_ids) or not ((token_ids == sent) | (token_ids == 0)).all():
            raise ValueError(f"the reply has scores of {len(token_ids)} tokens that are not the {len(given)} sent")
        token_ids = sent
    if np.isnan(logprobs[1:]).any():
        position = int(np.isnan(logprobs[1:]).argmax()) + 1
        raise ValueError(f"the reply has no log-probability of position {position}: not all of the prompt was scored")
    if line.prompt_len is not None and line.prompt_len > len(token_ids):
        raise ValueError(f"prompt_len is {line.prompt_len}, and the sequence has {len(token_ids)} tokens")
    header = np.array([len(token_ids), -1 if line.prompt_len is None else line.prompt_len, wanted], np.int32)
    return b"".join(part.tobytes() for part in (header, token_ids, logprobs, ids, values))


def _candidates(positions: Any, tokens: int, wanted: int, name: str) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    if not wanted or tokens == 1:
        return np.empty((0, wanted), np.int32), np.empty((0, wanted), np.float16)
    if not isinstance(positions, list) or len(positions) != tokens:
        found = len(positions) if isinstance(positions, list) else 0
        raise ValueError(f"the reply has {name} of {found} of {tokens} positions")
    for position, entries in enumerate(positions[1:], 1):
        if not isinstance(entries, list) or len(entries) != wanted:
            found = len(entries) if isinstance(entries, list) else 0
            raise ValueError(f"the reply has {found} {name} at position {position}, {wanted} were asked for")
    ids = np.array([[entry[1] for entry in entries] for entries in positions[1:]], np.int32)
    # JSON has no minus infinity: null
    values = [[-np.inf if entry[0] is None else entry[0] for entry in entries] for entries in positions[1:]]
    return ids, _as_half(np.array(values, np.float32))


def _flat_candidates(
    meta: dict[str, Any], tokens: int, wanted: int, name: str
) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """The same as arrays, which newer SGLang sends when asked: a third of the text, and nothing to parse."""
    rows, count = meta[f"{name}_shape"]
    if meta[f"{name}_null_prefix"] != 1 or (rows, count) != (tokens - 1, wanted):
        raise ValueError(f"the reply has {name} of {rows} positions with {count} each, not {tokens - 1} with {wanted}")
    ids = np.frombuffer(base64.b64decode(meta[f"{name}_idx_flat_b64"]), "<i4").reshape(rows, count)
    values = np.frombuffer(base64.b64decode(meta[f"{name}_val_flat_b64"]), "<f4").reshape(rows, count)
    return ids.astype(np.int32, copy=False), _as_half(values.astype(np.float32, copy=False))


def _as_half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):  # below -65504 is minus infinity
        return values.astype(np.float16)


def unpack_scores(packed: bytes) -> Scores:
    """The arrays of `pack_scores`, without a copy."""
    tokens, prompt_len, count = np.frombuffer(packed, np.int32, _HEADER).tolist()
    offset = 4 * _HEADER
    token_ids = np.frombuffer(packed, np.int32, tokens, offset)
    offset += 4 * tokens
    actual = np.frombuffer(packed, np.float32, tokens, offset)
    offset += 4 * tokens
    total = (tokens - 1) * count
    ids = np.frombuffer(packed, np.int32, total, offset).reshape(tokens - 1, count)
    values = np.frombuffer(packed, np.float16, total, offset + 4 * total).reshape(tokens - 1, count)
    return Scores(token_ids, None if prompt_len < 0 else prompt_len, ids, values, actual)


def score_schema() -> Any:
    """Columns of a Parquet file of scores, as a pyarrow schema."""
    import pyarrow as pa

    return pa.schema(
        [
            ("custom_id", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("prompt_len", pa.int32()),
            ("topk_ids", pa.list_(pa.list_(pa.int32()))),
            ("topk_logprobs", pa.list_(pa.list_(pa.float16()))),
            ("actual_logprobs", pa.list_(pa.float32())),
        ]
    )


def score_table(rows: Iterable[tuple[str, bytes]]) -> Any:
    """A pyarrow table of `custom_id`s and packed scores. The first position has no candidates and a null."""
    import pyarrow as pa

    custom_ids: list[str] = []
    scores: list[Scores] = []
    for custom_id, packed in rows:
        custom_ids.append(custom_id)
        scores.append(unpack_scores(packed))
    outer = np.concatenate([[0], np.cumsum([len(score.token_ids) for score in scores])]).astype(np.int32)
    sizes: list[NDArray[np.int64]] = []
    for score in scores:
        sizes += [np.zeros(1, np.int64), np.full(len(score.token_ids) - 1, score.topk_ids.shape[1])]
    inner = np.concatenate([[0], np.cumsum(np.concatenate(sizes) if sizes else [])]).astype(np.int32)

    def flat(arrays: list[NDArray[Any]], dtype: Any) -> Any:
        return np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.empty(0, dtype)

    actual = flat([score.actual_logprobs for score in scores], np.float32)
    topk_ids = pa.ListArray.from_arrays(inner, flat([score.topk_ids for score in scores], np.int32))
    topk_logprobs = pa.ListArray.from_arrays(inner, flat([score.topk_logprobs for score in scores], np.float16))
    columns = [
        pa.array(custom_ids, pa.string()),
        pa.ListArray.from_arrays(outer, flat([score.token_ids for score in scores], np.int32)),
        pa.array([score.prompt_len for score in scores], pa.int32()),
        pa.ListArray.from_arrays(outer, topk_ids),
        pa.ListArray.from_arrays(outer, topk_logprobs),
        pa.ListArray.from_arrays(outer, pa.array(actual, mask=np.isnan(actual))),
    ]
    return pa.Table.from_arrays(columns, schema=score_schema())


def score_row(custom_id: str, packed: bytes) -> dict[str, object]:
    """Return a row of `score_table` for JSON, in which NaN and minus infinity become null."""
    scores = unpack_scores(packed)
    return {
        "custom_id": custom_id,
        "token_ids": scores.token_ids.tolist(),
        "prompt_len": scores.prompt_len,
        "topk_ids": [[], *scores.topk_ids.tolist()],
        "topk_logprobs": [[], *scores.topk_logprobs.tolist()],
        "actual_logprobs": scores.actual_logprobs.tolist(),
    }


# -- DistillKit -------------------------------------------------------------------------------------------------------


def distillkit_schema() -> Any:
    """Columns of a dataset that DistillKit reads as a teacher's, as a pyarrow schema."""
    import pyarrow as pa

    nested = pa.list_(pa.list_(pa.uint8()))
    return pa.schema(
        [("input_ids", pa.list_(pa.uint64())), ("compressed_logprobs", nested), ("bytepacked_indices", nested)]
    )


def distillkit_config(vocabulary: int, top_logprobs: int) -> dict[str, object]:
    """The `logprob_compressor` section of a DistillKit configuration that reads this export: every value is exact."""
    return {
        "d": vocabulary,
        "k": top_logprobs,
        "exact_k": top_logprobs,
        "exact_dtype": "float16",
        "polynomial_terms": None,
        "residual_bins": [],
        "delta_encoding": False,
    }


def distillkit_table(rows: Iterable[tuple[str, bytes]], vocabulary: int) -> Any:
    """A pyarrow table for DistillKit: position i holds what the teacher expects after token i, so the last has none.

    Log-probabilities are float16 bytes, highest first; ids are packed most significant bit first, in as many bits as
    the vocabulary needs. ValueError for an id that is not of the vocabulary.
    """
    import pyarrow as pa

    bits = max(1, int(np.ceil(np.log2(vocabulary))))
    columns: list[list[Any]] = [[], [], []]
    for custom_id, packed in rows:
        scores = unpack_scores(packed)
        if scores.topk_ids.size and int(scores.topk_ids.max()) >= vocabulary:
            raise ValueError(f"{custom_id}: token {int(scores.topk_ids.max())} is not in a vocabulary of {vocabulary}")
        order = np.argsort(-scores.topk_logprobs, axis=-1, kind="stable")
        values = np.take_along_axis(scores.topk_logprobs, order, -1)
        ids = np.take_along_axis(scores.topk_ids, order, -1)
        of_id = (ids[..., None] >> np.arange(bits - 1, -1, -1)) & 1  # [n - 1, K, bits]
        columns[0].append(scores.token_ids.astype(np.uint64))
        columns[1].append(list(np.ascontiguousarray(values).view(np.uint8)))
        columns[2].append(list(np.packbits(of_id.reshape(len(ids), ids.shape[1] * bits).astype(np.uint8), axis=-1)))
    return pa.Table.from_pydict(dict(zip(distillkit_schema().names, columns, strict=True)), schema=distillkit_schema())

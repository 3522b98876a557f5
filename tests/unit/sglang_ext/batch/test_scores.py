"""Scores on their way: exact into the store and out of it, and refused where the reply does not have them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.batch.endpoint import Answer, AnswerKind
from sglang_ext.batch.lines import BatchLine, LineOptions, Mode, parse_line
from sglang_ext.batch.scores import (
    distillkit_config,
    distillkit_table,
    pack_scores,
    score_row,
    score_table,
    unpack_scores,
)
from support.faulty_endpoint import scores_of


def scored(content: dict[str, Any], top_logprobs: int = 4) -> tuple[BatchLine, Answer]:
    line = parse_line(content, LineOptions(Mode.SCORE, top_logprobs=top_logprobs))
    parsed = scores_of(orjson.loads(line.body))
    return line, Answer(AnswerKind.OK, 200, orjson.dumps(parsed), parsed, "r", None)


@pytest.mark.slow
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30).filter(lambda ids: ids[0] != 99), st.integers(0, 256))
def test_packed_and_unpacked_are_the_same(token_ids: list[int], count: int) -> None:
    line, answer = scored({"token_ids": token_ids, "prompt_len": len(token_ids) // 2}, count)
    scores = unpack_scores(pack_scores(line, answer))
    assert scores.token_ids.tolist() == token_ids
    assert scores.prompt_len == len(token_ids) // 2
    assert scores.topk_ids.shape == scores.topk_logprobs.shape == (len(token_ids) - 1, count)
    positions = np.arange(1, len(token_ids))
    assert np.isnan(scores.actual_logprobs[0])
    np.testing.assert_allclose(scores.actual_logprobs[1:], -(positions + np.array(token_ids[1:]) / 1000), rtol=1e-6)
    expected = -(positions[:, None] + np.arange(count) / 1000)
    np.testing.assert_array_equal(scores.topk_logprobs, expected.astype(np.float32).astype(np.float16))
    np.testing.assert_array_equal(scores.topk_ids, np.tile(np.arange(count), (len(token_ids) - 1, 1)))


def flat(answer: Answer, **changes: object) -> Answer:
    """The same candidates as arrays, which newer SGLang sends."""
    parsed = orjson.loads(answer.body)
    told = parsed["meta_info"].pop("input_top_logprobs")[1:]
    ids = np.array([[entry[1] for entry in entries] for entries in told], "<i4")
    values = np.array([[entry[0] for entry in entries] for entries in told], "<f4")
    parsed["meta_info"] |= {
        "input_top_logprobs_shape": list(ids.shape),
        "input_top_logprobs_null_prefix": 1,
        "input_top_logprobs_idx_flat_b64": base64.b64encode(ids.tobytes()).decode(),
        "input_top_logprobs_val_flat_b64": base64.b64encode(values.tobytes()).decode(),
        **{f"input_top_logprobs_{name}": value for name, value in changes.items()},
    }
    return answer._replace(parsed=parsed)


def test_candidates_as_arrays_are_the_same() -> None:
    line, answer = scored({"token_ids": [5, 6, 7]})
    assert pack_scores(line, flat(answer)) == pack_scores(line, answer)


@pytest.mark.parametrize(
    "changes",
    [{"shape": [1, 4]}, {"shape": [2, 3]}, {"null_prefix": 0}, {"idx_flat_b64": "AAAA"}, {"val_flat_b64": "?"}],
)
def test_arrays_that_are_not_of_the_sequence_are_refused(changes: dict[str, object]) -> None:
    line, answer = scored({"token_ids": [5, 6, 7]})
    with pytest.raises(ValueError):
        pack_scores(line, flat(answer, **changes))


def test_candidates_take_the_place_of_the_top() -> None:
    line, answer = scored({"token_ids": [5, 6, 7], "candidate_ids": [9, 3]})
    scores = unpack_scores(pack_scores(line, answer))
    assert scores.topk_ids.tolist() == [[9, 3], [9, 3]]
    np.testing.assert_allclose(scores.topk_logprobs, [[-1.009, -1.003], [-2.009, -2.003]], rtol=1e-3)


def test_a_text_tells_its_tokens_in_the_reply() -> None:
    line, answer = scored({"text": "abc"})
    assert unpack_scores(pack_scores(line, answer)).token_ids.tolist() == [97, 98, 99]


def change(answer: Answer, name: str, value: object) -> Answer:
    parsed = orjson.loads(answer.body)
    parsed["meta_info"][name] = value
    return answer._replace(parsed=parsed)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("input_token_logprobs", None, "has no input_token_logprobs"),
        ("input_token_logprobs", [], "has no input_token_logprobs"),
        ("input_token_logprobs", [[None, 5, None]], "of 1 tokens that are not the 3 sent"),
        ("input_token_logprobs", [[None, 5, None], [-1.0, 6, None], [-1.0, 8, None]], "are not the 3 sent"),
        ("input_token_logprobs", [[None, 5, None], [None, 6, None], [-1.0, 7, None]], "log-probability of position 1"),
        ("input_token_logprobs", [[None], [1], [2]], "cannot be read"),
        ("input_top_logprobs", None, "input_top_logprobs of 0 of 3 positions"),
        ("input_top_logprobs", [None, [[-1.0, 1, None]], None], "1 input_top_logprobs at position 1, 4 were asked for"),
    ],
)
def test_a_success_without_scores_is_a_failure(name: str, value: object, reason: str) -> None:
    line, answer = scored({"token_ids": [5, 6, 7]})
    with pytest.raises(ValueError, match=reason):
        pack_scores(line, change(answer, name, value))


def test_a_table_has_a_row_per_sequence() -> None:
    rows = [
        ("a", pack_scores(*scored({"token_ids": [5, 6, 7], "prompt_len": 1}))),
        ("b", pack_scores(*scored({"token_ids": [8]}))),
        ("c", pack_scores(*scored({"token_ids": [1, 2], "candidate_ids": [3]}))),
    ]
    table = score_table(rows)
    assert table.schema.field("topk_logprobs").type == "list<list<halffloat>>" or "halffloat" in str(table.schema)
    first, second, third = table.to_pylist()
    assert (first["custom_id"], first["token_ids"], first["prompt_len"]) == ("a", [5, 6, 7], 1)
    assert first["topk_ids"] == [[], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert first["actual_logprobs"] == [None, pytest.approx(-1.006), pytest.approx(-2.007)]
    assert (second["prompt_len"], second["topk_ids"], second["actual_logprobs"]) == (None, [[]], [None])
    assert third["topk_ids"] == [[], [3]]
    assert score_table([]).num_rows == 0


def test_a_line_of_json_has_the_fields_of_a_row_of_parquet() -> None:
    line, answer = scored({"token_ids": [5, 6, 7], "prompt_len": 1}, 2)
    answer.parsed["meta_info"]["input_top_logprobs"][2][1][0] = None  # minus infinity
    packed = pack_scores(line, answer)
    row = orjson.loads(orjson.dumps(score_row("a", packed)))
    assert list(row) == score_table([]).column_names
    assert row == {
        "custom_id": "a",
        "token_ids": [5, 6, 7],
        "prompt_len": 1,
        "topk_ids": [[], [0, 1], [0, 1]],
        "topk_logprobs": [[], [-1.0, pytest.approx(-1.001, abs=1e-3)], [-2.0, None]],
        "actual_logprobs": [None, pytest.approx(-1.006), pytest.approx(-2.007)],
    }


def test_distillkit_reads_back_what_was_scored() -> None:
    """The bytes as its decompressor takes them apart: exact float16 values, ids most significant bit first."""
    vocabulary, count = 1000, 4
    packed = pack_scores(*scored({"token_ids": [5, 6, 7, 900]}))
    table = distillkit_table([("a", packed)], vocabulary)
    (row,) = table.to_pylist()
    scores = unpack_scores(packed)
    assert row["input_ids"] == [5, 6, 7, 900]
    assert len(row["compressed_logprobs"]) == len(row["bytepacked_indices"]) == 3
    values = np.array(row["compressed_logprobs"], np.uint8).view(np.float16)
    np.testing.assert_array_equal(values, scores.topk_logprobs)
    assert (np.diff(values.astype(np.float32)) <= 0).all()
    bits = np.unpackbits(np.array(row["bytepacked_indices"], np.uint8), axis=-1)[:, : 10 * count].reshape(3, count, 10)
    np.testing.assert_array_equal((bits * (1 << np.arange(9, -1, -1))).sum(-1), scores.topk_ids)
    assert distillkit_config(vocabulary, count)["exact_k"] == count
    with pytest.raises(ValueError, match="token 3 is not in a vocabulary of 2"):
        distillkit_table([("a", packed)], 2)

"""Scores judged by clients that are not ours: TRL's client for a teacher and lm-eval, unmodified, over real SGLang.

The truth is a plain SGLang server: no disaggregation, no router.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.types import Role
from support import score_clients
from support.engines import FLEET, PLAIN_SERVER, Engine, EngineSpec
from support.reference import random_prompt
from support.router_cli import RunningRouter
from support.tiny_model import tiny_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.skipif(not score_clients.is_installed(), reason="TRL and lm-eval are not there: `make judges-env`"),
]

TOLERANCE = 1e-3
TOP_LOGPROBS = 8
SEQUENCES = 50
LONGEST_TOKENS = 2000
TASK = """
task: next_words
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    chunked = EngineSpec(Role.LONG, arguments=("--chunked-prefill-size", "512"), name="chunked")
    return FLEET.get(EngineSpec(Role.SHORT), chunked, EngineSpec(Role.DECODE))


@pytest.fixture(scope="module")
def plain(engines: list[Engine]) -> Engine:
    return FLEET.get(PLAIN_SERVER)[0]


@pytest.fixture(autouse=True)
def _nothing_left_behind(router: RunningRouter, engines: list[Engine]) -> Iterator[None]:
    yield
    for engine in engines:
        engine.wait_idle()
    assert router.is_idle()


def sequence_lengths() -> list[int]:
    draw = random.Random(13)
    drawn = [round(math.exp(draw.uniform(0, math.log(LONGEST_TOKENS)))) for _ in range(SEQUENCES - 6)]
    return [1, 2, 256, 257, 513, LONGEST_TOKENS, *drawn]


@pytest.mark.parametrize("chunk_size", [0, 7])
def test_trl_gets_the_scores_of_a_plain_server(
    router: RunningRouter, plain: Engine, tmp_path: Path, chunk_size: int
) -> None:
    lengths = sequence_lengths()
    assert len(lengths) == SEQUENCES
    sequences = [random_prompt(length, seed=900 + index) for index, length in enumerate(lengths)]
    # Half of each is its prompt; a sequence of one token is all prompt.
    prompt_lengths = [max(1, length // 2) for length in lengths]
    result = score_clients.run_client(
        "trl",
        tmp_path,
        url=router.url,
        sequences=sequences,
        prompt_lengths=prompt_lengths,
        top_logprobs=TOP_LOGPROBS,
        chunk_size=chunk_size,
    )
    compared = 0
    for index, (sequence, prompt_length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        asked = {
            "input_ids": sequence,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": TOP_LOGPROBS,
        }
        truth = plain.post("/generate", asked).body["meta_info"]
        actual = [[value] for value, _, _ in truth["input_token_logprobs"][prompt_length:]]
        assert result["actual_token_ids"][index] == [[token] for token in sequence[prompt_length:]]
        assert_close(result["actual_logprobs"][index], actual)
        top = truth["input_top_logprobs"][prompt_length:]
        assert_close(result["logprobs"][index], [[value for value, _, _ in position] for position in top])
        for ours, theirs in zip(result["logprob_token_ids"][index], top, strict=True):
            assert_same_tokens(ours, theirs)
            compared += 1
    assert compared == sum(lengths) - sum(prompt_lengths)


def assert_close(ours: list[list[float]], theirs: list[list[float]]) -> None:
    assert [len(row) for row in ours] == [len(row) for row in theirs]
    for mine, others in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(others, abs=TOLERANCE)


def assert_same_tokens(ours: list[int], theirs: list[list[float]]) -> None:
    """The same ids in the same order, but for neighbours as close as rounding, and for the last place."""
    values = {int(token): value for value, token, _ in theirs}
    for place, token in enumerate(ours):
        expected = theirs[place][0]
        assert values.get(token, theirs[-1][0]) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(("batch_size", "concurrent"), [(1, 1), (5, 4)])
def test_lm_eval_gets_the_figures_of_a_plain_server(
    router: RunningRouter, plain: Engine, tmp_path: Path, batch_size: int, concurrent: int
) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    draw = random.Random(7)
    words = " ".join(Path(__file__).read_text().split()).split(" ")
    with (folder / "documents.jsonl").open("w") as file:
        for label in (draw.randrange(3) for _ in range(20)):
            start = draw.randrange(len(words) - 20)
            count = draw.choice([1, 5, 150])
            document = {
                "context": " ".join(words[(start + index) % len(words)] for index in range(count)),
                "choices": [" " + " ".join(draw.choices(words, k=draw.randrange(1, 6))) for _ in range(3)],
                "label": label,
            }
            file.write(json.dumps(document) + "\n")
    (folder / "task.yaml").write_text(TASK.format(file=folder / "documents.jsonl"))
    told = [
        score_clients.run_client(
            "lm-eval",
            tmp_path / "home",
            url=url,
            tokenizer=str(tiny_model()),
            tasks=str(folder),
            task="next_words",
            batch_size=batch_size,
            concurrent=concurrent,
        )
        for url in (router.url, plain.url)
    ]
    ours, theirs = told
    assert ours["figures"] == theirs["figures"]
    assert {"acc,none", "acc_norm,none"} <= ours["figures"].keys()
    assert len(ours["samples"]) == 20
    for document, answers in theirs["samples"].items():
        for mine, other in zip(ours["samples"][document], answers, strict=True):
            assert float(mine[0]) == pytest.approx(float(other[0]), abs=TOLERANCE * 100)
            assert mine[1] == other[1]

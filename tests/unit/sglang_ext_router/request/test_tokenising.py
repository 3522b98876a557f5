"""Exact counts off the loop, only for prompts whose class is in doubt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sglang_ext_router.request.tokenising import PromptTokeniser, Tokenisers
from support.router_process import Cluster, cluster
from support.scripted_engine import reply


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of whole words."""
    path = tmp_path_factory.mktemp("tokenizer")
    content: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
    }
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


async def counts_of(tokeniser: PromptTokeniser, *texts: str) -> list[int] | None:
    future: asyncio.Future[list[int] | None] = asyncio.get_running_loop().create_future()
    tokeniser.count(texts, future.set_result)
    return await asyncio.wait_for(future, 5.0)


async def test_counts(folder: Path) -> None:
    tokeniser = Tokenisers(asyncio.get_running_loop()).of(str(folder))
    assert tokeniser is not None
    assert await counts_of(tokeniser, "a b c", "", "d") == [3, 0, 1]
    tokeniser.close()


@pytest.mark.slow
async def test_the_loop_goes_on_meanwhile(folder: Path) -> None:
    tokeniser = PromptTokeniser(folder / "tokenizer.json", asyncio.get_running_loop())
    counting = asyncio.create_task(counts_of(tokeniser, "word " * 300_000))
    turns = 0
    while not counting.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert await counting == [300_000]
    assert turns > 10
    tokeniser.close()


async def test_a_count_that_fails_is_no_count(folder: Path) -> None:
    tokeniser = PromptTokeniser(folder / "tokenizer.json", asyncio.get_running_loop())
    tokeniser._tokenizer = None  # type: ignore[assignment]
    assert await counts_of(tokeniser, "a") is None
    tokeniser.close()


async def test_a_folder_has_one_tokeniser(folder: Path, tmp_path: Path) -> None:
    tokenisers = Tokenisers(asyncio.get_running_loop())
    assert tokenisers.of("") is tokenisers.of("org/model") is tokenisers.of(str(tmp_path)) is None
    assert tokenisers.of(str(folder)) is tokenisers.of(str(folder)) is not None
    tokenisers.close()


# -- within the router ----------------------------------------------------------------------------------------


def words(count: int, letters: int) -> str:
    """`count` tokens of so many bytes each."""
    return ("x" * (letters - 1) + " ") * count


async def ask(served: Cluster, text: str) -> tuple[int, str | None]:
    answer = await served.ask("POST", "/generate", {"text": text})
    return answer.status, answer.headers.get("x-sglang-ext-class")


async def test_a_prompt_in_doubt_is_counted_and_classified_exactly(folder: Path) -> None:
    async with cluster(tokenizer_path=str(folder), length_boundary_tokens=300) as served:
        assert await ask(served, words(290, 6)) == (200, "short")  # an estimate would say 435
        assert await ask(served, words(310, 3)) == (200, "long")  # an estimate would say 232
        assert served.router.metrics.tokenised == 2


async def test_a_prompt_beyond_doubt_is_not_counted(folder: Path) -> None:
    async with cluster(tokenizer_path=str(folder)) as served:
        assert await ask(served, "x" * 100) == (200, "short")
        assert await ask(served, "x" * 20_000) == (200, "long")
        assert served.router.metrics.tokenised == 0


@pytest.mark.parametrize("letters", [3, 6, 18])
async def test_which_instance_holds_a_prompt_is_counted_exactly(folder: Path, letters: int) -> None:
    async with cluster(tokenizer_path=str(folder), decode=2) as served:
        small = served.worker(served.decode[0].url)
        small.max_prompt_tokens = 3000
        served.router.registry.refresh()
        for _ in range(4):
            assert (await ask(served, words(3100, letters)))[0] == 200
        assert served.router.metrics.tokenised == 4
        assert not served.decode[0].requests


@pytest.mark.parametrize(("count", "letters", "code"), [(40_000, 3, 400), (20_000, 18, 200)])
async def test_whether_a_reply_of_scores_is_too_large_is_counted_exactly(
    folder: Path, count: int, letters: int, code: int
) -> None:
    """An estimate would let the first pass, and refuse the second."""
    async with cluster(tokenizer_path=str(folder)) as served:
        body = {"text": words(count, letters), "return_logprob": True, "top_logprobs_num": 256}
        answer = await served.ask("POST", "/generate", {**body, "sampling_params": {"max_new_tokens": 1}})
        assert (answer.status, served.router.metrics.tokenised) == (code, 1)
        if code == 400:
            assert f"{count} tokens with 257 log-probabilities" in answer.error["message"]


async def test_without_a_tokenizer_the_estimate_decides() -> None:
    async with cluster(length_boundary_tokens=300) as served:
        assert await ask(served, words(290, 6)) == (200, "long")
        assert await ask(served, words(310, 3)) == (200, "short")


async def test_the_instances_tokenizer_is_used_where_it_can_be_read(folder: Path) -> None:
    async with cluster(length_boundary_tokens=300) as served:
        engine = served.decode[0]
        assert isinstance(engine.info, dict)
        engine.info = {**engine.info, "tokenizer_path": str(folder)}
        served.worker(engine.url).has_info = False
        await served.until(lambda: served.model.tokeniser is not None)
        assert await ask(served, words(290, 6)) == (200, "short")


async def test_a_tokenizer_that_cannot_be_read_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": "nonsense"}')
    async with cluster(tokenizer_path=str(tmp_path)) as served:
        assert served.model.tokeniser is None
        assert await ask(served, "x") == (200, "short")


async def test_many_at_once(folder: Path) -> None:
    async with cluster(tokenizer_path=str(folder), length_boundary_tokens=300) as served:
        for engine in (*served.short, *served.long):
            engine.script = reply({"text": "ok"})  # without a token count, which would teach the estimator
        answers = await asyncio.gather(*(ask(served, f"{i} " + words(279 + i, 5)) for i in range(40)))
        assert [length_class for _, length_class in answers] == ["short"] * 21 + ["long"] * 19

"""Exact counts off the loop, only for prompts whose class is in doubt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sglang_ext_router.decide.block_index import PromptKind, TokenBlocks
from sglang_ext_router.instances.workers import HeldBlocks, TokenSource
from sglang_ext_router.request.tokenising import (
    MAX_BODY_BYTES,
    MAX_WAITING_BYTES,
    PromptTokeniser,
    TokenisedPrompt,
    Tokenisers,
)
from support.router_process import Cluster, cluster
from support.scripted_engine import reply
from support.tiny_model import tiny_model


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
    tokeniser = Tokenisers(asyncio.get_running_loop()).of(TokenSource(str(folder)))
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
    assert (
        tokenisers.of(TokenSource(""))
        is tokenisers.of(TokenSource("org/model"))
        is tokenisers.of(TokenSource(str(tmp_path)))
        is None
    )
    assert tokenisers.of(TokenSource(str(folder))) is tokenisers.of(TokenSource(str(folder))) is not None
    tokenisers.close()


# -- tokens of whole bodies -------------------------------------------------------------------------------------

TEXTS = frozenset({PromptKind.TEXTS})


async def read(
    tokeniser: PromptTokeniser, body: dict[str, object], path: bytes = b"/generate"
) -> TokenisedPrompt | None:
    future: asyncio.Future[TokenisedPrompt | None] = asyncio.get_running_loop().create_future()
    tokeniser.read(path, json.dumps(body).encode(), TEXTS, future.set_result)
    return await asyncio.wait_for(future, 20.0)


async def test_a_text_has_its_tokens_blocks(folder: Path) -> None:
    tokeniser = PromptTokeniser(folder / "tokenizer.json", asyncio.get_running_loop())
    for path, name in ((b"/generate", "text"), (b"/v1/completions", "prompt")):
        for given in ("a b c", ["a b c"]):
            got = await read(tokeniser, {name: given}, path)
            assert got is not None
            assert (got.blocks.tokens, got.needs) == (3, TEXTS)
    salted = await read(tokeniser, {"text": "a b c", "cache_salt": "x"})
    assert salted is not None
    assert salted.blocks.seed
    tokeniser.close()


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a", "lora_path": "x"},
        {"text": "a", "session_params": {"id": "1"}},
        {"text": ["a", "b"]},
        {"prompt": "a"},
        {"text": "a", "model": "base:adapter"},
        ["no object"],
    ],
)
async def test_bodies_without_known_blocks(folder: Path, body: dict[str, object]) -> None:
    tokeniser = PromptTokeniser(folder / "tokenizer.json", asyncio.get_running_loop())
    assert await read(tokeniser, body) is None
    assert await read(tokeniser, {"prompt": "a", "suffix": "b"}, b"/v1/completions") is None
    assert await read(tokeniser, {"messages": [{"role": "user", "content": "a"}]}, b"/v1/chat/completions") is None
    tokeniser.close()


async def test_the_same_chat_in_three_forms(tmp_path: Path) -> None:
    """Prefixes are not parted by the same in all of them: SGLang's form of Anthropic's messages has no salt."""
    source = TokenSource(str(tiny_model()))
    tokeniser = Tokenisers(asyncio.get_running_loop()).of(source)
    assert tokeniser is not None
    said = [{"role": "user", "content": "a é"}]
    every = frozenset(PromptKind)

    async def blocks(path: str, body: dict[str, object]) -> TokenisedPrompt | None:
        future: asyncio.Future[TokenisedPrompt | None] = asyncio.get_running_loop().create_future()
        tokeniser.read(path.encode(), json.dumps(body).encode(), every, future.set_result)
        return await asyncio.wait_for(future, 20.0)

    chat = await blocks("/v1/chat/completions", {"messages": said})
    salted = {"messages": said, "cache_salt": "x"}
    messages = await blocks("/v1/messages", salted)
    response = await blocks("/v1/responses", {"input": "a é"})
    assert chat is not None
    assert messages is not None
    assert response is not None
    assert chat.blocks == messages.blocks == response.blocks
    salted_chat = await blocks("/v1/chat/completions", salted)
    assert salted_chat is not None
    assert salted_chat.blocks != chat.blocks
    assert chat.needs == {PromptKind.CHATS}
    assert messages.needs == {PromptKind.CHATS, PromptKind.MESSAGES}
    assert response.needs == {PromptKind.CHATS, PromptKind.RESPONSES}
    thinking = await blocks("/v1/messages", {"messages": said, "thinking": {"type": "adaptive"}})
    assert thinking is not None
    assert thinking.needs == every - {PromptKind.TEXTS, PromptKind.TOOLS, PromptKind.RESPONSES}
    tokeniser.close()


async def test_a_response_of_other_tokens_is_no_longer_read(folder: Path) -> None:
    """An instance cannot be asked about `/v1/responses`: its replies show how it reads them."""
    async with cluster(tokenizer_path=str(tiny_model())) as served:
        worker = served.worker(served.short[0].url)
        held = worker.held_blocks = HeldBlocks(16)
        held.sources = (served.router.planner.prefixes.blocks.add_source(),)
        read = frozenset({PromptKind.CHATS, PromptKind.RESPONSES})
        worker.alike = served.model.alike = read
        body = {"input": "words " * 100}
        tokeniser = served.model.tokeniser
        assert tokeniser is not None
        own = len(tokeniser.ids(b"/v1/responses", body, read)[0])
        for tokens, alike in ((own, read), (own + 1, {PromptKind.CHATS})):
            served.decode[0].script = reply({"id": "resp_1", "usage": {"input_tokens": tokens, "output_tokens": 1}})
            assert (await served.ask("POST", "/v1/responses", body)).status == 200
            assert worker.alike == served.model.alike == alike
        assert served.router.metrics.tokenised_for_blocks == 2
        assert (await served.ask("POST", "/v1/responses", body)).status == 200
        assert served.router.metrics.tokenised_for_blocks == 2


async def test_too_much_is_not_begun(folder: Path) -> None:
    tokeniser = PromptTokeniser(folder / "tokenizer.json", asyncio.get_running_loop())
    assert tokeniser.can_read(b"/generate", MAX_BODY_BYTES)
    assert not tokeniser.can_read(b"/generate", MAX_BODY_BYTES + 1)
    assert tokeniser.can_read(b"/v1/messages", 1)
    assert not tokeniser.can_read(b"/v1/embeddings", 1)
    waiting = [asyncio.create_task(read(tokeniser, {"text": "x" * (MAX_WAITING_BYTES // 2)})) for _ in range(3)]
    await asyncio.sleep(0)
    assert not tokeniser.can_read(b"/generate", 1)
    await asyncio.gather(*waiting)
    assert tokeniser.can_read(b"/generate", 1)
    tokeniser.close()


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


async def test_a_text_goes_where_its_blocks_are_reported(folder: Path) -> None:
    async with cluster(tokenizer_path=str(folder), short=2) as served:
        text = words(300, 6)
        blocks = TokenBlocks(bytes(8 * 300)).of(16)
        for number, engine in enumerate(served.short):
            worker = served.worker(engine.url)
            held = worker.held_blocks = HeldBlocks(16)
            held.is_whole = True
            held.sources = (served.router.planner.prefixes.blocks.add_source(),)
            if number == 1:
                served.router.planner.prefixes.blocks.store(
                    held.sources[0], [blocks.key(i) for i in range(blocks.count)]
                )

        def cached() -> int:
            return served.router.metrics.cached_tokens

        assert await ask(served, "y" + text) == (200, "short")
        assert (cached(), served.router.metrics.tokenised_for_blocks) == (0, 0)  # no instance reads texts alike
        worker = served.worker(served.short[1].url)
        worker.alike = served.model.alike = TEXTS
        for sent in range(3):
            assert (await served.ask("POST", "/generate", {"text": text})).headers["x-sglang-ext-prefill"] == worker.url
            assert (cached(), served.router.metrics.tokenised_for_blocks) == (288 * (sent + 1), sent + 1)

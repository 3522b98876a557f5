"""Speculative decoding on CPUs: the tokens of the model alone, drafts that are right as often divided as undivided."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.types import Role
from support.draft_models import drafted, drafted_greedy
from support.engines import FLEET, Engine, EngineError, EngineSpec
from support.laps import Pair
from support.model_families import family, family_greedy
from support.pd import send_both

pytestmark = pytest.mark.integration
NEW_TOKENS = 32
STEPS = 3
HANDSHAKE = ("--transfer-backend", "handshake")
BY_LAYER = ("--set", "transfer.stream_layer_kib=0")
TCP = ("--transfer-backend", "sglang_ext_tcp")
POOL = ("--max-total-tokens", "8192")
CHUNKS = ("--chunked-prefill-size", "128")
CACHING = ("--disaggregation-decode-enable-radix-cache",)


def prompts() -> list[list[int]]:
    """One of a few tokens, and two of a chunk and of more than two."""
    return [random_prompt(tokens, tokens) for tokens in (5, 40, 300)]


def random_prompt(tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(6, 2048) for _ in range(tokens)]


def spec(architecture: str, role: Role, *arguments: str, options: tuple[str, ...] = ()) -> EngineSpec:
    model = drafted(architecture)
    arguments = (*POOL, *model.options(STEPS), *arguments)
    return EngineSpec(role, arguments=arguments, worker_options=("--model-path", str(model.model), *options))


def replies(prompt: list[int], prefill: Engine, decode: Engine | None = None) -> tuple[list[int], list[int]]:
    """The tokens of a greedy reply, and of how many verifications 0, 1, … drafts stayed."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    reply = prefill.post("/generate", body) if decode is None else send_both(prefill, decode, body)[1]
    assert reply.status == 200, reply.body
    kept: list[int] = reply.body["meta_info"]["spec_correct_drafts_histogram"]
    return reply.body["output_ids"], kept + [0] * (STEPS + 1 - len(kept))


@pytest.mark.parametrize(
    ("architecture", "transfer", "ranks"),
    [
        ("DeepseekV3ForCausalLM", HANDSHAKE, (1, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("DeepseekV3ForCausalLM", TCP, (1, 1)),
                ("DeepseekV3ForCausalLM", HANDSHAKE, (2, 1)),
                ("DeepseekV3ForCausalLM", HANDSHAKE, (1, 2)),
                ("Glm4MoeLiteForCausalLM", HANDSHAKE, (1, 1)),
                ("Glm4MoeLiteForCausalLM", TCP, (1, 1)),
                ("LlamaForCausalLM", HANDSHAKE, (1, 1)),
                ("LlamaForCausalLM", HANDSHAKE, (2, 1)),
                ("LlamaForCausalLM", HANDSHAKE, (1, 2)),
                ("LlamaForCausalLM", TCP, (1, 1)),
            )
        ),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) and isinstance(value[1], str) else str(value),
)
def test_drafts_are_right_as_often_as_undivided(
    architecture: str, transfer: tuple[str, ...], ranks: tuple[int, int]
) -> None:
    """A draft attends to the whole prompt: without its KV others would be proposed. Two queues, chunks, cached
    prefixes on both sides."""
    prefill_ranks, decode_ranks = (("--tp", str(count)) for count in ranks)
    by_layer = (*transfer, *BY_LAYER) if transfer == HANDSHAKE else transfer
    plain, prefill, decode = FLEET.get(
        spec(architecture, Role.PLAIN),
        spec(architecture, Role.BOTH, *CHUNKS, *prefill_ranks, options=by_layer),
        spec(architecture, Role.DECODE, *CACHING, *decode_ranks, options=transfer),
    )
    try:
        wanted = [replies(prompt, plain) for prompt in prompts()]
        assert [tokens for tokens, _ in wanted] == [
            drafted_greedy(architecture, prompt, NEW_TOKENS) for prompt in prompts()
        ]
        assert all(sum(kept[1:]) for _, kept in wanted)
        for turn in range(2):
            for prompt, reply in zip(prompts(), wanted, strict=True):
                assert replies(prompt, prefill, decode) == reply, (turn, len(prompt))
    finally:
        for engine in (plain, prefill, decode):
            engine.stop()


@pytest.mark.full
def test_a_draft_that_is_the_model_itself_is_right_where_the_model_is() -> None:
    """It sees the prompt without its first token, as a draft does, and Hugging Face says what it proposes."""
    architecture = "LlamaForCausalLM"
    model = ("--model-path", str(family(architecture)))
    drafts = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(family(architecture)))
    steps = ("--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1")
    counts = ("--speculative-num-draft-tokens", str(STEPS + 1))
    (engine,) = FLEET.get(EngineSpec(Role.PLAIN, arguments=(*POOL, *drafts, *steps, *counts), worker_options=model))
    try:
        for prompt in prompts():
            tokens, kept = replies(prompt, engine)
            behind = family_greedy(architecture, prompt, NEW_TOKENS + STEPS, has_cache=True)
            assert tokens == behind[:NEW_TOKENS]
            assert kept == wanted_drafts(architecture, prompt, behind)
    finally:
        engine.stop()


def wanted_drafts(architecture: str, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return of how many verifications 0, 1, … drafts stay where the model drafts for itself."""
    counts, known = [0] * (STEPS + 1), 1
    while known < NEW_TOKENS:
        drafts = family_greedy(architecture, [*prompt, *tokens[:known]][1:], STEPS, has_cache=True)
        right = next((place for place in range(STEPS) if drafts[place] != tokens[known + place]), STEPS)
        counts[right] += 1
        known += right + 1
    return counts


@pytest.mark.full
def test_replies_are_drawn_where_a_request_has_a_temperature() -> None:
    """SGLang would keep the likeliest token there; of few replies hardly two are equal, and greedy ones are."""
    architecture = "LlamaForCausalLM"
    (engine,) = FLEET.get(spec(architecture, Role.PLAIN))
    try:
        greedy = drafted_greedy(architecture, prompts()[1], NEW_TOKENS)
        found = []
        for sampling in ({"temperature": 1.5}, {"temperature": 1.5, "top_k": 1}):
            parameters = {**sampling, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            body = {"input_ids": [prompts()[1]] * 6, "sampling_params": parameters}
            reply = engine.post("/generate", body)
            assert reply.status == 200, reply.body
            found.append([one["output_ids"] for one in reply.body])
        drawn, likeliest = found
        assert len({tuple(tokens[1:]) for tokens in drawn}) == 6  # the first token is prefill's
        assert likeliest == [greedy] * 6
    finally:
        engine.stop()


@pytest.mark.full
def test_two_queues_with_drafts_under_any_interleaving() -> None:
    """Prompts in chunks between short ones, shared prefixes and aborts: every other answer is exact, and no slot is
    lost."""
    architecture = "DeepseekV3ForCausalLM"
    laps = ("--laps-boundary-tokens", "64", "--set", "laps.min_chunk_tokens=16")
    prefill, decode = FLEET.get(
        spec(architecture, Role.BOTH, "--chunked-prefill-size", "32", options=(*laps, *HANDSHAKE)),
        spec(architecture, Role.DECODE, *CACHING, options=HANDSHAKE),
    )
    draw = random.Random(5)
    try:
        with ThreadPoolExecutor(40) as threads:
            pair = Pair(prefill, decode, threads)
            prefill.wait_idle()
            pair.flush()
            before = pair.status()["kv"]["free_tokens"]
            prefixes = [random_prompt(tokens, tokens) for tokens in (0, 100, 333)]
            sent = []
            for number in range(16):
                prefix = draw.choice(prefixes)
                request = pair.send(
                    len(prefix) + draw.choice((7, 30, 60, 500)), number, rid=f"{number}", prefix=prefix, new_tokens=12
                )
                sent.append((f"{number}", request))
                if draw.random() < 0.3:
                    pair.abort(draw.choice(sent)[0])
            for _, request in sent:
                _, reply = request.replies.result(timeout=120)
                if reply.status == 200 and reply.body["meta_info"]["finish_reason"]["type"] != "abort":
                    assert reply.body["output_ids"] == drafted_greedy(architecture, list(request.prompt), 12)
            pair.check_clean(before)
    finally:
        prefill.stop()
        decode.stop()


@pytest.mark.full
@pytest.mark.parametrize("drafting", [Role.SHORT, Role.DECODE])
def test_a_pair_of_which_one_drafts_is_refused(drafting: Role) -> None:
    architecture = "LlamaForCausalLM"
    model = ("--model-path", str(drafted(architecture).model), *HANDSHAKE)
    prefill, decode = FLEET.get(
        *(
            spec(architecture, role, options=HANDSHAKE)
            if role is drafting
            else EngineSpec(role, arguments=POOL, worker_options=model)
            for role in (Role.SHORT, Role.DECODE)
        )
    )
    try:
        body = {"input_ids": prompts()[1], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        _, reply = send_both(prefill, decode, body)
        assert reply.status == 500
        # Whichever notices first: a rank whose peer has another pool, or decode, which is offered other layers.
        assert "one of the two has a draft model" in str(reply.body) or "; asked for: " in str(reply.body)
    finally:
        prefill.stop()
        decode.stop()


@pytest.mark.full
def test_trees_of_drafts_are_refused_at_start() -> None:
    model = drafted("LlamaForCausalLM")
    tree = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(model.draft))
    engine = Engine.start(EngineSpec(Role.PLAIN, arguments=tree, worker_options=("--model-path", str(model.model))))
    try:
        with pytest.raises(EngineError):
            engine.wait_ready()
        assert "does not run on a CPU without AMX (drafts are chains there" in engine.log_path.read_text()
    finally:
        engine.stop()

"""Models of many families give Hugging Face's tokens, undivided and divided, over both transfers of this project."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.transfer.sglang.transfer_backend import WINDOWS
from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineError, EngineSpec
from support.laps import NEW_TOKENS as LAPS_NEW_TOKENS
from support.laps import Pair
from support.model_families import FAMILIES, REFUSED_WINDOW, WINDOW, family, family_greedy
from support.pd import greedy, send_both
from support.served_pool import SharedPrompts, share_prompts

pytestmark = pytest.mark.integration
NEW_TOKENS = 12
SERVED = [architecture for architecture in FAMILIES if architecture != REFUSED_WINDOW]
DIVIDED = [architecture for architecture, one in FAMILIES.items() if one.divides_states]
HANDSHAKE = ("--transfer-backend", "handshake")
BY_LAYER = ("--set", "transfer.stream_layer_kib=0")
TCP = ("--transfer-backend", "sglang_ext_tcp")
# In the default suite, with the transfer that they are tested over there.
IN_TEST = {
    "DeepseekV3ForCausalLM": HANDSHAKE,
    "GptOssForCausalLM": HANDSHAKE,
    "Gemma2ForCausalLM": TCP,
    "Qwen3MoeForCausalLM": TCP,
    "Qwen3NextForCausalLM": HANDSHAKE,
}
CHUNKS = ("--chunked-prefill-size", "128")
CACHING = ("--disaggregation-decode-enable-radix-cache",)
# Each rank of a model with recurrent states fills a pool of them, which by default takes most of a machine's memory.
FEW_STATES = ("--max-total-tokens", "8192", "--max-running-requests", "16", "--max-mamba-cache-size", "64")


def spec(
    architecture: str, role: Role, arguments: tuple[str, ...] = (), options: tuple[str, ...] = (), name: str = ""
) -> EngineSpec:
    options = ("--model-path", str(family(architecture)), *options)
    return EngineSpec(role, arguments=arguments, worker_options=options, name=name)


def prompts() -> list[list[int]]:
    """One within the window, one a little longer, one of several windows and of more than one chunk."""
    return [random_prompt(tokens, tokens) for tokens in (5, 40, 300)]


def random_prompt(tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(6, 2048) for _ in range(tokens)]


@pytest.mark.parametrize(
    ("architecture", "transfer"),
    [
        pytest.param(
            *(architecture, transfer),
            id=f"{architecture}-{transfer[1]}",
            marks=() if IN_TEST.get(architecture) == transfer else pytest.mark.full,
        )
        for architecture in SERVED
        for transfer in (HANDSHAKE, TCP)
    ],
)
def test_tokens_are_those_of_the_model(architecture: str, transfer: tuple[str, ...]) -> None:
    wanted = [family_greedy(architecture, prompt, NEW_TOKENS) for prompt in prompts()]
    # Two queues, prompts in chunks, and replies that leave the window behind them.
    options = (*transfer, *BY_LAYER) if transfer == HANDSHAKE else transfer
    prefill, decode = FLEET.get(
        spec(architecture, Role.BOTH, CHUNKS, options), spec(architecture, Role.DECODE, (), transfer)
    )
    try:
        assert [greedy(prefill, decode, prompt, NEW_TOKENS) for prompt in prompts()] == wanted
        assert [greedy(prefill, decode, prompt, NEW_TOKENS) for prompt in prompts()] == wanted  # behind what is cached
    finally:
        prefill.stop()
        decode.stop()


@pytest.mark.full
@pytest.mark.parametrize("architecture", SERVED)
def test_tokens_of_an_undivided_instance(architecture: str) -> None:
    (engine,) = FLEET.get(spec(architecture, Role.PLAIN))
    try:
        for prompt in prompts():
            assert undivided(engine, prompt) == family_greedy(architecture, prompt, NEW_TOKENS)
    finally:
        engine.stop()


def undivided(engine: Engine, prompt: list[int]) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    reply = engine.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
    assert reply.status == 200, reply.body
    tokens: list[int] = reply.body["output_ids"]
    return tokens


def check_two_turns(architecture: str, prefill: Engine, decode: Engine) -> None:
    """Compare all prompts with the model's own tokens, twice: the second time behind cached prefixes."""
    try:
        for turn in range(2):
            for prompt in prompts():
                wanted = family_greedy(architecture, prompt, NEW_TOKENS)
                assert greedy(prefill, decode, prompt, NEW_TOKENS) == wanted, (turn, len(prompt))
    finally:
        prefill.stop()
        decode.stop()


@pytest.mark.full
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"])
def test_latent_rows_between_other_numbers_of_ranks(architecture: str, prefill_ranks: int, decode_ranks: int) -> None:
    """Each decode rank gets all rows once; one prefill rank sends them, layer by layer."""
    prefill, decode = FLEET.get(
        spec(architecture, Role.SHORT, (*CHUNKS, "--tp", str(prefill_ranks)), (*HANDSHAKE, *BY_LAYER)),
        spec(architecture, Role.DECODE, ("--tp", str(decode_ranks), *CACHING), HANDSHAKE),
    )
    check_two_turns(architecture, prefill, decode)


@pytest.mark.full
@pytest.mark.parametrize("transfer", [HANDSHAKE, TCP], ids=["handshake", "tcp"])
def test_latent_rows_of_a_prefill_in_stages(transfer: tuple[str, ...]) -> None:
    architecture = "DeepseekV3ForCausalLM"
    prefill, decode = FLEET.get(
        spec(architecture, Role.SHORT, (*CHUNKS, "--pp-size", "2"), transfer),
        spec(architecture, Role.DECODE, (), transfer),
    )
    try:
        for prompt in prompts():
            assert greedy(prefill, decode, prompt, NEW_TOKENS) == family_greedy(architecture, prompt, NEW_TOKENS)
    finally:
        prefill.stop()
        decode.stop()


@pytest.mark.full
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks", "page"), [(1, 2, 1), (2, 1, 1), (2, 1, 16), (1, 2, 16)])
@pytest.mark.parametrize("architecture", ["GptOssForCausalLM", "LagunaForCausalLM"])
def test_windows_between_other_numbers_of_ranks(
    architecture: str, prefill_ranks: int, decode_ranks: int, page: int
) -> None:
    """Each prefill rank sends its heads of what the windows still need, to each decode rank that wants some."""
    pages = ("--page-size", str(page))
    prefill, decode = FLEET.get(
        spec(architecture, Role.SHORT, (*CHUNKS, *pages, "--tp", str(prefill_ranks)), (*HANDSHAKE, *BY_LAYER)),
        spec(architecture, Role.DECODE, ("--tp", str(decode_ranks), *pages, *(CACHING if page > 1 else ())), HANDSHAKE),
    )
    check_two_turns(architecture, prefill, decode)


@pytest.mark.full
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("architecture", DIVIDED)
def test_recurrent_states_between_other_numbers_of_ranks(
    architecture: str, prefill_ranks: int, decode_ranks: int
) -> None:
    """Each prefill rank sends its pieces of the states behind its heads."""
    prefill, decode = FLEET.get(
        spec(architecture, Role.SHORT, (*CHUNKS, *FEW_STATES, "--tp", str(prefill_ranks)), (*HANDSHAKE, *BY_LAYER)),
        spec(architecture, Role.DECODE, ("--tp", str(decode_ranks), *FEW_STATES, *CACHING), HANDSHAKE),
    )
    check_two_turns(architecture, prefill, decode)


@pytest.mark.full
def test_other_recurrent_states_go_between_ranks_of_one_number() -> None:
    """Without KV heads there is nothing that pieces could travel with. A router pairs no others; without one the
    request fails and says why."""
    architecture = "Mamba2ForCausalLM"
    ranks = (*FEW_STATES, "--tp", "2")
    prefill, decode, other = FLEET.get(
        spec(architecture, Role.SHORT, (*CHUNKS, *ranks), HANDSHAKE),
        spec(architecture, Role.DECODE, ranks, HANDSHAKE),
        spec(architecture, Role.DECODE, FEW_STATES, HANDSHAKE),
    )
    try:
        for prompt in prompts():
            assert greedy(prefill, decode, prompt, NEW_TOKENS) == family_greedy(architecture, prompt, NEW_TOKENS)
        body = {"input_ids": prompts()[1], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        _, reply = send_both(prefill, other, body)
        assert reply.status == 500
        assert "both need one tensor parallel size" in str(reply.body)
    finally:
        for engine in (prefill, decode, other):
            engine.stop()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as executor:
        yield executor


@pytest.mark.parametrize(
    ("architecture", "transfer", "page"),
    [
        ("DeepseekV3ForCausalLM", HANDSHAKE, 1),
        pytest.param("DeepseekV3ForCausalLM", TCP, 16, marks=pytest.mark.full),
        pytest.param("Glm4MoeLiteForCausalLM", HANDSHAKE, 16, marks=pytest.mark.full),
        pytest.param("GptOssForCausalLM", HANDSHAKE, 1, marks=pytest.mark.full),
        pytest.param("GptOssForCausalLM", TCP, 16, marks=pytest.mark.full),
        pytest.param("Gemma3ForCausalLM", HANDSHAKE, 16, marks=pytest.mark.full),
        pytest.param("Qwen3NextForCausalLM", HANDSHAKE, 1, marks=pytest.mark.full),
        pytest.param("FalconH1ForCausalLM", TCP, 1, marks=pytest.mark.full),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else str(value),
)
def test_two_queues_under_any_interleaving(
    architecture: str, transfer: tuple[str, ...], page: int, threads: ThreadPoolExecutor
) -> None:
    """Long prompts park for short ones where these come in time, share prefixes, and are aborted in any stage, on both
    instances or one: every other answer is exact, and no slot of any pool is lost."""
    pages = ("--page-size", str(page))
    caching = () if WINDOWS in FAMILIES[architecture].states and page == 1 else CACHING
    chunks, laps = (
        ("--chunked-prefill-size", "32"),
        ("--laps-boundary-tokens", "64", "--set", "laps.min_chunk_tokens=16"),
    )
    prefill, decode = FLEET.get(
        spec(architecture, Role.BOTH, (*chunks, *pages), (*laps, *transfer)),
        spec(architecture, Role.DECODE, (*pages, *caching), transfer),
    )
    draw, draw_side = random.Random(architecture), random.Random(architecture)
    pair = Pair(prefill, decode, threads)
    try:
        prefill.wait_idle()
        pair.flush()
        before = pair.status()["kv"]["free_tokens"]
        prefixes = [random_prompt(tokens, tokens) for tokens in (0, 100, 333)]
        for turn in range(2):
            sent = []
            for number in range(10):
                prefix = draw.choice(prefixes)
                tokens = len(prefix) + draw.choice((7, 30, 60, 500, 900))
                rid = f"{turn}-{number}"
                priority = draw.choice(("low", "normal", "high"))
                request = pair.send(tokens, 100 * turn + number, rid=rid, priority=priority, prefix=prefix)
                sent.append((rid, request))
                if draw.random() < 0.3:
                    # One leg's end fails the transfer of the other.
                    pair.abort(draw.choice(sent)[0], *draw_side.choice(((), (prefill,), (decode,))))
            for _, request in sent:
                _, reply = request.replies.result(timeout=120)
                is_aborted = reply.status != 200 or reply.body["meta_info"]["finish_reason"]["type"] == "abort"
                if not is_aborted:
                    wanted = family_greedy(architecture, request.prompt, LAPS_NEW_TOKENS, has_cache=True)
                    # Prefill may have been aborted alone, when decode had all that it needs.
                    assert reply.body["output_ids"] == wanted
        pair.check_clean(before)
    finally:
        prefill.stop()
        decode.stop()


@pytest.mark.full
@pytest.mark.parametrize(
    "architecture",
    [
        *("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "Qwen3MoeForCausalLM"),
        *("GptOssForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo3ForCausalLM", "Cohere2ForCausalLM"),
        *("Cohere2MoeForCausalLM", "GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"),
        *("LagunaForCausalLM", "MellumForCausalLM"),
    ],
)
def test_long_prompts_on_two_members_of_a_pool(architecture: str, threads: ThreadPoolExecutor) -> None:
    """Members send what they compute to decode, and a later turn is computed behind the rows that they keep; where
    windows have a pool of their own, the prompt's own instance collects it first."""
    check_two_members(architecture, (), threads)


@pytest.mark.full
def test_the_ranks_of_a_member_divide_the_experts(threads: ThreadPoolExecutor) -> None:
    check_two_members("Qwen3MoeForCausalLM", ("--tp", "2", "--ep-size", "2"), threads)


def check_two_members(architecture: str, ranks: tuple[str, ...], threads: ThreadPoolExecutor) -> None:
    pages = ("--page-size", "16")
    model = ("--model-path", str(family(architecture)))
    prompts = SharedPrompts(
        lambda number, *_: number,
        lambda prompt: family_greedy(architecture, prompt, LAPS_NEW_TOKENS),
        "requests_collected" if FAMILIES[architecture].states else "requests_streamed",
    )
    decode = spec(architecture, Role.DECODE, pages, HANDSHAKE)
    share_prompts(threads, (*pages, *ranks), (*model, *HANDSHAKE), decode, prompts)


def test_a_window_that_sglang_leaves_out_is_refused_where_prompts_may_be_longer() -> None:
    engine = Engine.start(spec(REFUSED_WINDOW, Role.PLAIN))
    try:
        with pytest.raises(EngineError):
            engine.wait_ready()
        assert f"MistralForCausalLM attends to {WINDOW} tokens, which SGLang leaves out" in engine.log_path.read_text()
    finally:
        engine.stop()

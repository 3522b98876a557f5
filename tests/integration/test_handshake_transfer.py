"""KV that travels by handshake between real engines gives the tokens of Hugging Face."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import pytest

from sglang_ext.types import Role
from support import mooncake_folder, nixl_folder
from support.engines import FLEET, Engine, EngineSpec
from support.pd import greedy, new_room
from support.reference import greedy_reference, random_prompt
from support.tiny_model import TinyModelShape

pytestmark = pytest.mark.integration

Pair: TypeAlias = tuple[Engine, Engine]

HANDSHAKE = ("--transfer-backend", "handshake")
SHARED_MEMORY = (*HANDSHAKE, "--transfer-transport", "shared_memory")
CHUNK = ("--chunked-prefill-size", "256")
PAGES = ("--page-size", "16")
CACHING = ("--disaggregation-decode-enable-radix-cache",)
PREFILL = EngineSpec(Role.SHORT, arguments=CHUNK, worker_options=HANDSHAKE)
DECODE = EngineSpec(Role.DECODE, arguments=CACHING, worker_options=(*HANDSHAKE, "--set", "transfer.receive_backends=1"))
DECODE_TP2 = EngineSpec(Role.DECODE, arguments=("--tp", "2"), worker_options=HANDSHAKE)
BY_LAYER = ("--set", "transfer.stream_layer_kib=0")
PAGED_PREFILL = EngineSpec(Role.SHORT, arguments=(*CHUNK, *PAGES), worker_options=(*SHARED_MEMORY, *BY_LAYER))
PAGED_DECODE = EngineSpec(
    Role.DECODE, arguments=(*PAGES, *CACHING), worker_options=(*SHARED_MEMORY, "--set", "transfer.receive_backends=2")
)
NIXL = (*HANDSHAKE, "--transfer-transport", "nixl")
# Engines that find a package in a folder of its own make their own imports.
NIXL_PREFILL = EngineSpec(
    Role.SHORT,
    arguments=CHUNK,
    worker_options=(*NIXL, *BY_LAYER),
    environment=nixl_folder.ENVIRONMENT,
    has_own_imports=True,
)
NIXL_DECODE = EngineSpec(
    Role.DECODE,
    arguments=CACHING,
    worker_options=(*NIXL, "--set", "transfer.receive_backends=2"),
    environment=nixl_folder.ENVIRONMENT,
    has_own_imports=True,
)
MOONCAKE = (*HANDSHAKE, "--transfer-transport", "mooncake")
MOONCAKE_PREFILL = EngineSpec(
    Role.SHORT,
    arguments=CHUNK,
    worker_options=(*MOONCAKE, *BY_LAYER),
    environment=mooncake_folder.ENVIRONMENT,
    has_own_imports=True,
)
MOONCAKE_DECODE = EngineSpec(
    Role.DECODE,
    arguments=CACHING,
    worker_options=(*MOONCAKE, "--set", "transfer.receive_backends=2"),
    environment=mooncake_folder.ENVIRONMENT,
    has_own_imports=True,
)
PAIRS = {
    "page 1, one backend": (PREFILL, DECODE),
    "page 16, two backends, shared memory": (PAGED_PREFILL, PAGED_DECODE),
    "decode tp 2": (PREFILL, DECODE_TP2),
}
TESTED = "page 16, two backends, shared memory"  # the others with all tests
# Two ranks hold three KV heads as four: the fourth is padding and does not travel.
THREE_HEADS = TinyModelShape(hidden=48, heads=3, kv_heads=3)
# Around the page of 16 and the chunk of 256 tokens, and over several chunks.
LENGTHS = (1, 2, 15, 16, 17, 100, 255, 256, 257, 511, 700)
NEW_TOKENS = 12
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers × keys and values × KV heads × head size × float32


@pytest.fixture(
    scope="module",
    params=[
        *(
            pytest.param(pair, id=name, marks=() if name == TESTED else pytest.mark.full)
            for name, pair in PAIRS.items()
        ),
        pytest.param((NIXL_PREFILL, NIXL_DECODE), id="nixl", marks=(pytest.mark.full, nixl_folder.needs_nixl)),
        pytest.param(
            (MOONCAKE_PREFILL, MOONCAKE_DECODE),
            id="mooncake",
            marks=(pytest.mark.full, mooncake_folder.needs_mooncake),
        ),
    ],
)
def pair(request: pytest.FixtureRequest) -> Pair:
    prefill, decode = FLEET.get(*request.param)
    return prefill, decode


def metric(engine: Engine, name: str) -> float:
    """The sum of a metric over its labels."""
    found = re.findall(rf"^sglang_ext:transfer_{name}(?:\{{[^}}]*\}})? (\S+)$", engine.get("/metrics").body, re.M)
    return sum(map(float, found))


def settled(engine: Engine, name: str) -> float:
    """A metric once it has not changed for longer than the interval at which it is published."""
    value, since_s = metric(engine, name), time.monotonic()
    while time.monotonic() - since_s < 1.5:
        time.sleep(0.2)
        if metric(engine, name) != value:
            value, since_s = metric(engine, name), time.monotonic()
    return value


def test_prompts_of_every_length(pair: Pair) -> None:
    for length in LENGTHS:
        prompt = random_prompt(length, seed=20_000 + length)
        assert greedy(*pair, prompt, NEW_TOKENS) == greedy_reference(prompt, NEW_TOKENS), length


def test_layers_of_a_chunk_leave_one_by_one(pair: Pair) -> None:
    """A prompt of one chunk: each layer in a write of its own, and with the last page what no layer brought."""
    before = settled(pair[0], "writes_total")
    prompt = random_prompt(160, seed=new_room())
    assert greedy(*pair, prompt, NEW_TOKENS) == greedy_reference(prompt, NEW_TOKENS)
    writes = settled(pair[0], "writes_total") - before
    ranks = 2 if pair[1].spec is DECODE_TP2 else 1
    if BY_LAYER[0] in pair[0].spec.worker_options:
        assert writes == TinyModelShape().layers + 1  # one with the metadata
    else:
        assert writes == 2 * ranks  # each decode rank gets its heads, and the metadata


def test_turns_that_extend_what_is_cached(pair: Pair) -> None:
    """Prefill caches always, decode where it is told to: then it asks for what it has not cached only."""
    prompt = random_prompt(150, seed=new_room())
    is_cached_at_decode = CACHING[0] in pair[1].spec.arguments
    for turn in range(4):
        before_bytes = settled(pair[0], "written_bytes_total")
        assert greedy(*pair, prompt, NEW_TOKENS) == greedy_reference(prompt, NEW_TOKENS), turn
        sent_tokens = (settled(pair[0], "written_bytes_total") - before_bytes) / TOKEN_BYTES
        if turn > 0 and is_cached_at_decode:
            assert sent_tokens < 150
        else:
            assert sent_tokens >= len(prompt)
        prompt = prompt + greedy_reference(prompt, NEW_TOKENS) + random_prompt(90, seed=100 + turn)


def test_a_prompt_that_decode_has_already(pair: Pair) -> None:
    prompt = random_prompt(64, seed=new_room())
    for _ in range(3):
        assert greedy(*pair, prompt, NEW_TOKENS) == greedy_reference(prompt, NEW_TOKENS)


@pytest.mark.full
def test_more_requests_than_backends(pair: Pair) -> None:
    prompts = [random_prompt(10 + 37 * index, seed=500 + index) for index in range(12)]
    before = settled(pair[1], "requests_total")
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(lambda prompt: greedy(*pair, prompt, NEW_TOKENS), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == greedy_reference(prompt, NEW_TOKENS), len(prompt)
    ranks = 2 if pair[1].spec is DECODE_TP2 else 1
    assert settled(pair[1], "requests_total") - before == 12 * ranks
    for gauge in ("receiving", "receiving_early", "unsettled_permits"):
        assert metric(pair[1], gauge) == 0
    if ranks == 1:
        assert metric(pair[1], "free_backends") == int(pair[1].spec.worker_options[-1].partition("=")[2])
    assert metric(pair[0], "sending") == 0
    for engine in pair:
        engine.wait_idle()


@pytest.mark.full
def test_padded_heads_do_not_travel() -> None:
    prefill, decode = FLEET.get(
        EngineSpec(Role.SHORT, THREE_HEADS, CHUNK, HANDSHAKE),
        EngineSpec(Role.DECODE, THREE_HEADS, ("--tp", "2"), HANDSHAKE),
    )
    for length in (1, 64, 300):
        prompt = random_prompt(length, 30_000 + length, THREE_HEADS)
        assert greedy(prefill, decode, prompt, NEW_TOKENS) == greedy_reference(prompt, NEW_TOKENS, THREE_HEADS), length

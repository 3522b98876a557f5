"""Prefill instances of two pipeline stages, with SGLang's own scheduler and with LAPS."""

from __future__ import annotations

from dataclasses import replace

from sglang_ext.types import Role
from support.engines import EngineSpec
from support.tiny_model import TinyModelShape

# Three layers: the stages have different numbers of them. Three KV heads: for decode on three ranks. Tied embeddings:
# the last stage has the head alone.
SHAPE = TinyModelShape(layers=3, hidden=96, heads=6, kv_heads=3, context_tokens=8192, has_tied_embeddings=True)
CHUNK_TOKENS = 128
STOCK_STAGES = EngineSpec(
    Role.LONG,
    shape=SHAPE,
    arguments=("--pp-size", "2", "--chunked-prefill-size", str(CHUNK_TOKENS)),
    worker_options=("--laps-mode", "off"),
)
_LAPS = EngineSpec(
    Role.BOTH,
    shape=SHAPE,
    worker_options=("--laps-boundary-tokens", "64", "--set", "laps.min_chunk_tokens=16"),
)
STAGES = replace(_LAPS, arguments=("--pp-size", "2", "--chunked-prefill-size", "32"))
TIMED_STAGES = replace(STAGES, environment=(("SGLANG_REQ_RUNNING_TIMEOUT", "15"),))
_HANDSHAKE = ("--transfer-backend", "handshake")
# Chunks of 32 tokens are small: every one of them leaves by layer.
HANDSHAKE_STAGES = replace(
    STAGES, worker_options=(*STAGES.worker_options, *_HANDSHAKE, "--set", "transfer.stream_layer_kib=1")
)
HANDSHAKE_STAGES_TP3 = replace(HANDSHAKE_STAGES, arguments=(*STAGES.arguments, "--tp", "3"))
HANDSHAKE_DECODE = EngineSpec(Role.DECODE, shape=SHAPE, worker_options=_HANDSHAKE)
HANDSHAKE_DECODE_TP3 = replace(HANDSHAKE_DECODE, arguments=("--tp", "3"))
STAGES_TP3 = replace(STAGES, arguments=(*STAGES.arguments, "--tp", "3"))
DECODE = EngineSpec(Role.DECODE, shape=SHAPE)
DECODE_TP3 = EngineSpec(Role.DECODE, shape=SHAPE, arguments=("--tp", "3"))
# One token, a chunk and its neighbours, some chunks, many.
LENGTHS_TOKENS = (1, 2, 3, 17, 64, 127, 128, 129, 255, 256, 257, 300, 511, 700, 1024, 1500, 2047, 2900, 4095, 4096)

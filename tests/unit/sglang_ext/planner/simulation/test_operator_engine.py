"""Prefill times from operator times: by hand, how they grow, and how well the cost models fit them."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.planner.simulation.engines import EngineError, load_engine
from sglang_ext.planner.simulation.host_times import H200_HOST, NO_HOST
from sglang_ext.planner.simulation.operator_engine import (
    FITTED_PROMPT_TOKENS,
    OPERATOR_MODELS,
    PROMPT_TOKENS,
    ROWS,
    SHAPES,
    OperatorModel,
    operator_model,
)

MODELS = [pytest.param(model, id=name) for name, model in OPERATOR_MODELS.items()]
LLAMA = OPERATOR_MODELS["h200-llama3-8b"]


def test_a_prompt_of_a_measured_length_by_hand() -> None:
    # 8,192 tokens: products 5.061 ms, attention 0.8881 ms, and on memory two norms (4 x 4096), rotary embedding and KV
    # (2 x 6144) and activation (3 x 14336) of 2 bytes each at 3.84 TB/s; the output matrix is 128,256 x 4,096.
    on_memory_s = 8192 * 2 * (2 * 4 * 4096 + 2 * 6144 + 3 * 14336) / 3.84e12
    output_s = 3e-6 + 2 * 128_256 * 4096 / 3.84e12
    assert LLAMA.chunk_s(1, 0, 8192) == pytest.approx(32 * (5.061e-3 + 0.8881e-3 + on_memory_s) + output_s)


def test_tensor_parallelism_adds_two_sums_over_all_devices_to_each_layer() -> None:
    # 1,024 tokens of a hidden state of 8,192: two all-reduces of 8,388,608 elements, 0.05548 ms each.
    shape = SHAPES["qwen2.5-72b-tp2"]
    together, on_one = (OperatorModel("any", one).chunk_s(1, 0, 1024) for one in (shape, shape._replace(tp=1)))
    assert together - on_one == pytest.approx(80 * 2 * 0.05548e-3)


def test_between_measured_points_time_is_on_the_line_and_beyond_them_it_grows_on() -> None:
    low, middle, high = (LLAMA.chunk_s(1, 0, tokens) for tokens in (4096, 5120, 6144))
    assert middle == pytest.approx((low + high) / 2)
    # Four times the tokens: the products four times, attention sixteen times.
    shape = LLAMA.shape
    grown = LLAMA.chunk_s(1, 0, 131_072) - LLAMA.chunk_s(1, 0, 32_768)
    at_32k = 32 * 1e-3 * (shape.product_ms[-1], 4 * shape.attention_ms[-1])[1]
    assert grown > 15 * at_32k + 3 * 32 * 1e-3 * shape.product_ms[-1]


def test_a_later_chunk_attends_to_what_is_before_it() -> None:
    whole = LLAMA.chunk_s(1, 0, 16_384)
    halves = LLAMA.chunk_s(1, 0, 8192) + LLAMA.chunk_s(1, 8192, 8192)
    # In halves the products are a little different, a kernel starts once more per layer and the output is read twice.
    assert halves == pytest.approx(whole, rel=0.15)
    assert LLAMA.chunk_s(1, 65_536, 512) > 3 * LLAMA.chunk_s(1, 0, 512)


def test_devices_share_the_work_and_pay_for_the_ring() -> None:
    for tokens in (32_768, 131_072):
        times_s = [LLAMA.chunk_s(size, 0, tokens) for size in (1, 2, 4, 8)]
        assert times_s == sorted(times_s, reverse=True)
        for size, time_s in zip((2, 4, 8), times_s[1:], strict=True):
            assert 0.9 * times_s[0] / size < time_s < 1.3 * times_s[0] / size
    # Short prompts gain nothing: a layer's weights are read by every device.
    assert LLAMA.chunk_s(8, 0, 128) > 0.9 * LLAMA.chunk_s(1, 0, 128)
    # A few tokens behind a long prefix on 8 devices wait for the ring, not for attention.
    assert LLAMA.chunk_s(8, 131_072, 64) > 2 * LLAMA.chunk_s(1, 131_072, 64) / 8


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@given(size=st.sampled_from([1, 2, 4, 8]), cached=st.integers(0, 300_000), new=st.integers(1, 300_000))
def test_more_tokens_take_longer(model: OperatorModel, size: int, cached: int, new: int) -> None:
    # Neighbouring measurements err by a few percent; over twice the tokens that is nothing.
    time_s = model.chunk_s(size, cached, new)
    assert time_s > 0
    assert model.chunk_s(size, cached, 2 * new + 64 * size) > 0.99 * time_s
    assert model.chunk_s(size, cached + 20_000, new) > 0.99 * time_s


@pytest.mark.parametrize("model", MODELS)
def test_the_fits_are_as_good_as_the_document_says(model: OperatorModel) -> None:
    candidates = model.candidates(64)
    assert [one.size for one in candidates] == [size for size in (1, 2, 4, 8) if size * model.shape.tp <= 8]
    for one in candidates:
        errors = [
            abs(one.cost.predict_s(sample.cached_tokens, sample.new_tokens) / sample.duration_s - 1)
            for sample in model.samples(one.size)
        ]
        # Of the smallest model launching bounds most chunks on several devices, which Eq. 1 has no term for.
        assert fmean(errors) < (0.07 if model.name == "qwen2.5-0.5b" else 0.05)
        assert max(errors) < 0.31
    coefficients = model.coefficients()
    for tokens in FITTED_PROMPT_TOKENS:
        assert coefficients.chunk_s(tokens, 0) == pytest.approx(model.iteration_s(1, 0, tokens), rel=0.2)


def test_engines_by_name() -> None:
    engine = load_engine("h200-qwen2.5-32b", largest_size=4, model="Qwen/qwen2.5-32b")
    assert engine.name == "qwen2.5-32b on H200, from operator times and host times"
    assert [one.size for one in engine.candidates] == [1, 2, 4]
    assert engine.coefficients == OPERATOR_MODELS["h200-qwen2.5-32b"].coefficients()
    divided = load_engine("h200-qwen2.5-72b-tp2", model="Qwen/qwen2.5-72b")
    assert [one.size for one in divided.candidates] == [1, 2, 4]
    with pytest.raises(EngineError, match=r"^h200-qwen2.5-32b is of model qwen2.5-32b, not of llama$"):
        load_engine("h200-qwen2.5-32b", model="llama")
    for name in ("h100-llama3-8b", "h200-llama3-8b-bare-eager"):
        with pytest.raises(EngineError, match=r"is neither table1, h200-llama3-8b, .* nor a profile"):
            load_engine(name)


@pytest.mark.parametrize(("name", "measured_s"), [("h200-qwen2.5-32b", 0.0456), ("h200-qwen2.5-72b-tp2", 0.0548)])
def test_a_lone_prompt_takes_what_was_measured(name: str, measured_s: float) -> None:
    """A prompt of 20 tokens, the median of LAPS's authors' prompts, with graphs, from client to client."""
    engine = load_engine(name)
    assert engine.front_end is not None
    model = operator_model(name)
    assert model is not None
    outside_s = engine.front_end.entry_delay_s(20) + engine.front_end.return_delay_s(20)
    assert outside_s + model.iteration_s(1, 0, 20) == pytest.approx(measured_s, rel=0.06)


def test_the_host_is_in_every_part_of_an_engine() -> None:
    host = H200_HOST
    with_host, eager, bare = (operator_model(f"h200-llama3-8b{suffix}") for suffix in ("", "-eager", "-bare"))
    assert with_host is not None and eager is not None and bare is not None  # noqa: PT018 - for the type checker
    device_s = bare.iteration_s(1, 0, 16)
    assert device_s == LLAMA.chunk_s(1, 0, 16)
    assert with_host.iteration_s(1, 0, 16) == pytest.approx(device_s + host.replayed_s + host.request_s)
    # 16 tokens are computed before 32 layers are launched; 8,192 take longer. No graph has chunks on several devices.
    launched_s = 32 * host.launch_s + host.eager_s + host.request_s
    assert eager.iteration_s(1, 0, 16) == pytest.approx(launched_s)
    assert eager.iteration_s(1, 0, 8192) == pytest.approx(LLAMA.chunk_s(1, 0, 8192) + host.eager_s + host.request_s)
    assert with_host.iteration_s(2, 0, 16) == pytest.approx(launched_s)
    assert (bare.front_end(), bare.coefficients().request_s) == (None, 0.0)
    assert with_host.coefficients().request_s == host.request_s
    front_end = with_host.front_end()
    assert front_end is not None
    assert front_end.before_s == pytest.approx(host.front_s + host.way_s / 2)
    assert front_end.after_s == pytest.approx(host.way_s / 2 + LLAMA.chunk_s(1, 0, 1) + host.reply_s)
    # 32 layers of 8 KV heads of 128, keys and values of 2 bytes.
    assert front_end.after_token_s == pytest.approx(131_072 * host.transfer_s_per_byte)
    # 80 layers of 8 KV heads, of which each of two devices has four.
    assert OPERATOR_MODELS["h200-qwen2.5-72b-tp2"].kv_bytes_per_token == 80 * 8 * 128 * 2 * 2
    for plain, slower in zip(bare.candidates(8), with_host.candidates(8), strict=True):
        assert slower.cost.predict_s(0, 65_536) - plain.cost.predict_s(0, 65_536) == pytest.approx(4e-3, abs=3e-3)


def test_several_devices_launch_more_slowly() -> None:
    host = H200_HOST
    launched_s = 80 * host.launch_tp_s + host.eager_s + 3 * host.request_s
    assert host.iteration_s(1e-3, 80, 2, 3, is_eager=True) == pytest.approx(launched_s)
    assert host.launching_s(80, 2, 3) == pytest.approx(launched_s)
    assert host.launching_s(80, 1, 3) < launched_s
    assert NO_HOST.iteration_s(1e-3, 80, 2, 3, is_eager=True) == 1e-3


def test_the_tables_are_whole() -> None:
    for shape in SHAPES.values():
        assert len(shape.product_ms) == len(ROWS)
        assert len(shape.attention_ms) == len(PROMPT_TOKENS)
        assert list(shape.product_ms[4:]) == sorted(shape.product_ms[4:])
        assert list(shape.attention_ms) == sorted(shape.attention_ms)

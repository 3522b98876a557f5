"""n > 1 becomes a plain batch with distinct rooms; a room counts as used until its request has finished."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOM = 1000


def normalized(**fields: Any) -> Any:
    """A GenerateReqInput after the hooked normalisation."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_ext.engine.hooks.bootstrap_rooms import normalize_batch_and_arguments

    HookRegistry.reset()
    request = GenerateReqInput(**fields)
    normalize_batch_and_arguments(GenerateReqInput.normalize_batch_and_arguments, request)
    return request


def items(request: Any) -> list[Any]:
    return [request[position] for position in range(request.batch_size)]


@pytest.mark.usefixtures("sglang_imported")
class TestParallelSamples:
    def test_one_prompt(self) -> None:
        request = normalized(text="a", sampling_params={"n": 3}, rid="x", bootstrap_room=ROOM)
        assert (request.batch_size, request.parallel_sample_num) == (3, 1)
        assert [item.text for item in items(request)] == ["a"] * 3
        assert [item.bootstrap_room for item in items(request)] == [ROOM, ROOM + 1, ROOM + 2]
        assert [item.rid for item in items(request)] == request.rid == ["x_0", "x_1", "x_2"]

    @settings(max_examples=30, deadline=None)
    @given(prompts=st.integers(1, 5), samples=st.integers(2, 5))
    def test_batch_is_answered_prompt_by_prompt(self, prompts: int, samples: int) -> None:
        texts = [f"prompt {index}" for index in range(prompts)]
        request = normalized(
            text=texts, sampling_params=[{"n": samples, "seed": i} for i in range(prompts)], bootstrap_room=ROOM
        )
        assert [item.text for item in items(request)] == [text for text in texts for _ in range(samples)]
        assert [item.sampling_params["seed"] for item in items(request)] == [
            index for index in range(prompts) for _ in range(samples)
        ]
        assert [item.bootstrap_room for item in items(request)] == list(range(ROOM, ROOM + prompts * samples))
        assert len({item.rid for item in items(request)}) == prompts * samples

    def test_ids_of_the_client_stay_prefixes(self) -> None:
        request = normalized(text=["a", "b"], sampling_params={"n": 2}, rid=["p", "q"], bootstrap_room=ROOM)
        assert [(item.text, item.rid) for item in items(request)] == [
            ("a", "p_0"),
            ("a", "p_1"),
            ("b", "q_0"),
            ("b", "q_1"),
        ]

    def test_single_sample_is_left_to_sglang(self) -> None:
        request = normalized(text="a", sampling_params={"n": 1}, rid="x", bootstrap_room=ROOM)
        assert request.is_single
        assert (request.rid, request.bootstrap_room) == ("x", ROOM)

    def test_plain_batch_gets_a_range_of_rooms(self) -> None:
        request = normalized(text=["a", "b"], bootstrap_room=ROOM)
        assert [item.bootstrap_room for item in items(request)] == [ROOM, ROOM + 1]

    def test_without_a_room_sglang_decides(self) -> None:
        request = normalized(text="a", sampling_params={"n": 2})
        assert request.parallel_sample_num == 2

    def test_list_of_rooms_with_samples_is_refused(self) -> None:
        with pytest.raises(ValueError, match="one integer"):
            normalized(text=["a", "b"], sampling_params={"n": 2}, bootstrap_room=[1, 2])

    def test_same_room_twice_is_refused(self) -> None:
        with pytest.raises(ValueError, match="same room twice"):
            normalized(text=["a", "b"], bootstrap_room=[7, 7])

    def test_distinct_rooms_pass(self) -> None:
        request = normalized(text=["a", "b"], bootstrap_room=[7, 9])
        assert [item.bootstrap_room for item in items(request)] == [7, 9]


USED_ROOM = 42


def request(room: int | None = USED_ROOM, *, finished: bool = False) -> Any:
    return SimpleNamespace(
        rid="r",
        bootstrap_room=room,
        bootstrap_host="h",
        finished=lambda: finished,
        return_logprob=False,
        logprob=SimpleNamespace(top_logprobs_num=0),
        sampling_params=SimpleNamespace(custom_params=None, min_new_tokens=0),
    )


def held(room: int = USED_ROOM) -> Any:
    return SimpleNamespace(req=request(room))


def scheduler(mode: str) -> Any:
    from sglang.srt.disaggregation.utils import DisaggregationMode

    return SimpleNamespace(
        disaggregation_mode=DisaggregationMode(mode),
        waiting_queue=[],
        grammar_manager=SimpleNamespace(grammar_queue=[]),
        running_batch=SimpleNamespace(reqs=[]),
        last_batch=None,
        chunked_req=None,
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[]),
        disagg_prefill_inflight_queue=[],
        disagg_decode_prealloc_queue=SimpleNamespace(queue=[], retracted_queue=[]),
        disagg_decode_transfer_queue=SimpleNamespace(queue=[]),
    )


PLACES = {
    ("prefill", "waiting"): lambda s: s.waiting_queue.append(request()),
    ("prefill", "grammar"): lambda s: s.grammar_manager.grammar_queue.append(request()),
    ("prefill", "chunked"): lambda s: setattr(s, "chunked_req", request()),
    ("prefill", "parked"): lambda s: setattr(s, "held_requests", lambda: [request()]),
    ("prefill", "last batch"): lambda s: setattr(s, "last_batch", SimpleNamespace(reqs=[request()])),
    ("prefill", "bootstrap"): lambda s: s.disagg_prefill_bootstrap_queue.queue.append(request()),
    ("prefill", "inflight"): lambda s: s.disagg_prefill_inflight_queue.append(request()),
    ("decode", "running"): lambda s: s.running_batch.reqs.append(request()),
    ("decode", "prealloc"): lambda s: s.disagg_decode_prealloc_queue.queue.append(held()),
    ("decode", "transfer"): lambda s: s.disagg_decode_transfer_queue.queue.append(held()),
    ("decode", "retracted"): lambda s: s.disagg_decode_prealloc_queue.retracted_queue.append(request()),
}


@pytest.mark.usefixtures("sglang_imported")
class TestRoomGuard:
    @pytest.mark.parametrize(("mode", "place"), PLACES)
    def test_room_of_a_live_request_is_in_use(self, mode: str, place: str) -> None:
        from sglang_ext.engine.hooks.bootstrap_rooms import room_in_use

        engine = scheduler(mode)
        assert not room_in_use(engine, USED_ROOM)
        PLACES[mode, place](engine)
        assert room_in_use(engine, USED_ROOM)
        assert not room_in_use(engine, USED_ROOM + 1)

    def test_finished_request_and_missing_room_do_not_count(self) -> None:
        from sglang_ext.engine.hooks.bootstrap_rooms import room_in_use

        engine = scheduler("decode")
        engine.running_batch.reqs += [request(finished=True), request(None)]
        assert not room_in_use(engine, USED_ROOM)
        assert not room_in_use(engine, None)

    @pytest.mark.parametrize(
        ("room", "retracted"), [(USED_ROOM + 1, False), (USED_ROOM, True)], ids=["new", "retracted"]
    )
    def test_other_requests_pass(self, room: int, retracted: bool) -> None:
        from sglang_ext.engine.hooks.bootstrap_rooms import add_request_to_queue

        engine = scheduler("decode")
        engine.running_batch.reqs.append(request())
        passed: list[tuple[Any, ...]] = []
        newcomer = request(room)
        add_request_to_queue(lambda *arguments: passed.append(arguments), engine, newcomer, retracted)
        assert passed == [(engine, newcomer, retracted)]

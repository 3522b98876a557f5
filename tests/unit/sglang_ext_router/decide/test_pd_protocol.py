"""What the protocol does in each situation that has a name, and under random histories with many retries."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_ext_router.decide.pd_actions import (
    DECODE_SUCCEEDED,
    DECODE_SUCCEEDED_AND_FINISHED,
    NOTHING,
    PREFILL_SUCCEEDED,
    PREFILL_SUCCEEDED_AND_FINISHED,
    RELAY_DECODE,
    AbortLeg,
    Actions,
    CloseClient,
    ContinueStream,
    EmitErrorEvent,
    Exclude,
    FailureReason,
    Leg,
    RecordFailure,
    RecordSuccess,
    RelayReply,
    ReleaseTrial,
    ReplyError,
    RequestFinished,
    ScheduleRetry,
    StartLegs,
)
from sglang_ext_router.decide.pd_protocol import (
    RETRYABLE_STATUS,
    PDProtocol,
    RequestPhase,
    RetryPolicy,
)
from support.examples import examples
from support.pd_monitor import Event, Monitor, feed

P, D = Leg.PREFILL, Leg.DECODE
LOST, LOST_AGAIN = FailureReason.LEG_LOST, FailureReason.LOST_AGAIN
CONNECT_FAILED = FailureReason.CONNECT_FAILED


def started(max_retries: int = 5, *, is_stream: bool = True, is_single_sequence: bool = True) -> PDProtocol:
    protocol = PDProtocol(max_retries, is_stream=is_stream, is_single_sequence=is_single_sequence)
    assert protocol.start() == (StartLegs(0),)
    return protocol


def relaying(*, prefill_done: bool = False, is_stream: bool = True, is_single_sequence: bool = True) -> PDProtocol:
    protocol = started(is_stream=is_stream, is_single_sequence=is_single_sequence)
    if prefill_done:
        protocol.on_leg_head(P, 0, 200)
        protocol.on_leg_complete(P, 0)
    protocol.on_leg_head(D, 0, 200)
    assert protocol.on_first_body(D, 0) is RELAY_DECODE
    return protocol


def test_by_default_it_is_one_plain_sequence_with_five_retries() -> None:
    protocol = PDProtocol()
    assert (protocol.max_retries, protocol.is_stream, protocol.is_single_sequence) == (5, False, True)
    assert protocol.attempt == 0


class TestHappyPath:
    def test_prefill_ends_first(self) -> None:
        protocol = started()
        assert protocol.on_leg_head(P, 0, 200) is NOTHING
        assert protocol.on_first_body(P, 0) is NOTHING
        assert protocol.on_leg_complete(P, 0) is PREFILL_SUCCEEDED
        assert protocol.on_leg_head(D, 0, 200) is NOTHING
        assert protocol.on_first_body(D, 0) is RELAY_DECODE
        assert protocol.on_leg_complete(D, 0) is DECODE_SUCCEEDED_AND_FINISHED
        assert protocol.is_over

    def test_decode_ends_first(self) -> None:
        protocol = relaying()
        assert protocol.on_leg_complete(D, 0) is DECODE_SUCCEEDED
        assert protocol.phase is RequestPhase.DRAINING
        assert protocol.on_client_gone() == NOTHING, "the client has all it asked for"
        protocol.on_leg_head(P, 0, 200)
        assert protocol.on_leg_complete(P, 0) is PREFILL_SUCCEEDED_AND_FINISHED
        assert protocol.is_over

    def test_an_empty_reply_is_relayed_too(self) -> None:
        protocol = started()
        protocol.on_leg_head(D, 0, 204)
        assert protocol.on_leg_complete(D, 0) == (*RELAY_DECODE, RecordSuccess(D))

    @pytest.mark.parametrize("status", [200, 201, 299])
    def test_every_2xx_is_a_success(self, status: int) -> None:
        protocol = started()
        assert protocol.on_leg_head(D, 0, status) is NOTHING
        assert protocol.on_first_body(D, 0) is RELAY_DECODE

    def test_a_redirection_is_an_answer(self) -> None:
        assert RelayReply(D) in started().on_leg_head(D, 0, 300)

    def test_informational_heads_are_not_heads(self) -> None:
        protocol = started()
        assert protocol.on_leg_head(D, 0, 100) == NOTHING
        assert protocol.on_leg_head(D, 0, 200) == NOTHING
        assert protocol.on_first_body(D, 0) is RELAY_DECODE


class TestConnectionFailures:
    @pytest.mark.parametrize(("leg", "other"), [(P, D), (D, P)])
    def test_is_retried_elsewhere_and_the_other_leg_aborted_at_once(self, leg: Leg, other: Leg) -> None:
        protocol = started()
        assert protocol.on_leg_connect_failed(leg, 0) == (
            RecordFailure(leg),
            Exclude(leg),
            AbortLeg(other),
            ReleaseTrial(other),
            ScheduleRetry(0),
        )
        assert protocol.on_retry_timer(0) == (StartLegs(1),)
        assert protocol.attempt == 1

    def test_prefill_that_has_ended_is_not_aborted(self) -> None:
        protocol = started()
        protocol.on_leg_head(P, 0, 200)
        protocol.on_leg_complete(P, 0)
        assert protocol.on_leg_lost(D, 0) == (RecordFailure(D), Exclude(D), ScheduleRetry(0))

    @pytest.mark.parametrize(
        ("event", "status", "reason"),
        [("on_leg_lost", 502, LOST), ("on_leg_connect_failed", 503, CONNECT_FAILED)],
    )
    def test_no_retry_left(self, event: str, status: int, reason: FailureReason) -> None:
        protocol = started(max_retries=0)
        assert getattr(protocol, event)(P, 0) == (
            RecordFailure(P),
            AbortLeg(D),
            ReleaseTrial(D),
            ReplyError(status, reason),
            RequestFinished(),
        )

    def test_all_attempts_are_used(self) -> None:
        protocol = started(max_retries=5)
        for attempt in range(5):
            assert ScheduleRetry(attempt) in protocol.on_leg_connect_failed(D, attempt)
            assert protocol.on_retry_timer(attempt) == (StartLegs(attempt + 1),)
        assert protocol.on_leg_lost(D, 5)[-2:] == (ReplyError(502, LOST), RequestFinished())

    def test_what_was_taken_and_lost_is_sent_again_once(self) -> None:
        """Whatever else fails before, between or after."""
        protocol = started(max_retries=5)
        protocol.on_leg_connect_failed(P, 0)
        protocol.on_retry_timer(0)
        assert ScheduleRetry(1) in protocol.on_leg_lost(D, 1)
        protocol.on_retry_timer(1)
        assert ScheduleRetry(2) in protocol.on_leg_head(P, 2, 429)
        protocol.on_retry_timer(2)
        assert protocol.on_leg_lost(P, 3)[-2:] == (ReplyError(502, LOST_AGAIN), RequestFinished())

    def test_a_stale_connection_starts_all_anew_without_a_failure(self) -> None:
        protocol = started(max_retries=0)
        assert protocol.on_leg_stale(P, 0) == (
            ReleaseTrial(P),
            AbortLeg(D),
            ReleaseTrial(D),
            StartLegs(1, on_new_connections=True),
        )
        assert protocol.on_leg_stale(D, 0) == NOTHING
        assert protocol.phase is RequestPhase.OPEN
        assert protocol.on_leg_lost(D, 1)[-2:] == (ReplyError(502, LOST_AGAIN), RequestFinished())

    def test_a_stale_connection_uses_up_the_retry_of_what_was_lost_but_no_other(self) -> None:
        protocol = started(max_retries=2)
        protocol.on_leg_stale(D, 0)
        assert ScheduleRetry(1) in protocol.on_leg_connect_failed(D, 1)
        protocol.on_retry_timer(1)
        assert ScheduleRetry(2) in protocol.on_leg_head(D, 2, 429)
        protocol.on_retry_timer(2)
        assert protocol.on_leg_stale(D, 3)[-2:] == (ReplyError(502, LOST_AGAIN), RequestFinished())

    def test_an_instance_that_is_too_small_starts_all_again_elsewhere_without_a_failure(self) -> None:
        protocol = started(max_retries=1)
        for number, leg, other in ((0, P, D), (1, D, P), (2, P, D)):
            assert protocol.on_leg_too_small(leg, number) == (
                ReleaseTrial(leg),
                Exclude(leg),
                AbortLeg(other),
                ReleaseTrial(other),
                StartLegs(number + 1),
            )
            assert protocol.on_leg_too_small(other, number) == NOTHING
        assert ScheduleRetry(3) in protocol.on_leg_connect_failed(D, 3)

    def test_a_stream_that_says_so_is_aborted(self) -> None:
        protocol = started()
        protocol.on_leg_head(P, 0, 200)
        assert protocol.on_leg_too_small(P, 0)[:2] == (AbortLeg(P), ReleaseTrial(P))

    def test_an_instance_that_is_too_small_while_the_other_leg_has_failed(self) -> None:
        protocol = started()
        assert protocol.on_leg_head(D, 0, 500) == (ScheduleRetry(0),)
        actions = protocol.on_leg_too_small(P, 0)
        assert actions == (ReleaseTrial(P), Exclude(P), AbortLeg(D), ReleaseTrial(D))
        assert protocol.on_retry_timer(0) == (StartLegs(1),)

    def test_too_small_is_an_answer_where_nothing_may_be_tried_again(self) -> None:
        protocol = started(max_retries=0)
        assert protocol.on_leg_too_small(P, 0) == NOTHING
        assert protocol.on_leg_head(P, 0, 400)[-1] == RelayReply(P)
        relaying = started()
        relaying.on_leg_head(D, 0, 200)
        relaying.on_first_body(D, 0)
        assert relaying.on_leg_too_small(D, 0) == NOTHING

    def test_a_retry_beyond_the_budget_is_answered(self) -> None:
        protocol = started()
        protocol.on_leg_lost(D, 0)
        refusal = (ReplyError(503, FailureReason.RETRY_BUDGET), RequestFinished())
        assert protocol.on_retry_refused(0) == refusal
        settling = started()
        assert settling.on_leg_head(D, 0, 500) == (ScheduleRetry(0),)
        assert settling.on_retry_refused(0) == (
            AbortLeg(P),
            ReleaseTrial(P),
            AbortLeg(D),
            RecordFailure(D),
            *refusal,
        )
        assert started().on_retry_refused(0) == NOTHING

    def test_news_of_an_older_attempt_is_void(self) -> None:
        protocol = started()
        protocol.on_leg_lost(P, 0)
        protocol.on_retry_timer(0)
        for event in ("on_leg_lost", "on_leg_connect_failed", "on_leg_complete", "on_first_body"):
            assert getattr(protocol, event)(D, 0) == NOTHING
        assert protocol.on_leg_head(D, 0, 500) == NOTHING
        assert protocol.on_retry_timer(0) == NOTHING
        assert protocol.phase is RequestPhase.OPEN

    def test_no_instance(self) -> None:
        assert started().on_no_instance(0) == (ReplyError(503, FailureReason.NO_INSTANCE), RequestFinished())


class TestStatuses:
    @pytest.mark.parametrize("leg", [P, D])
    @pytest.mark.parametrize("status", [302, 400, 401, 404, 413, 422, 501])
    def test_an_answer_is_relayed_from_either_leg_without_a_recorded_failure(self, leg: Leg, status: int) -> None:
        protocol = started()
        other = D if leg is P else P
        assert protocol.on_leg_head(leg, 0, status) == (
            AbortLeg(other),
            ReleaseTrial(other),
            RelayReply(leg),
        )
        assert protocol.on_first_body(leg, 0) == NOTHING
        assert protocol.on_leg_complete(leg, 0) == (ReleaseTrial(leg), RequestFinished())

    @pytest.mark.parametrize("status", [408, 429])
    def test_a_busy_instance_is_avoided_without_a_recorded_failure(self, status: int) -> None:
        assert started().on_leg_head(P, 0, status) == (
            AbortLeg(P),
            ReleaseTrial(P),
            Exclude(P),
            AbortLeg(D),
            ReleaseTrial(D),
            ScheduleRetry(0),
        )

    def test_the_last_failure_is_relayed(self) -> None:
        protocol = started(max_retries=0)
        assert protocol.on_leg_head(P, 0, 503) == (AbortLeg(D), ReleaseTrial(D), RelayReply(P))
        assert protocol.on_leg_complete(P, 0) == (RecordFailure(P), RequestFinished())

    def test_an_error_reply_that_breaks_off_closes_the_client(self) -> None:
        protocol = started()
        protocol.on_leg_head(D, 0, 400)
        assert protocol.on_leg_lost(D, 0) == (RecordFailure(D), CloseClient(LOST), RequestFinished())

    def test_an_error_inside_a_streams_first_event_is_retried(self) -> None:
        protocol = started()
        protocol.on_leg_head(D, 0, 200)
        protocol.on_leg_head(P, 0, 200)
        protocol.on_leg_complete(P, 0)
        assert protocol.on_error_event(D, 0, 500) == (AbortLeg(D), RecordFailure(D), Exclude(D), ScheduleRetry(0))

    def test_an_error_inside_a_relayed_stream_only_changes_the_verdict(self) -> None:
        protocol = relaying(prefill_done=True)
        assert protocol.on_error_event(D, 0, 503) == NOTHING
        assert protocol.on_leg_complete(D, 0) == (RecordFailure(D), RequestFinished())

    def test_such_an_error_ends_a_prefill_leg_that_still_runs(self) -> None:
        protocol = relaying()
        protocol.on_error_event(D, 0, 400)
        assert protocol.on_leg_complete(D, 0) == (
            AbortLeg(P),
            ReleaseTrial(P),
            ReleaseTrial(D),
            RequestFinished(),
        )


class TestWhoIsToBlame:
    """A 5xx may be the echo of the other leg's failure."""

    @pytest.mark.parametrize(("echo", "culprit"), [(D, P), (P, D)])
    @pytest.mark.parametrize("is_body_complete", [False, True])
    def test_5xx_then_loss_of_the_other(self, echo: Leg, culprit: Leg, is_body_complete: bool) -> None:
        protocol = started()
        assert protocol.on_leg_head(echo, 0, 500) == (ScheduleRetry(0),)
        if is_body_complete:
            assert protocol.on_leg_complete(echo, 0) == NOTHING
        ending: Actions = (ReleaseTrial(echo),) if is_body_complete else (AbortLeg(echo), ReleaseTrial(echo))
        assert protocol.on_leg_lost(culprit, 0) == (RecordFailure(culprit), Exclude(culprit), *ending)
        assert protocol.on_retry_timer(0) == (StartLegs(1),)

    @pytest.mark.parametrize(("echo", "culprit"), [(D, P), (P, D)])
    def test_loss_then_5xx_of_the_other(self, echo: Leg, culprit: Leg) -> None:
        protocol = started()
        actions = protocol.on_leg_lost(culprit, 0) + protocol.on_leg_head(echo, 0, 500)
        assert [one for one in actions if isinstance(one, RecordFailure)] == [RecordFailure(culprit)]

    def test_5xx_alone_is_recorded_as_a_failure_when_the_back_off_ends(self) -> None:
        protocol = started()
        protocol.on_leg_head(D, 0, 500)
        assert protocol.on_retry_timer(0) == (
            AbortLeg(P),
            ReleaseTrial(P),
            AbortLeg(D),
            RecordFailure(D),
            Exclude(D),
            StartLegs(1),
        )

    def test_5xx_of_decode_is_its_own_once_prefill_has_ended_well(self) -> None:
        protocol = started()
        protocol.on_leg_head(D, 0, 500)
        protocol.on_leg_complete(D, 0)
        protocol.on_leg_head(P, 0, 200)
        assert protocol.on_leg_complete(P, 0) == (RecordSuccess(P), RecordFailure(D), Exclude(D))
        assert protocol.phase is RequestPhase.BACKOFF

    def test_5xx_of_prefill_is_its_own_once_decode_answers(self) -> None:
        protocol = started()
        protocol.on_leg_head(P, 0, 500)
        protocol.on_leg_head(D, 0, 200)
        assert protocol.on_first_body(D, 0) == (AbortLeg(P), RecordFailure(P), AbortLeg(D), ReleaseTrial(D), Exclude(P))

    def test_both_5xx_records_a_failure_of_both(self) -> None:
        protocol = started()
        protocol.on_leg_head(P, 0, 500)
        actions = protocol.on_leg_head(D, 0, 500)
        assert set(actions) == {AbortLeg(P), AbortLeg(D), RecordFailure(P), RecordFailure(D), Exclude(P), Exclude(D)}

    def test_an_answer_outweighs_the_5xx_it_caused(self) -> None:
        protocol = started()
        protocol.on_leg_head(D, 0, 500)
        protocol.on_leg_complete(D, 0)
        assert protocol.on_leg_head(P, 0, 400) == (ReleaseTrial(D), RelayReply(P))
        assert protocol.on_retry_timer(0) == NOTHING
        assert protocol.on_leg_complete(P, 0) == (ReleaseTrial(P), RequestFinished())

    def test_a_refusal_outweighs_the_5xx_it_caused(self) -> None:
        protocol = started()
        protocol.on_leg_head(D, 0, 500)
        assert protocol.on_leg_head(P, 0, 429) == (
            AbortLeg(P),
            ReleaseTrial(P),
            Exclude(P),
            AbortLeg(D),
            ReleaseTrial(D),
        )
        assert protocol.on_retry_timer(0) == (StartLegs(1),)


class TestAfterTheFirstByte:
    def test_decode_lost_in_a_stream(self) -> None:
        assert relaying(is_stream=True).on_leg_lost(D, 0) == (
            RecordFailure(D),
            AbortLeg(P),
            ReleaseTrial(P),
            EmitErrorEvent(LOST),
            RequestFinished(),
        )

    def test_decode_lost_in_a_stream_that_can_go_on(self) -> None:
        protocol = relaying()
        protocol.max_migrations = 1
        assert protocol.on_stream_lost(D, 0) == (
            RecordFailure(D),
            Exclude(D),
            AbortLeg(P),
            ReleaseTrial(P),
            ContinueStream(),
            StartLegs(1),
        )
        assert protocol.attempt == 1
        protocol.on_leg_head(D, 1, 200)
        assert protocol.on_first_body(D, 1) is RELAY_DECODE
        assert EmitErrorEvent(LOST) in protocol.on_stream_lost(D, 1)

    def test_a_stream_that_goes_on_and_cannot_is_answered_with_an_error(self) -> None:
        protocol = relaying(prefill_done=True)
        protocol.max_migrations = 1
        protocol.on_stream_lost(D, 0)
        assert ReplyError(502, LOST_AGAIN) in protocol.on_leg_lost(P, 1)

    def test_no_stream_goes_on_whose_request_was_lost_before(self) -> None:
        protocol = started()
        protocol.max_migrations = 1
        protocol.on_leg_lost(P, 0)
        protocol.on_retry_timer(0)
        protocol.on_leg_head(D, 1, 200)
        protocol.on_first_body(D, 1)
        assert not protocol.may_migrate
        assert EmitErrorEvent(LOST) in protocol.on_stream_lost(D, 1)

    def test_without_retries_no_stream_goes_on(self) -> None:
        protocol = relaying()
        protocol.max_migrations, protocol.max_retries = 1, 0
        assert EmitErrorEvent(LOST) in protocol.on_stream_lost(D, 0)

    def test_decode_lost_in_a_plain_reply(self) -> None:
        protocol = relaying(is_stream=False, prefill_done=True)
        assert protocol.on_leg_lost(D, 0) == (RecordFailure(D), CloseClient(LOST), RequestFinished())

    def test_prefill_lost_harms_a_single_sequence_no_more(self) -> None:
        protocol = relaying()
        assert protocol.on_leg_lost(P, 0) == (RecordFailure(P),)
        assert protocol.on_leg_complete(D, 0) is DECODE_SUCCEEDED_AND_FINISHED

    @pytest.mark.parametrize(
        ("status", "verdict"), [(500, RecordFailure(P)), (429, ReleaseTrial(P)), (400, ReleaseTrial(P))]
    )
    def test_prefill_failing_harms_a_single_sequence_no_more(
        self, status: int, verdict: RecordFailure | ReleaseTrial
    ) -> None:
        protocol = relaying()
        assert protocol.on_leg_head(P, 0, status) == (AbortLeg(P), verdict)
        assert protocol.phase is RequestPhase.RELAYING

    def test_prefill_lost_breaks_several_sequences(self) -> None:
        protocol = relaying(is_single_sequence=False)
        assert protocol.on_leg_lost(P, 0) == (
            RecordFailure(P),
            AbortLeg(D),
            ReleaseTrial(D),
            EmitErrorEvent(FailureReason.LEG_FAILED),
            RequestFinished(),
        )

    def test_prefill_lost_after_the_whole_reply(self) -> None:
        protocol = relaying()
        protocol.on_leg_complete(D, 0)
        assert protocol.on_leg_lost(P, 0) == (RecordFailure(P), RequestFinished())

    def test_nothing_is_retried(self) -> None:
        protocol = relaying()
        protocol.on_leg_lost(D, 0)
        assert protocol.on_retry_timer(0) == NOTHING


class TestClientAndTime:
    def test_client_leaves_while_both_legs_run(self) -> None:
        for protocol in (started(), relaying()):
            assert protocol.on_client_gone() == (
                AbortLeg(P),
                ReleaseTrial(P),
                AbortLeg(D),
                ReleaseTrial(D),
                RequestFinished(),
            )

    def test_client_leaves_while_queued_or_backing_off(self) -> None:
        assert PDProtocol().on_client_gone() == (RequestFinished(),)
        protocol = started()
        protocol.on_leg_lost(P, 0)
        assert protocol.on_client_gone() == (RequestFinished(),)
        assert protocol.on_retry_timer(0) == NOTHING

    def test_timeout_in_the_queue(self) -> None:
        protocol = PDProtocol()
        assert protocol.on_timeout() == (ReplyError(408, FailureReason.QUEUE_TIMEOUT), RequestFinished())
        assert protocol.start() == NOTHING

    def test_timeout_before_the_first_byte(self) -> None:
        assert started().on_timeout()[-2:] == (ReplyError(504, FailureReason.TIMEOUT), RequestFinished())

    def test_timeout_ends_a_stream(self) -> None:
        assert relaying().on_timeout()[-2:] == (EmitErrorEvent(FailureReason.TIMEOUT), RequestFinished())

    def test_timeout_while_only_prefill_hangs(self) -> None:
        protocol = relaying()
        protocol.on_leg_complete(D, 0)
        assert protocol.on_timeout() == (AbortLeg(P), ReleaseTrial(P), RequestFinished())


class TestMakingRoom:
    def test_both_legs_are_aborted_and_start_again(self) -> None:
        protocol = started(max_retries=0)
        protocol.on_leg_head(P, 0, 200)
        assert protocol.on_evicted() == (AbortLeg(P), ReleaseTrial(P), AbortLeg(D), ReleaseTrial(D))
        assert protocol.phase is RequestPhase.WAITING
        assert protocol.on_evicted() == NOTHING
        assert protocol.on_leg_lost(P, 0) == NOTHING
        assert protocol.on_instance_back(protocol.attempt) == (StartLegs(1),)
        protocol.on_leg_head(D, 1, 200)
        assert protocol.on_first_body(D, 1) is RELAY_DECODE

    def test_a_leg_that_has_ended_is_not_aborted(self) -> None:
        protocol = started()
        protocol.on_leg_head(P, 0, 200)
        protocol.on_leg_complete(P, 0)
        assert protocol.on_evicted() == (AbortLeg(D), ReleaseTrial(D))

    def test_no_room_is_made_once_something_is_relayed(self) -> None:
        assert relaying().on_evicted() == NOTHING

    def test_a_client_that_leaves_meanwhile(self) -> None:
        protocol = started()
        protocol.on_evicted()
        assert protocol.on_client_gone() == (RequestFinished(),)


LEGS = st.sampled_from(list(Leg))
AGES = st.sampled_from([0, 0, 0, 1])


class RandomHistories(RuleBasedStateMachine):
    """Random events, likely ones more often, under the monitor; more retries than can be enumerated."""

    @initialize(max_retries=st.integers(0, 6), is_stream=st.booleans(), is_single=st.booleans())
    def begin(self, max_retries: int, is_stream: bool, is_single: bool) -> None:
        self.protocol = PDProtocol(max_retries, is_stream=is_stream, is_single_sequence=is_single)
        self.monitor = Monitor(max_retries, is_stream)
        self.give(Event("start"))

    def give(self, event: Event) -> None:
        self.monitor.step(event, feed(self.protocol, event))

    @rule(leg=LEGS, age=AGES, status=st.sampled_from([200, 200, 200, 400, 429, 500, 503]))
    def head(self, leg: Leg, age: int, status: int) -> None:
        self.give(Event("on_leg_head", leg, status, age))

    @rule(leg=LEGS, age=AGES, name=st.sampled_from(["on_first_body", "on_leg_complete"]))
    def progress(self, leg: Leg, age: int, name: str) -> None:
        self.give(Event(name, leg, None, age))

    @rule(leg=LEGS, age=AGES, name=st.sampled_from(["on_leg_lost", "on_leg_connect_failed", "on_leg_stale"]))
    def failure(self, leg: Leg, age: int, name: str) -> None:
        self.give(Event(name, leg, None, age))

    @rule(leg=LEGS, age=AGES, status=st.sampled_from([400, 429, 500]))
    def error_event(self, leg: Leg, age: int, status: int) -> None:
        self.give(Event("on_error_event", leg, status, age))

    @rule(age=AGES, name=st.sampled_from(["on_retry_timer", "on_retry_timer", "on_retry_refused"]))
    def timer(self, age: int, name: str) -> None:
        self.give(Event(name, age=age))

    @rule(back=st.booleans())
    def evict(self, back: bool) -> None:
        self.give(Event("on_evicted"))
        if back:
            self.give(Event("on_instance_back"))

    @precondition(lambda self: self.protocol.attempt > 1)
    @rule(name=st.sampled_from(["on_client_gone", "on_timeout"]))
    def end(self, name: str) -> None:
        self.give(Event(name))

    @invariant()
    def agrees_on_the_end(self) -> None:
        assert self.protocol.is_over == self.monitor.is_over
        assert self.protocol.attempt == self.monitor.attempt

    def teardown(self) -> None:
        if hasattr(self, "protocol") and not self.protocol.is_over:
            self.give(Event("on_timeout"))
            assert self.protocol.is_over


RandomHistories.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestRandomHistories = pytest.mark.slow(RandomHistories.TestCase)


def test_doubles_up_to_its_maximum() -> None:
    policy = RetryPolicy(jitter=0.0)
    times_s = [policy.backoff_s(attempt, 0.5) for attempt in range(9)]
    assert times_s == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


@given(attempt=st.integers(0, 10_000), draw=st.floats(0, 1, exclude_max=True))
def test_jitter_stays_around_the_plain_back_off(attempt: int, draw: float) -> None:
    plain_s = RetryPolicy(jitter=0.0).backoff_s(attempt, draw)
    assert 0.8 * plain_s <= RetryPolicy().backoff_s(attempt, draw) <= 1.2 * plain_s


def test_jitter_spreads_evenly() -> None:
    policy = RetryPolicy(jitter=0.5)
    assert policy.backoff_s(0, 0.0) == pytest.approx(0.025)
    assert policy.backoff_s(0, 0.5) == pytest.approx(0.05)
    assert policy.backoff_s(0, 1 - 1e-9) == pytest.approx(0.075)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_retries", -1),
        ("initial_backoff_s", -0.1),
        ("max_backoff_s", 0.01),
        ("backoff_multiplier", 0.5),
        ("jitter", 1.0),
        ("jitter", float("nan")),
        ("max_backoff_s", float("nan")),
    ],
)
def test_nonsense_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        RetryPolicy(**{field: value})  # type: ignore[arg-type]


def test_the_ends_of_the_ranges_are_allowed() -> None:
    RetryPolicy(max_retries=0, initial_backoff_s=0.0, max_backoff_s=0.0, backoff_multiplier=1.0, jitter=0.0)
    defaults = RetryPolicy()
    assert (defaults.max_retries, defaults.jitter) == (5, 0.2)


def test_retryable_statuses() -> None:
    assert sorted(RETRYABLE_STATUS) == [408, 429, 500, 502, 503, 504]

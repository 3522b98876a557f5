"""What an instance should have computed since the router last knew what it had."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.decide.prefill_progress import ONE_ITERATION_TOKENS, PrefillProgress


def test_it_computes_what_it_had_at_its_rate() -> None:
    progress = PrefillProgress()
    assert progress.computed_tokens(100.0, 1000.0) == 0  # it never had anything
    progress.begin(10.0, 500)
    assert progress.computed_tokens(10.25, 1000.0) == 250
    assert progress.computed_tokens(11.0, 1000.0) == 500  # one that hangs: what it is sent after that counts in full
    assert progress.computed_tokens(10.25, 0.0) == 0
    assert progress.computed_tokens(9.0, 1000.0) == 0  # a clock of another process
    progress.begin(10.0, ONE_ITERATION_TOKENS + 1)
    assert progress.computed_tokens(20.0, 1000.0) == 0  # a long prompt, say
    progress.begin(10.5, 2000)
    assert progress.computed_tokens(11.5, 1000.0) == 1000


@pytest.mark.slow
@given(
    events=st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5000), st.booleans()), max_size=30),
    rate=st.floats(0, 1e6),
)
def test_never_more_than_what_is_pending(events: list[tuple[float, int, bool]], rate: float) -> None:
    """As the router calls it: at the first prefill that an idle instance is sent, and at the end of each."""
    progress = PrefillProgress()
    sent: list[int] = []
    now_s = 0.0
    for gap_s, tokens, is_end in events:
        now_s += gap_s
        if is_end and sent:
            sent.pop(0)
            progress.begin(now_s, sum(sent))
        else:
            if not sent:
                progress.begin(now_s, tokens)
            sent.append(tokens)
        assert 0 <= progress.computed_tokens(now_s + gap_s, rate) <= sum(sent)

"""What a round of conversations sends: the same for every system."""

from __future__ import annotations

from support.conversations import Answer, draw_load


def test_a_round_is_the_same_each_time_and_covers_its_range() -> None:
    load = draw_load(60.0, 2.0, 8, seed=3)
    assert load == draw_load(60.0, 2.0, 8, seed=3) != draw_load(60.0, 2.0, 8, seed=4)
    lengths = sorted(one.document_tokens for one in load.conversations)
    assert all(2000 + 500 * number <= tokens < 2500 + 500 * number for number, tokens in enumerate(lengths))
    assert all(len(one.turn_tokens) == 2 and one.at_s < 48.0 for one in load.conversations)
    assert 80 < len(load.chats) < 160
    assert all(0 < chat.at_s < 60.0 and 10 <= chat.tokens <= 200 for chat in load.chats)


def test_answers_of_different_rounds_have_different_keys() -> None:
    answers = [Answer((number, turn), 10, 0.0, 1.0, (1,)) for number, turn in ((1, 1), (1, 2), (500_000, 0))]
    keys = {answer.in_round(one).key for one in range(3) for answer in answers}
    assert len(keys) == 9
    assert [answer.in_round(2).turn for answer in answers] == [1, 2, 0]

"""Token ids of a client that are not the model's are refused; what SGLang made itself is not looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("sglang_imported")

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))


def passed_on(ids: Any, given: Any, **sampling: Any) -> bool:
    """Whether SGLang's own validation is asked; `given` are the ids of the request, `ids` what they have become."""
    from sglang_ext.engine.hooks.bootstrap_rooms import validate_one_request

    seen: list[object] = []
    request = SimpleNamespace(input_ids=given, sampling_params=sampling)
    validate_one_request(lambda manager, one, ids: seen.append(one), MANAGER, request, ids)
    return seen == [request]


def test_ids_of_the_vocabulary() -> None:
    assert passed_on([0, 99], [0, 99], stop_token_ids=[0, 99])
    assert passed_on([5], [5], stop_token_ids=[])


def test_no_ids_at_all() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        passed_on([], [])
    with pytest.raises(ValueError, match="no tokens"):
        passed_on([], None)  # of an empty text


@pytest.mark.parametrize(("ids", "wrong"), [([5, 100], 100), ([-1, 5], -1), ([1 << 40], 1 << 40)])
def test_other_ids_are_refused(ids: list[int], wrong: int) -> None:
    with pytest.raises(ValueError, match=f"token id {wrong} in the prompt"):
        passed_on(ids, ids)
    with pytest.raises(ValueError, match=f"token id {wrong} in stop_token_ids"):
        passed_on([1], [1], stop_token_ids=ids)


def test_what_sglang_made_of_an_image_is_not_looked_at() -> None:
    assert passed_on([1 << 40], None)


def test_stop_token_ids_are_integers() -> None:
    with pytest.raises(ValueError, match="stop_token_ids"):
        passed_on([1], [1], stop_token_ids=["x"])

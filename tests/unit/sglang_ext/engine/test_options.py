"""Options that travel to every process of an engine."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from sglang_ext.engine.device import Device
from sglang_ext.engine.options import (
    ENVIRONMENT_VARIABLE,
    ExtensionOptions,
    InvalidOptionsError,
    KvEventsOptions,
    options_from_environment,
)
from sglang_ext.laps.decide.options import Batching, LapsOptions
from sglang_ext.laps.decide.round_plan import LapsMode
from sglang_ext.types import Role


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("device", list(Device))
def test_round_trip(role: Role, device: Device) -> None:
    options = ExtensionOptions(role, device, kv_events=KvEventsOptions("0.0.0.0", 5557, 5558))
    assert options_from_environment(options.to_environment()) == options


@pytest.mark.parametrize("mode", list(LapsMode))
@pytest.mark.parametrize("batching", list(Batching))
def test_choices_arrive_as_what_they_were(mode: LapsMode, batching: Batching) -> None:
    """A policy tells them apart by identity: equal text would pass for the default."""
    sent = ExtensionOptions(Role.BOTH, Device.CPU, LapsOptions(mode=mode, batching=batching))
    received = options_from_environment(sent.to_environment())
    assert received == sent
    assert received is not None
    assert received.laps is not None
    assert received.laps.mode is mode
    for name, value in asdict(received.laps).items():
        assert type(value) is type(getattr(sent.laps, name)), name


def test_stock_process_has_none() -> None:
    assert options_from_environment({}) is None


@pytest.mark.parametrize("text", ["{", "[]", '"short"', '{"role": "short"}', '{"role": "x", "device": "cpu"}'])
def test_unreadable_options_are_refused(text: str) -> None:
    with pytest.raises(InvalidOptionsError, match=ENVIRONMENT_VARIABLE):
        options_from_environment({ENVIRONMENT_VARIABLE: text})

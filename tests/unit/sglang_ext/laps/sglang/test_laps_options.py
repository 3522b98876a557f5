"""The `--laps-…` options as a user types them, before and after `--`, and the SGLang arguments that exclude LAPS."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_ext.engine import worker
from sglang_ext.laps.decide.options import FLAGS, OPTION_FIELDS, Batching, LapsOptions, option_name
from sglang_ext.laps.decide.round_plan import LapsMode
from sglang_ext.laps.sglang.laps_options import CONSTANTS, SETTINGS, add_laps_arguments, conflict, laps_options
from sglang_ext.types import Role
from support.settings import parse_with_settings, sets

EXAMPLES = {
    "boundary_tokens": ("128", 128),
    "batching": ("token-max", Batching.TOKEN_MAX),
    "w_min_ms": ("0.5", 0.5),
    "w_max_ms": ("20", 20.0),
    "t_max_ms": ("90", 90.0),
    "short_ttft_slo_ms": ("250", 250.0),
    "long_slo_stretch": ("3", 3.0),
    "round_ms": ("75", 75.0),
    "rho_max": ("0.5", 0.5),
    "min_chunk_tokens": ("32", 32),
    "max_chunk_tokens": ("4096", 4096),
}
FLAG_EXAMPLES = [word for name in EXAMPLES if name in FLAGS for word in (option_name(name), EXAMPLES[name][0])]
SETTING_EXAMPLES = sets(*(f"{option_name(name)}={text}" for name, (text, _) in EXAMPLES.items() if name not in FLAGS))


def parse(*argv: str) -> argparse.Namespace:
    return parse_with_settings([add_laps_arguments], SETTINGS, argv)


def options_of(role: Role, given: tuple[str, ...] = (), engine: tuple[str, ...] = ()) -> LapsOptions | None:
    return laps_options(role, parse(*given), engine)[0]


def without_spaces(text: str) -> str:
    return "".join(text.split())


def refusal_of(
    capsys: pytest.CaptureFixture[str], model_path: Path, role: str, given: tuple[str, ...], engine: tuple[str, ...]
) -> tuple[int, str]:
    """Exit status and error of `sglang-ext worker`."""
    parser = argparse.ArgumentParser(prog="sglang-ext worker")
    worker.add_arguments(parser)
    common = ("--role", role, "--model-path", str(model_path), "--device", "cpu", "--dry-run")
    try:
        status = worker.run(parser.parse_args([*common, *given, "--", *engine]))
    except SystemExit as refusal:
        status = int(refusal.code or 0)
    return status, capsys.readouterr().err


@pytest.mark.parametrize("role", [Role.SHORT, Role.LONG, Role.BOTH])
def test_a_prefill_instance_prefers_what_its_role_says(role: Role) -> None:
    assert options_of(role) == LapsOptions(mode=LapsMode(role.value))
    assert options_of(role, ("--laps-mode", "auto")) == LapsOptions(mode=LapsMode(role.value))


def test_mode_may_differ_from_the_role() -> None:
    assert options_of(Role.SHORT, ("--laps-mode", "both")) == LapsOptions(mode=LapsMode.BOTH)


def test_off() -> None:
    assert options_of(Role.LONG, ("--laps-mode", "off")) is None
    assert options_of(Role.LONG, (), ("--laps-mode=off",)) is None


def test_a_decode_instance_has_none() -> None:
    for mode in ((), ("--laps-mode", "auto"), ("--laps-mode", "off")):
        assert options_of(Role.DECODE, mode) is None


def test_every_option_and_setting_can_be_given() -> None:
    assert set(EXAMPLES) == {field.name for field in fields(LapsOptions)} - {"mode"} - CONSTANTS
    expected = LapsOptions(mode=LapsMode.BOTH, **{name: value for name, (_, value) in EXAMPLES.items()})
    assert options_of(Role.BOTH, (*FLAG_EXAMPLES, *SETTING_EXAMPLES)) == expected
    assert options_of(Role.BOTH, tuple(SETTING_EXAMPLES), tuple(FLAG_EXAMPLES)) == expected
    joined = tuple(f"{name}={text}" for name, text in zip(FLAG_EXAMPLES[::2], FLAG_EXAMPLES[1::2], strict=True))
    assert options_of(Role.BOTH, tuple(SETTING_EXAMPLES), joined) == expected


def test_help_shows_meaning_and_default_of_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = without_spaces(capsys.readouterr().out)  # argparse breaks lines, also within an option's name
    for field in OPTION_FIELDS:
        if field.name not in FLAGS:
            continue
        assert option_name(field.name) in text
        if field.name != "mode":
            default = "" if field.default is None else f" (default: {field.default})"
            assert without_spaces(f"{field.metadata['help']}{default}") in text
    assert "--laps-mode{auto,off,short,long,both}" in text


def test_every_setting_says_its_meaning_and_default() -> None:
    by_name = {setting.name: setting for setting in SETTINGS}
    for field in OPTION_FIELDS:
        if field.name in FLAGS or field.name in CONSTANTS:
            continue
        default = "" if field.default is None else f" (default: {field.default})"
        assert by_name[option_name(field.name)].help == f"{field.metadata['help']}{default}"
    assert by_name["laps.batching"].choices == ("sla", "token-max")


def test_what_stands_after_the_dashes_wins_and_does_not_reach_sglang() -> None:
    given = parse("--laps-long-slo-stretch", "3", "--laps-mode", "short")
    taken = ("--laps-long-slo-stretch", "4", "--laps-mode=long")
    engine = ("--tp", "2", *taken, "--random-seed", "-1", "--watchdog", "9")
    options, rest = laps_options(Role.BOTH, given, engine)
    assert options == LapsOptions(mode=LapsMode.LONG, long_slo_stretch=4.0)
    assert rest == ("--tp", "2", "--random-seed", "-1", "--watchdog", "9")


def test_engine_arguments_without_laps_are_left_alone() -> None:
    engine = ("--tp", "2", "--", "odd", "--json-model-override-args", '{"a": "--laps-mode off"}')
    _, rest = laps_options(Role.BOTH, parse(), engine)
    assert rest == engine


@pytest.mark.parametrize(
    ("role", "arguments", "message"),
    [
        ("both", ("--set", "laps.w_min_ms=30", "--set", "laps.w_max_ms=10"), "laps.w_min_ms 30 is larger than"),
        ("both", ("--set", "laps.w_max_ms=nan"), "laps.w_max_ms must be above 0, got nan"),
        ("short", ("--laps-mode", "off", "--set", "laps.rho_max=0.2"), "laps.rho_max: LAPS is off"),
        (
            "long",
            ("--laps-mode", "off", "--set", "laps.rho_max=0.2", "--set", "laps.round_ms=1"),
            "laps.round_ms, laps.rho_max: LAPS is off",
        ),
        ("decode", ("--laps-mode", "both"), "--laps-mode: LAPS schedules prefills, not decodes"),
        ("plain", ("--set", "laps.w_min_ms=3"), "laps.w_min_ms: an undivided instance has LAPS with --laps-mode both"),
        ("plain", ("--laps-mode", "off", "--set", "laps.w_min_ms=3"), "laps.w_min_ms: LAPS is off"),
        ("decode", ("--set", "laps.w_min_ms=3"), "laps.w_min_ms: LAPS schedules prefills, not decodes"),
        ("both", ("--laps-mode", "fast"), "argument --laps-mode: invalid choice: 'fast'"),
        ("both", ("--set", "laps.batching=all"), "--set laps.batching must be one of sla, token-max, not 'all'"),
        ("both", ("--set", "laps.w_min_ms=soon"), "--set laps.w_min_ms must be a number, not 'soon'"),
        (
            "both",
            ("--set", "laps.min_chunk_tokens=1.5"),
            "--set laps.min_chunk_tokens must be a whole number, not '1.5'",
        ),
        ("both", ("--set", "laps.min_chunk_tokens"), "--set: 'laps.min_chunk_tokens' is not of the form"),
        ("both", ("--laps-boundary-tokens", "1.5"), "argument --laps-boundary-tokens: invalid int value: '1.5'"),
        ("both", ("--laps-boundary-tokens",), "argument --laps-boundary-tokens: expected one argument"),
    ],
)
@pytest.mark.parametrize("side", ["before", "after"])
def test_nonsense_is_refused_in_one_line(
    side: str,
    role: str,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if side == "after" and "--set" in arguments:
        pytest.skip("settings stand before the dashes")
    given, engine = (arguments, ()) if side == "before" else ((), arguments)
    status, error = refusal_of(capsys, tmp_path, role, given, engine)
    assert status == worker.USAGE_ERROR
    # argparse puts its usage before the line.
    last = error.splitlines()[-1]
    assert last.removeprefix("sglang-ext worker: ").removeprefix("error: ").startswith(message)
    assert "LapsMode" not in last
    if side == "after":
        assert error.count("\n") == 1


def test_options_travel_to_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    worker.add_arguments(parser)
    common = ("--role", "both", "--model-path", str(tmp_path), "--device", "cpu", "--dry-run")
    assert (
        worker.run(parser.parse_args([*common, "--set", "laps.w_max_ms=12.5", "--", "--laps-boundary-tokens", "7"]))
        == 0
    )
    line = capsys.readouterr().out
    assert '"w_max_ms": 12.5' in line
    assert '"boundary_tokens": 7' in line
    assert "--laps" not in line


def test_the_help_names_the_whole_unit() -> None:
    parser = argparse.ArgumentParser()
    add_laps_arguments(parser)
    text = parser.format_help()
    assert "--laps-short-ttft-slo-ms MS" in text


FITTING = {
    "disaggregation_mode": "prefill",
    "schedule_policy": "fcfs",
    "pp_size": 1,
    "pp_async_batch_depth": 0,
    "dp_size": 1,
    "enable_dynamic_chunking": False,
    "enable_mixed_chunk": False,
    "enable_priority_scheduling": False,
    "enable_prefill_delayer": False,
    "optimistic_prefill_attempts": 0,
    "disaggregation_decode_allocation_policy": "eager",
    "chunked_prefill_size": 256,
}


def test_the_arguments_of_a_worker_fit() -> None:
    assert conflict(SimpleNamespace(**FITTING)) is None


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
        ({"schedule_policy": "lpm"}, "--schedule-policy lpm"),
        ({"schedule_policy": "hrrn"}, "--schedule-policy hrrn"),
        ({"pp_size": 2, "pp_async_batch_depth": 1}, "--pp-async-batch-depth"),
        ({"pp_size": 2, "dp_size": 2}, "--dp-size above 1 with --pp-size above 1"),
        ({"pp_size": 2, "enable_dynamic_chunking": True}, "--enable-dynamic-chunking"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"enable_priority_scheduling": True}, "--enable-priority-scheduling"),
        ({"enable_prefill_delayer": True}, "--enable-prefill-delayer"),
        ({"optimistic_prefill_attempts": 1}, "--optimistic-prefill-attempts"),
        (
            {"disaggregation_decode_allocation_policy": "prefill_complete"},
            "--disaggregation-decode-allocation-policy prefill_complete",
        ),
        ({"chunked_prefill_size": -1}, "--chunked-prefill-size"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size"),
    ],
)
def test_each_conflict_is_named(changes: dict[str, object], names: str) -> None:
    problem = conflict(SimpleNamespace(**{**FITTING, **changes}))
    assert problem is not None
    assert problem.startswith(f"{names} does not go with --laps-mode (")
    assert problem.endswith("; use --laps-mode off")
    assert "\n" not in problem


@pytest.mark.slow
@pytest.mark.usefixtures("sglang_imported")
def test_the_arguments_exist_under_these_names() -> None:
    """A stub proves nothing about an argument that SGLang has renamed."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    assert set(FITTING) <= {field.name for field in msgspec.structs.fields(ServerArgs)}

"""The options of the handshake backend: from the command line to every process of an engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_ext import settings
from sglang_ext.engine import worker
from sglang_ext.engine.device import Device
from sglang_ext.engine.options import ExtensionOptions, options_from_environment
from sglang_ext.transfer.sglang import transfer_options as options_module
from sglang_ext.transfer.sglang.transfer_options import (
    TransferOptions,
    conflict,
    model_conflict,
    transfer_options,
)
from sglang_ext.types import Role

HANDSHAKE = ("--transfer-backend", "handshake")
RELEASE_LIMIT = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang-ext worker")
    worker.add_arguments(parser)
    arguments = parser.parse_args(["--role", "decode", "--model-path", "m", *argv])
    return settings.with_settings(arguments, worker.SETTINGS)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), None),
        (("--transfer-backend", "nixl"), None),
        (HANDSHAKE, TransferOptions("tcp", None, 1 << 20)),
        ((*HANDSHAKE, "--set", "transfer.receive_backends=2"), TransferOptions("tcp", 2)),
        ((*HANDSHAKE, "--transfer-transport", "shared_memory"), TransferOptions("shared_memory", None)),
    ],
)
def test_from_the_command_line(argv: tuple[str, ...], expected: TransferOptions | None) -> None:
    assert transfer_options(parse(*argv), Role.DECODE) == expected


@pytest.mark.parametrize(("kib", "expected"), [("0", 0), ("256", 256 << 10), ("never", None)])
def test_which_chunks_leave_by_layer(kib: str, expected: int | None) -> None:
    options = transfer_options(parse(*HANDSHAKE, "--set", f"transfer.stream_layer_kib={kib}"), Role.SHORT)
    assert options is not None
    assert options.stream_layer_bytes == expected
    assert ExtensionOptions(Role.SHORT, Device.CPU, transfer=options).streams_layers is (expected is not None)
    assert ExtensionOptions(Role.SHORT, Device.CPU, transfer=options, stages=2).streams_layers  # with their batch
    assert not ExtensionOptions(Role.DECODE, Device.CPU, transfer=options).streams_layers
    assert not ExtensionOptions(Role.SHORT, Device.CPU).streams_layers


@pytest.mark.parametrize(
    ("tokens", "role", "expected"),
    [
        (None, Role.DECODE, (16_384, 16_384)),
        ("4096", Role.DECODE, (4096, 4096)),
        ("never", Role.DECODE, (None, 16_384)),
        ("1", Role.LONG, (1, 1)),
    ],
)
def test_which_prompts_take_slots_late(tokens: str | None, role: Role, expected: tuple[int | None, int]) -> None:
    argv = HANDSHAKE if tokens is None else (*HANDSHAKE, "--set", f"transfer.late_slots_tokens={tokens}")
    options = transfer_options(parse(*argv), role)
    assert options is not None
    assert (options.late_slots_tokens, options.slots_lookahead_tokens) == expected


@pytest.mark.parametrize(
    ("role", "argv", "message"),
    [
        (
            Role.LONG,
            (*HANDSHAKE, "--set", "transfer.late_slots_tokens=never"),
            "a positive number of tokens, got 'never'",
        ),
        (Role.DECODE, (*HANDSHAKE, "--set", "transfer.late_slots_tokens=0"), "a positive number of tokens or 'never'"),
        (Role.DECODE, ("--set", "transfer.late_slots_tokens=1"), "transfer.late_slots_tokens needs --transfer-backend"),
        (Role.DECODE, (*HANDSHAKE, "--set", "transfer.stream_layer_kib=1"), "decode instances send no KV"),
        (Role.SHORT, (*HANDSHAKE, "--set", "transfer.stream_layer_kib=some"), "a number of KiB or 'never', got 'some'"),
        (Role.SHORT, ("--set", "transfer.stream_layer_kib=1"), "transfer.stream_layer_kib needs --transfer-backend"),
        (Role.DECODE, ("--set", "transfer.receive_backends=2"), "transfer.receive_backends needs --transfer-backend"),
        (Role.SHORT, ("--transfer-transport", "tcp"), "--transfer-transport needs --transfer-backend handshake"),
        (Role.DECODE, (*HANDSHAKE, "--set", "transfer.receive_backends=0"), "must be at least 1, got 0"),
        (Role.LONG, (*HANDSHAKE, "--set", "transfer.receive_backends=1"), "prefill instances receive no KV"),
    ],
)
def test_what_makes_no_sense_is_refused(role: Role, argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transfer_options(parse(*argv), role)


@pytest.mark.parametrize("transfer", [None, TransferOptions(), TransferOptions("shared_memory", 3)])
def test_they_reach_every_process(transfer: TransferOptions | None) -> None:
    sent = ExtensionOptions(Role.DECODE, Device.CPU, transfer=transfer)
    assert options_from_environment(sent.to_environment()) == sent


def test_no_time_limit_overrules_what_the_handshake_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model-path", str(tmp_path), "--device", "cpu", "--dry-run")
    assert worker.run(parse(*common)) == 0
    assert f"{RELEASE_LIMIT}=5 " in capsys.readouterr().out
    assert worker.run(parse(*common, *HANDSHAKE)) == 0
    line = capsys.readouterr().out
    assert f"{RELEASE_LIMIT}=86400 " in line
    assert "--disaggregation-transfer-backend handshake" in line


FITTING = {
    "attn_cp_size": 1,
    "dcp_size": 1,
    "enable_hisparse": False,
    "speculative_algorithm": None,
    "kv_cache_dtype": "fp8_e4m3",
    "enable_pd_role_switch": False,
    "disaggregation_decode_allocation_policy": "early",
}


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("attn_cp_size", 2, "--attn-cp-size"),
        ("dcp_size", 2, "--dcp-size"),
        ("enable_hisparse", True, "--enable-hisparse"),
        ("speculative_algorithm", "STANDALONE", "--speculative-algorithm STANDALONE"),
        ("kv_cache_dtype", "mxfp8", "--kv-cache-dtype mxfp8"),
        ("kv_cache_dtype", "nvfp4", "--kv-cache-dtype nvfp4"),
        ("enable_pd_role_switch", True, "--enable-pd-role-switch"),
        (
            "disaggregation_decode_allocation_policy",
            "prefill_complete",
            "--disaggregation-decode-allocation-policy",
        ),
    ],
)
def test_arguments_that_it_does_not_go_with_are_named(field: str, value: object, flag: str) -> None:
    for algorithm in (None, "EAGLE", "EAGLE3"):
        fitting = SimpleNamespace(**{**FITTING, "speculative_algorithm": algorithm})
        assert conflict(fitting, has_staging_buffer=False) is None
    problem = conflict(SimpleNamespace(**{**FITTING, field: value}), has_staging_buffer=False)
    assert problem is not None
    assert problem.startswith(f"{flag} does not go with --transfer-backend handshake (")


def test_a_staging_buffer_is_named() -> None:
    problem = conflict(SimpleNamespace(**FITTING), has_staging_buffer=True)
    assert problem is not None
    assert problem.startswith("SGLANG_DISAGG_STAGING_BUFFER does not go with")


@pytest.mark.parametrize(
    ("states", "window_layout", "drafts", "stages", "what"),
    [
        ((), None, 0, 1, None),
        ((), None, 0, 2, None),
        (("swa",), "nhd", 0, 1, None),
        (("swa",), "nhd", 0, 2, "--pp-size above 1 with sliding windows"),
        (("swa",), "hnd", 0, 1, "windows are not kept by token"),
        (("swa",), None, 0, 1, "windows are not kept by token"),
        (("mamba",), None, 0, 1, None),
        (("mamba", "swa"), "nhd", 0, 1, None),
        (("mamba",), None, 0, 2, "--pp-size above 1 with recurrent states"),
        (("mamba", "swa", "dsa"), "nhd", 0, 1, "extra state (dsa)"),
        (("block_scale",), "nhd", 0, 1, "extra state (block_scale)"),  # of MXFP8
        ((), None, 2, 1, None),
        ((), None, 2, 2, "--pp-size above 1 with a draft model"),
    ],
)
def test_models_that_it_does_not_transfer_are_named(
    states: tuple[str, ...], window_layout: str | None, drafts: int, stages: int, what: str | None
) -> None:
    kv_args = SimpleNamespace(state_types=states, num_draft_entries=drafts, swa_kv_cache_layout=window_layout)
    problem = model_conflict(kv_args, stages)
    assert (problem is None) if what is None else (problem is not None and what in problem)


def test_on_a_gpu_only_nixl_and_mooncake_move_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "unavailable_reason", lambda name: None)
    assert transfer_options(parse(*HANDSHAKE), Role.DECODE, Device.CUDA) == TransferOptions("nixl")
    mooncake = parse(*HANDSHAKE, "--transfer-transport", "mooncake")
    assert transfer_options(mooncake, Role.DECODE, Device.CUDA) == TransferOptions("mooncake")
    for transport in ("tcp", "shared_memory"):
        arguments = parse(*HANDSHAKE, "--transfer-transport", transport)
        assert transfer_options(arguments, Role.DECODE) == TransferOptions(transport)
        with pytest.raises(ValueError, match=f"^--transfer-transport {transport} moves host memory only; on cuda"):
            transfer_options(arguments, Role.DECODE, Device.CUDA)

"""Stand-ins for absent packages: harmless to import, an error that names what is missing to use."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from sglang_ext.cpu import missing, stand_in_definitions
from sglang_ext.cpu.stand_in_definitions import assign_req_to_token_pool_cpu


def run_isolated(code: str) -> str:
    """Output of `code` in a fresh interpreter where triton and sgl_kernel count as absent."""
    prelude = """
        import importlib.util, sys
        from importlib.machinery import PathFinder
        hidden = ("triton", "torchvision", "torchaudio", "sgl_kernel")
        class Hiding:
            @staticmethod
            def find_spec(name, path=None, target=None):
                return None if name.split(".")[0] in hidden else PathFinder.find_spec(name, path, target)
        sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
        from sglang_ext import cpu
        from sglang_ext.cpu.missing import MissingDependencyError
        installed = cpu.install()
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(code)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_present_package_is_left_alone() -> None:
    output = run_isolated("""
        import importlib.machinery, types
        print(cpu.absent_packages(("json", "sglang_ext")), "json" in installed)
        import json; print(json.loads("1"))
    """)
    assert output == "() False\n1"


def test_kernels_can_be_defined_and_refuse_to_be_launched() -> None:
    output = run_isolated("""
        import triton
        import triton.language as tl

        @triton.autotune(configs=[triton.Config({"BLOCK": 8}, num_warps=2)], key=["n"])
        @triton.jit
        def add_one(x, n, BLOCK: tl.constexpr):
            tl.store(x, tl.load(x) + 1)

        for launch in (lambda: add_one[(1,)](0, 1), lambda: add_one(0, 1)):
            try:
                launch()
            except MissingDependencyError as error:
                print("add_one" in str(error), "triton is not installed" in str(error))
        print(triton.cdiv(7, 2), triton.next_power_of_2(9))
    """)
    assert output == "True True\nTrue True\n4 16"


def test_any_other_function_names_itself_when_called() -> None:
    output = run_isolated("""
        import torchvision.transforms.functional as TF
        from torchvision.transforms import InterpolationMode
        default = InterpolationMode.BICUBIC
        class Mine(InterpolationMode): pass
        for use in (lambda: TF.resize(1), lambda: TF[0], lambda: bool(TF.resize), lambda: InterpolationMode(1)):
            try:
                use()
            except (MissingDependencyError, TypeError) as error:
                print(type(error).__name__, str(error).split(" was")[0])
    """)
    assert output.splitlines() == [
        "MissingDependencyError torchvision.transforms.functional.resize",
        "TypeError 'StandInModule' object is not subscriptable",
        "MissingDependencyError torchvision.transforms.functional.resize",
        "MissingDependencyError torchvision.transforms.InterpolationMode",
    ]


def test_probes_still_see_the_package_as_absent() -> None:
    output = run_isolated("""
        import triton
        print(importlib.util.find_spec("torchvision"), importlib.util.find_spec("json") is not None)
        try:
            import triton.knobs
        except ImportError:
            print("no knobs")
    """)
    assert output == "None True\nno knobs"


def test_sgl_kernel_offers_cpu_functions_only() -> None:
    output = run_isolated("""
        from sgl_kernel import assign_req_to_token_pool_cpu, rotate_input_ids_cpu
        try:
            rotate_input_ids_cpu()
        except MissingDependencyError as error:
            print(str(error).split(" was")[0])
        for name in ("from sgl_kernel import silu_and_mul", "import sgl_kernel.kvcacheio"):
            try:
                exec(name)
            except ImportError as error:
                print(type(error).__name__)
    """)
    assert output == "sgl_kernel.rotate_input_ids_cpu\nImportError\nModuleNotFoundError"


def test_error_names_stay_catchable() -> None:
    error_type = missing.missing_class("triton.runtime.autotuner", "OutOfResources")
    assert issubclass(error_type, Exception)


@pytest.mark.parametrize(("a", "b", "result"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_cdiv(a: int, b: int, result: int) -> None:
    assert stand_in_definitions.cdiv(a, b) == result


@pytest.mark.parametrize(("n", "result"), [(0, 0), (1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_next_power_of_2(n: int, result: int) -> None:
    assert stand_in_definitions.next_power_of_2(n) == result


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_assign_req_to_token_pool_writes_each_span() -> None:
    table = torch.zeros(4, 8, dtype=torch.int32)
    assign_req_to_token_pool_cpu(tensor(2, 0), table, tensor(1, 5), tensor(4, 7), tensor(11, 12, 13, 21, 22), 8)
    expected = torch.zeros(4, 8, dtype=torch.int32)
    expected[2, 1:4] = torch.tensor([11, 12, 13])
    expected[0, 5:7] = torch.tensor([21, 22])
    assert torch.equal(table, expected)


@pytest.mark.parametrize(
    ("start", "end", "slots"),
    [((0,), (3,), (1, 2)), ((6,), (9,), (1, 2, 3)), ((4,), (3,), ())],
    ids=["too few slots", "past the row", "negative span"],
)
def test_assign_req_to_token_pool_refuses_bad_spans(
    start: tuple[int, ...], end: tuple[int, ...], slots: tuple[int, ...]
) -> None:
    table = torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="span"):
        assign_req_to_token_pool_cpu(tensor(0), table, tensor(*start), tensor(*end), tensor(*slots), 8)
    assert not table.any()

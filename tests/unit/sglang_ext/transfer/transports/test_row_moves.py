"""Rows gathered into a staging buffer and scattered out of it, against one byte at a time."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ext.transfer.pool_layout import RowSet
from sglang_ext.transfer.transports import row_moves
from sglang_ext.transfer.transports.memory_regions import MemoryRegions, OutOfBoundsError
from sglang_ext.transfer.transports.row_moves import DIRECT_BYTES, Piece, SlotIndex, Unstaged, open_rows, stage_pieces

ROWS = 12


def region(row_bytes: int, seed: int = 0) -> tuple[MemoryRegions, npt.NDArray[np.uint8]]:
    memory = np.random.default_rng(seed).integers(0, 256, ROWS * row_bytes, np.uint8)
    regions = MemoryRegions()
    regions.add(memory.ctypes.data, len(memory))
    return regions, memory


def base_of(memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.array([memory.ctypes.data, 0], np.uint64)


def u32(slots: list[int]) -> npt.NDArray[np.uint32]:
    return np.array(slots, np.uint32)


@st.composite
def some_rows(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[int]]:
    """Bytes of a row; offset and length of each set within it; slots, in runs and without order."""
    row_bytes = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 256, 512, 1000])))
    sets = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, row_bytes))
        sets.append((draw(st.integers(0, row_bytes - length)), length))
    slots = draw(st.permutations(range(ROWS)))
    first = draw(st.integers(0, ROWS - 1))
    run = list(range(first, ROWS))
    return row_bytes, sets, draw(st.sampled_from([run, [*slots[: first + 1]], [*run, *slots[:first]]]))


@pytest.fixture(params=["native", "numpy"])
def copier(request: pytest.FixtureRequest) -> Iterator[None]:
    """What copies rows: the C++ module, and what takes its place where that is not built."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(row_moves, "native_rows", None)
        else:
            assert row_moves.native_rows is not None, "run `make compiled`"
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("copier")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some_rows(), st.integers(1, 40))
def test_what_is_gathered_and_scattered_is_every_row_in_order(
    drawn: tuple[int, list[tuple[int, int]], list[int]], staged_rows: int
) -> None:
    row_bytes, sets, slots = drawn
    staging_bytes = staged_rows * row_bytes
    regions, memory = region(row_bytes)
    other, copy = region(row_bytes, seed=1)
    expected_bytes = b"".join(
        memory[slot * row_bytes + offset : slot * row_bytes + offset + length].tobytes()
        for offset, length in sets
        for slot in slots
    )
    expected = copy.copy()
    for offset, length in sets:
        for slot in slots:
            start = slot * row_bytes + offset
            expected[start : start + length] = memory[start : start + length]
    rows = [RowSet(memory.ctypes.data + offset, row_bytes, length) for offset, length in sets]
    targets = [RowSet(copy.ctypes.data + offset, row_bytes, length) for offset, length in sets]
    staging, gathered = np.zeros(staging_bytes, np.uint8), b""
    index = SlotIndex(u32(slots))
    with open_rows(regions, rows, index) as here, open_rows(other, targets, index) as there:
        for pieces, places in zip(stage_pieces(here, staging_bytes), stage_pieces(there, staging_bytes), strict=True):
            if isinstance(pieces, Unstaged):
                assert isinstance(places, Unstaged)
                addresses = [slice(int(a), int(a) + int(n)) for a, n in pieces.vectors() - base_of(memory)]
                moved = b"".join(memory[place].tobytes() for place in addresses)
                gathered += moved
                for a, n in (places.vectors() - base_of(copy)).tolist():
                    copy[a : a + n], moved = np.frombuffer(moved[:n], np.uint8), moved[n:]
                continue
            assert not isinstance(places, Unstaged)
            assert pieces[-1].stop <= staging_bytes
            for piece in pieces:
                piece.gather(staging)
            gathered += staging[: pieces[-1].stop].tobytes()
            for place in places:
                place.scatter(staging)
    assert gathered == expected_bytes
    np.testing.assert_array_equal(copy, expected)


@pytest.mark.parametrize("length", [DIRECT_BYTES, DIRECT_BYTES // 4])
def test_long_rows_and_runs_are_moved_as_they_are(length: int) -> None:
    row_bytes = length if length < DIRECT_BYTES else length + 100
    regions, memory = region(row_bytes)
    slots = [7, 8, 9, 10, 11, 1, 2, 3, 4, 5, 6]
    with open_rows(regions, [RowSet(memory.ctypes.data, row_bytes, length)], SlotIndex(u32(slots))) as (window,):
        assert list(stage_pieces([window, window], DIRECT_BYTES)) == [Unstaged([window, window])]
        vectors = window.vectors().tolist()
        assert Unstaged([window, window]).vectors().tolist() == 2 * vectors
    assert [size // length for _, size in vectors] == ([1] * 11 if length == DIRECT_BYTES else [5, 6])
    rows = memory.reshape(ROWS, row_bytes)[slots, :length]
    offsets = [(address - memory.ctypes.data, size) for address, size in vectors]
    assert b"".join(memory[offset : offset + size].tobytes() for offset, size in offsets) == rows.tobytes()


def test_pieces_fill_the_staging_buffer_across_windows() -> None:
    regions, memory = region(24)
    rows = [RowSet(memory.ctypes.data + 8 * third, 24, 8) for third in range(3)]
    with open_rows(regions, rows, SlotIndex(u32([1, 5, 3, 9]))) as windows:
        staged = [piece for piece in stage_pieces(windows, 40) if not isinstance(piece, Unstaged)]
    # Five rows of eight bytes each time: the next window's rows follow at once.
    assert [[(piece.first_row, piece.row_count, piece.offset) for piece in pieces] for pieces in staged] == [
        [(0, 4, 0), (0, 1, 32)],
        [(1, 3, 0), (0, 2, 24)],
        [(2, 2, 0)],
    ]
    assert all(isinstance(piece, Piece) for pieces in staged for piece in pieces)


@pytest.mark.parametrize(
    ("rows", "slots", "reason"),
    [
        ((0, 24, 24), [0, ROWS], "outside"),
        ((0, 24, 24), [2**32 - 1], "outside"),
        ((-24, 24, 24), [0, 1], "outside"),
        ((1, 24, 24), [ROWS - 1], "outside"),
        ((0, 8, 24), [0], "overlap"),
        ((0, 0, 0), [0], "overlap"),
    ],
)
def test_rows_that_leave_the_region_or_overlap_are_refused(
    rows: tuple[int, int, int], slots: list[int], reason: str
) -> None:
    regions, memory = region(24)
    offset, stride, length = rows
    with (
        pytest.raises(OutOfBoundsError, match=reason),
        open_rows(regions, [RowSet(memory.ctypes.data + offset, stride, length)], SlotIndex(u32(slots))),
    ):
        pass


@pytest.mark.usefixtures("copier")
@pytest.mark.parametrize(("length", "offset"), [(256, 0), (2048, 0), (2048, 8), (1000, 24)])
def test_rows_beside_cache_lines_arrive_whole(length: int, offset: int) -> None:
    stride = 4096
    regions, memory = region(stride)
    wanted = memory.copy()
    slots = [9, 2, 5, 0, 11]
    staged = np.random.default_rng(5).integers(0, 256, len(slots) * length, np.uint8)
    with open_rows(regions, [RowSet(memory.ctypes.data + offset, stride, length)], SlotIndex(u32(slots))) as (window,):
        window.scatter(0, len(slots), staged)
        back = np.empty_like(staged)
        window.gather(0, len(slots), back)
    wanted.reshape(ROWS, stride)[slots, offset : offset + length] = staged.reshape(len(slots), length)
    np.testing.assert_array_equal(memory, wanted)
    np.testing.assert_array_equal(back, staged)


def test_more_rows_than_there_are_slots_are_refused() -> None:
    regions, memory = region(24)
    with open_rows(regions, [RowSet(memory.ctypes.data, 24, 24)], SlotIndex(u32([3, 1]))) as (window,):
        with pytest.raises(ValueError, match="are not 2 rows of 24 from row 1 on"):
            window.scatter(1, 2, np.zeros(48, np.uint8))
        with pytest.raises(ValueError, match="47 bytes are not"):
            window.gather(0, 2, np.zeros(47, np.uint8))


def test_the_native_copier_is_of_these_sources() -> None:
    assert row_moves.native_rows is not None, "run `make compiled`"
    script = runpy.run_path(str(Path(__file__).parents[5] / "tools/build_native.py"))
    module = next(module for module in script["NATIVE_MODULES"] if module.name == "_rows")
    assert script["source_digest"](module) == row_moves.native_rows.SOURCE_DIGEST, "run `make compiled`"

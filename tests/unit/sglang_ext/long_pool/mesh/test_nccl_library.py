"""NCCL's C interface as it is called: against a library in C that writes down what it is given, by `nccl.h`'s types."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_ext.long_pool.mesh.nccl_library import UNIQUE_ID_BYTES, NcclError, NcclLibrary

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
# The records and functions are those of nccl.h, 2.18.
SOURCE = r"""
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stddef.h>
typedef int ncclResult_t; typedef int ncclDataType_t; typedef void* cudaStream_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct ncclComm { int rank, looks; } *ncclComm_t;
typedef struct {
  size_t size; unsigned int magic; unsigned int version; int blocking; int cgaClusterSize; int minCTAs; int maxCTAs;
  const char* netName; int splitShare;
} ncclConfig_t;
static FILE* out(void) { return fopen(getenv("NCCL_DOUBLE_LOG"), "a"); }
#define SAY(...) do { FILE* f = out(); fprintf(f, __VA_ARGS__); fclose(f); } while (0)
ncclResult_t ncclGetVersion(int* version) { *version = VERSION; return 0; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { for (int i = 0; i < 128; i++) id->internal[i] = i + 1; return 0; }
const char* ncclGetErrorString(ncclResult_t status) { return status == 5 ? "invalid usage" : "another error"; }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  SAY("init %d of %d, id %d to %d, size %d, magic %x, version %u, blocking %d, undefined %d, net %p\n",
      rank, nranks, (unsigned char)id.internal[0], (unsigned char)id.internal[127],
      config->size == sizeof(ncclConfig_t), config->magic, config->version, config->blocking,
      config->cgaClusterSize == INT_MIN && config->minCTAs == INT_MIN && config->maxCTAs == INT_MIN
        && config->splitShare == INT_MIN, (void*)config->netName);
  if (rank == 9) return 5;
  *comm = malloc(sizeof(**comm)); (*comm)->rank = rank; (*comm)->looks = 0; return 7;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  *state = comm->rank == 8 ? 5 : comm->looks++ ? 0 : 7; return 0;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { SAY("abort %d\n", comm->rank); return 0; }
ncclResult_t ncclGroupStart(void) { SAY("group\n"); return 0; }
ncclResult_t ncclGroupEnd(void) { SAY("end\n"); return 7; }
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t s) {
  SAY("send %zx %zx type %d to %d by %d on %zx\n", (size_t)data, count, type, peer, comm->rank, (size_t)s); return 0;
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t s) {
  SAY("receive %zx %zx type %d from %d by %d on %zx\n", (size_t)data, count, type, peer, comm->rank, (size_t)s);
  return 7;
}
"""


def build(folder: Path, version: int) -> str:
    source, library = folder / "double.c", folder / f"libnccl-{version}.so"
    source.write_text(SOURCE)
    assert COMPILER is not None
    command = [COMPILER, "-shared", "-fPIC", "-o", str(library), str(source), f"-DVERSION={version}"]
    subprocess.run(command, check=True, timeout=120)
    return str(library)


def test_what_the_library_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("NCCL_DOUBLE_LOG", str(log))
    nccl = NcclLibrary(build(tmp_path, 22707))
    unique_id = nccl.unique_id()
    assert unique_id == bytes(range(1, UNIQUE_ID_BYTES + 1))
    communicator = nccl.begin_connect(unique_id, 2, 3)
    assert [nccl.is_ready(communicator), nccl.is_ready(communicator)] == [False, True]
    high = 0x7F00_1234_5678
    nccl.begin_group()
    nccl.send(communicator, high, 2**33, 1, high + 1)
    nccl.receive(communicator, high + 2, 5, 0, high + 3)
    nccl.end_group()
    nccl.abort(communicator)
    assert log.read_text().splitlines() == [
        "init 2 of 3, id 1 to 128, size 1, magic cafebeef, version 21800, blocking 0, undefined 1, net (nil)",
        "group",
        f"send {high:x} {2**33:x} type 1 to 1 by 2 on {high + 1:x}",
        f"receive {high + 2:x} 5 type 1 from 0 by 2 on {high + 3:x}",
        "end",
        "abort 2",
    ]


def test_its_errors_are_told_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DOUBLE_LOG", str(tmp_path / "log"))
    nccl = NcclLibrary(build(tmp_path, 22707))
    with pytest.raises(NcclError, match=r"^ncclCommInitRankConfig: invalid usage$"):
        nccl.begin_connect(nccl.unique_id(), 9, 10)
    failed = nccl.begin_connect(nccl.unique_id(), 8, 10)
    with pytest.raises(NcclError, match=r"^invalid usage$"):
        nccl.is_ready(failed)


def test_one_that_is_too_old_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NcclError, match="21700 is too old"):
        NcclLibrary(build(tmp_path, 21700))
    with pytest.raises(NcclError, match=r"^NCCL cannot be used: "):
        NcclLibrary(str(tmp_path / "none.so"))

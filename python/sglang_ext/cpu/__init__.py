"""Stand-ins for packages that SGLang imports and a machine without a GPU lacks.

SGLang imports `triton`, `torchvision`, `torchaudio` and `sgl_kernel` on every device. No CPU build of
`sgl_kernel` is published, and the other three are large and never run on the CPU path. `install()` puts a
stand-in in place of each that is really absent: code that a served path reaches is implemented, everything
else raises an error that names what is missing.

Call `install()` before the first import of `sglang`, in every process (see `engine.launch`).
"""

from sglang_ext.cpu.import_hook import (
    BENCHMARK_CANDIDATES,
    CANDIDATES,
    absent_packages,
    install,
)

__all__ = ["BENCHMARK_CANDIDATES", "CANDIDATES", "absent_packages", "install"]

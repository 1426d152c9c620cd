"""PyTorch's threads, shared.

PyTorch computes with a runtime of OpenMP, whose threads watch for work for milliseconds after
each operation. Threads of Saccade's own would take turns with them, so its loops run on the
same ones. SACCADE_OPENMP=0 keeps them apart.
"""

from __future__ import annotations

import ctypes as C
import os
import re

import torch

from ..c import abi

_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)[-.][^/]*$")


def runtimes() -> list[str]:
    """The runtimes of OpenMP that the process has loaded: PyTorch's own, if it brought one."""
    try:
        with open("/proc/self/maps") as maps:
            found = {line.split(None, 5)[-1].strip() for line in maps if "/" in line}
    except OSError:
        return []
    paths = sorted(path for path in found if _RUNTIME.search(path))
    home = os.path.realpath(os.path.join(os.path.dirname(torch.__file__), ".."))
    own = [p for p in paths if os.path.realpath(p).startswith(os.path.join(home, "torch"))]
    return own or paths


def share() -> bool:
    """Whether loops run on PyTorch's threads from now on: there must be one runtime."""
    paths = runtimes()
    if len(paths) != 1 or os.environ.get("SACCADE_OPENMP") == "0":
        return False
    if "OpenMP" not in torch.__config__.parallel_info().split("ATen parallel backend:")[-1]:
        return False
    try:
        lib = C.CDLL(paths[0])
        functions = [
            C.cast(getattr(lib, name), C.c_void_p)
            for name in ("GOMP_parallel", "omp_get_thread_num", "omp_in_parallel")
        ]
    except (OSError, AttributeError):
        return False
    abi.call("share_openmp", *functions)
    return True

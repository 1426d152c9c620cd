"""What the library that runs was built with, and what it is told by the environment."""

from __future__ import annotations

import os
import platform

from .c.abi import lib

_VARIABLES = (
    "SACCADE_LIBRARY",
    "SACCADE_LEVEL",
    "SACCADE_OPENMP",
    "SACCADE_KEEP_WORKSPACE",
    "SACCADE_CUDA_TILES",
    "SACCADE_CACHE_DIR",
    "XDG_CACHE_HOME",
    "OMP_NUM_THREADS",
    "OMP_THREAD_LIMIT",
)


def config() -> dict[str, str]:
    """What show_config prints, by name."""
    parts = lib.saccade_build().decode().split(", ")
    found = {"version": lib.saccade_version().decode(), "library": str(lib._name)}
    for part in parts:
        name = part.split()[-1]
        if part.startswith("levels "):
            found["levels"] = part[7:]
        elif part in (name, f"no {name}"):
            found[name] = "no" if part.startswith("no ") else "yes"
    is_compiled = found.get("zydis") == "yes"
    found["mods"] = (
        "compiled to machine code where there is AVX2 or AVX-512, else interpreted"
        if is_compiled
        else "interpreted: no Zydis when the library was built (Debian: libzydis-dev)"
    )
    found["python"] = f"{platform.python_version()}, {platform.machine()}"
    for name in _VARIABLES:
        if name in os.environ:
            found[name] = os.environ[name]
    return found


def show_config() -> None:
    """Prints what is built in: optional parts, instruction-set levels, whether masks and scores
    are compiled or interpreted, which library file it is, and variables that steer it."""
    for name, value in config().items():
        print(f"{name:18} {value}")

"""PEP 517 hooks: scikit-build-core's, and an sdist that holds the C library's sources too.

In the repository the C sources lie above this folder, in an sdist in library/ beside it.
"""

import re
import shutil
from pathlib import Path

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403 - the hooks that stay as they are

_HERE = Path(__file__).resolve().parent
_INSIDE = _HERE / "library"
_PARTS = ("CMakeLists.txt", "LICENSE", "cmake", "include", "src")


def dynamic_metadata(field, settings, project=None):
    """The version, as CMakeLists.txt has it."""
    root = _INSIDE if _INSIDE.exists() else _HERE.parent
    text = (root / "CMakeLists.txt").read_text(encoding="utf-8")
    return re.search(r"project\(saccade VERSION ([0-9.]+)", text)[1]


def build_sdist(sdist_directory, config_settings=None):
    _INSIDE.mkdir()
    try:
        for name in _PARTS:
            part = _HERE.parent / name
            (shutil.copytree if part.is_dir() else shutil.copy)(part, _INSIDE / name)
        return build.build_sdist(sdist_directory, config_settings)
    finally:
        shutil.rmtree(_INSIDE)

"""PEP 517 hooks: scikit-build-core's, an sdist that holds the C library's sources too, and
wheels that say how far they are while they are made.

In the repository the C sources lie above this folder, in an sdist in library/ beside it.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403 - the hooks that stay as they are

_HERE = Path(__file__).resolve().parent
_INSIDE = _HERE / "library"
_PARTS = ("CMakeLists.txt", "LICENSE", "cmake", "include", "src")
_STEP = re.compile(r"\[ *(\d+)(?:%|/(\d+))\] Building .*?\.dir/(.*)\.o")
_INTERPRETED = (
    "saccade: built without Zydis: masks and scores are interpreted, not compiled, and take up "
    "to 1.7 times as long. On Debian: apt-get install libzydis-dev, then install again."
)


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
        shutil.copytree(_HERE / "warm", _INSIDE / "python" / "warm")
        return build.build_sdist(sdist_directory, config_settings)
    finally:
        shutil.rmtree(_INSIDE)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with _told():
        name = build.build_wheel(wheel_directory, config_settings, metadata_directory)
    return _tagged(Path(wheel_directory), name)


def _tagged(folder, name):
    """The wheel under the name of the oldest systems it runs on, where auditwheel is there."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    tool = shutil.which("auditwheel", path=path)
    if tool is None:
        print("saccade: no auditwheel: the wheel is for this machine's kind of system")
        return name
    made = folder / "repaired"
    # pip hides every package but the build's own by PYTHON* variables, auditwheel's too
    around = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run([tool, "repair", "-w", made, folder / name], check=False, env=around)
    found = sorted(made.glob("*.whl")) if done.returncode == 0 else []
    if found:
        (folder / name).unlink()
        name = found[0].name
        found[0].rename(folder / name)
    shutil.rmtree(made, ignore_errors=True)
    return name


# pip keeps what a build prints to itself unless it fails or -v is given, so that a build of a
# minute looks like one that hangs: per cent and file go to the terminal, if there is one.


@contextlib.contextmanager
def _told():
    sys.stdout.flush()
    kept, (end, start) = os.dup(1), os.pipe()
    os.dup2(start, 1)
    os.close(start)
    reader = threading.Thread(target=_tell, args=(end, kept))
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        reader.join()
        os.close(kept)


def _tell(source, log):
    """Copies a build's lines to the log, and shows on the terminal where it is."""
    try:
        terminal = open("/dev/tty", "w", encoding="utf-8")
    except OSError:
        terminal = None
    with open(source, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            os.write(log, line.encode())
            step = _STEP.search(line)
            if step and terminal:
                percent = 100 * int(step[1]) // int(step[2] or 100)
                print(f"\r\033[Ksaccade: {percent} % {step[3]}", end="", file=terminal)
            if "absent" in line and "zydis" in line and os.uname().machine == "x86_64":
                os.write(log, (_INTERPRETED + "\n").encode())
                if terminal:
                    print("\r\033[K" + _INTERPRETED, file=terminal)
            if terminal:
                terminal.flush()
    if terminal:
        print("\r\033[K", end="", file=terminal, flush=True)
        terminal.close()

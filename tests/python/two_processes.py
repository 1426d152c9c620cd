"""A test file run by two processes, the ranks of a group."""

import os
import subprocess
import sys
from pathlib import Path


def run(file, store, seconds, **variables):
    """Each is `file RANK STORE`. Fails with what both told unless both end well."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root / "python"), os.environ.get("PYTHONPATH", "")])
    runs = [
        subprocess.Popen(
            [sys.executable, file, str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **variables},
        )
        for rank in range(2)
    ]
    try:
        told = [r.communicate(timeout=seconds)[0] for r in runs]
    finally:
        for r in runs:
            r.kill()
    assert [r.returncode for r in runs] == [0, 0], "\n".join(told)

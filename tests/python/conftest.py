"""Without an installed saccade the tests take the package of this tree and build/'s library."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("saccade") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

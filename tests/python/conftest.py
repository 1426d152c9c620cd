"""Without an installed saccade the tests take the package of this tree and build/'s library."""

import importlib.util
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("saccade") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))


@pytest.fixture(autouse=True)
def block_masks_lie_on_the_host(request, monkeypatch):
    """What these tests make lies there, on machines with a GPU too; test_cuda.py is of GPUs."""
    if importlib.util.find_spec("torch") and request.path.name != "test_cuda.py":
        import torch

        monkeypatch.setattr("saccade.torch.masks._device", lambda: torch.device("cpu"))

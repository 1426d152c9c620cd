"""The examples that train run, in their short forms; each ends with assertions of its own."""

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

FOLDER = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    "name,options",
    [
        ("learned_bias", ["--steps", "4"]),
        ("train_gpt", ["--short", "--steps", "3"]),
        ("longer_context", ["--short", "--tokens", "1024"]),
        ("draft_tree", ["--nodes", "40", "--prefix", "90", "--page", "7"]),
        ("packed_block", ["--lengths", "300", "--repeats", "1", "--document", "90"]),
    ],
)
def test_runs(name, options, monkeypatch, tmp_path):
    svg = ["--svg", str(tmp_path / "x.svg")] if "--short" in options else []
    monkeypatch.setattr(sys, "argv", [name, *options, *svg])
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(FOLDER / f"{name}.py"))
    assert not svg or (tmp_path / "x.svg").read_text().startswith("<svg")

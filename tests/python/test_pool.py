"""Loops on PyTorch's threads: the bits of the library's own, in children of fork() too."""
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

PROGRAM = """
import os, signal, sys, torch
import saccade.torch.pool as pool
from saccade.torch import flex_attention

shared = pool.share() if len(sys.argv) > 1 else False
torch.set_num_threads(2)
torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 200, 32) for _ in range(3))
torch.randn(300, 300) @ torch.randn(300, 300)
out = flex_attention(q, k, v, None, "causal()")
child = os.fork()
if child == 0:
    signal.alarm(60)
    again = flex_attention(q, k, v, None, "causal()")  # torch's own loops would hang here
    os._exit(0 if again.flatten().tolist() == out.flatten().tolist() else 1)
status = os.waitpid(child, 0)[1]
print(shared, status, out.double().sum().item(), out[1, 3, 77].tolist())
"""


def results(*arguments, **environment):
    run = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], text=True, timeout=300,
                         capture_output=True, env={**os.environ, **environment})
    assert run.returncode == 0, run.stderr
    shared, status, rest = run.stdout.split(" ", 2)
    assert status == "0"
    return shared, rest


def test_threads_are_shared():
    shared, on_team = results("share")
    apart, on_own = results("share", SACCADE_OPENMP="0")
    assert apart == "False" and on_team == on_own
    if shared == "False":
        pytest.skip("no runtime of OpenMP to share")

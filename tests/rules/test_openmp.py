# SPDX-License-Identifier: Apache-2.0
"""Steps use no operation of torch that waits for OpenMP's threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import HANG

ROOT = Path(__file__).parents[2]
CODE = """
import os, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from benchmarks.regress.worker import RULES, step_call

threads = lambda: len(os.listdir("/proc/self/task"))

class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        before = threads()
        result = call(*args, **(kwargs or {}))
        if threads() > before and not str(call).startswith("fastagg"):
            print(rule, call, [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)])
        return result

torch.set_num_threads(1)  # making the operands starts none
calls = {rule: step_call(rule, 100, 40_000, "copied") for rule in RULES}
torch.set_num_threads(2)
for rule, call in calls.items():
    with Watch():
        for _ in range(3):
            call()
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_no_operation_of_torch_starts_threads() -> None:
    """A process that has started OpenMP's threads once would not show it: this one is fresh."""
    found = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )
    assert (found.returncode, found.stdout) == (0, ""), found.stdout + found.stderr

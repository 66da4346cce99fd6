# SPDX-License-Identifier: Apache-2.0
"""A short run of each part of the fuzzer of checkpoints, in a process that may die."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_no_damaged_or_forged_file_goes_wrong() -> None:
    counts = ["--flips=1000", "--truncated=2", "--crafted=15", "--cuts=20"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.checkpoints", *counts],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "bit flips: 1000\n  refused: 1000\n" in done.stdout

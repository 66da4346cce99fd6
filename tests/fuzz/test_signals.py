# SPDX-License-Identifier: Apache-2.0
"""A short run of the fuzzer of signals."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.scripts import HANG, ROOT


@pytest.mark.slow
def test_no_signal_splits_a_step() -> None:
    """In a process of its own: Python ignores what handlers raise within callbacks of the garbage
    collector, and pytest's plugins may have installed some."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.signals", "--signals", "270"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "half written: 0" in done.stdout
    assert "lost: 0" in done.stdout

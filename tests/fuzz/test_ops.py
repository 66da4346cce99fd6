# SPDX-License-Identifier: Apache-2.0
"""The corpus of the fuzzer of ops and rules, and a short run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def fuzz(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.ops", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_a_short_run_of_the_fuzzer_finds_nothing() -> None:
    assert ", 0 went wrong" in fuzz("--calls", "5000", "--seed", "7")


@pytest.mark.slow
def test_what_went_wrong_once_does_not_go_wrong_again() -> None:
    assert ", 0 went wrong" in fuzz("--replay", str(Path("tests/fuzz/corpus/ops.jsonl")))

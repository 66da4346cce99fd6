# SPDX-License-Identifier: Apache-2.0
"""The pages of results/ agree with the CSV files."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastagg_sim import experiments, verdicts
from fastagg_sim.experiments import _write

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
FOLDERS = {path.relative_to(RESULTS).as_posix(): path for path in _write.claim_folders(RESULTS)}
AGAIN = "run: fastagg-sim claims"


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_the_verdicts_follow_from_the_csv_files(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "results" / name
    shutil.copytree(FOLDERS[name], copy, ignore=shutil.ignore_patterns("*.png", "*.svg"))
    list(experiments.repeat(tmp_path / "results", experiments.available(), figures=False))
    old, new = (json.loads((path / "claims.json").read_text()) for path in (FOLDERS[name], copy))
    assert new == old, AGAIN


def test_every_claim_is_listed() -> None:
    page = (RESULTS / "claims.md").read_text(encoding="utf-8")
    assert page == _write.claims_page(RESULTS), AGAIN


def test_the_overview_has_the_counts_of_every_run() -> None:
    overview = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert overview == _write.with_counts(overview, RESULTS), AGAIN
    rows = overview.partition("\n## ")[0].splitlines()
    for name in FOLDERS:
        assert sum(f"]({name}/" in row for row in rows) == 1, f"{name}: expected one row"


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(folder / "check.py")]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_number_of_the_overview_is_recomputed() -> None:
    done = check(RESULTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) > 200 and "WRONG" not in done.stdout


def test_the_interval_of_one_seed_is_that_of_the_verdicts() -> None:
    """check.py computes it without our code, for runs of 100 evaluations."""
    script = runpy.run_path(str(RESULTS / "check.py"))
    values = np.random.default_rng(0).normal(size=100).cumsum()
    for inside in (1, 10):
        found = verdicts.over_blocks(values, slice(100 - 10 * inside, 100)).interval()
        # its quantile is found by bisection of an integral
        assert script["over_blocks"](values, inside) == pytest.approx(found, rel=1e-5)


@pytest.mark.parametrize(
    ("stated", "changed", "complaint"),
    [
        # a number, a verdict's count, and a sentence that no check knows
        ("Full 0.498 → 0.478", "Full 0.498 → 0.479", "0.479"),
        ("Full 0.498 → 0.478", "Full 0.489 → 0.478", "not in README.md"),
        ("# Results\n", "# Results\n\nThe accuracy is 0.9.\n", "0.9"),
    ],
)
def test_a_changed_number_is_caught(
    stated: str, changed: str, complaint: str, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    shutil.copytree(RESULTS, folder, ignore=shutil.ignore_patterns("*.png", "*.svg"))
    page = folder / "README.md"
    text = page.read_text(encoding="utf-8")
    assert text.count(stated) == 1
    page.write_text(text.replace(stated, changed), encoding="utf-8")
    done = check(folder)
    wrong = [line for line in done.stdout.splitlines() if "WRONG" in line]
    assert done.returncode == 1 and len(wrong) == 1 and complaint in wrong[0]

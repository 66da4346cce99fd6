# SPDX-License-Identifier: Apache-2.0
"""docs/choosing.md states the differences that the full runs have."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "choosing_figure.py"))


@pytest.mark.parametrize("number", range(len(SCRIPT["COMPARISONS"])))
def test_every_difference_is_stated_as_measured(number: int) -> None:
    comparison = SCRIPT["COMPARISONS"][number]
    assert comparison.cited() in PAGE, f"{comparison}: expected {comparison.cited()}"


def test_every_stated_difference_is_measured() -> None:
    stated = re.findall(r"[+-]\d+\.\d+ \[-?[\d.]+, -?[\d.]+\]", PAGE)
    known = {comparison.cited() for comparison in SCRIPT["COMPARISONS"]}
    assert len(stated) >= len(known) and set(stated) <= known


def test_only_full_runs_are_cited() -> None:
    folders = {item.folder for item in (*SCRIPT["COMPARISONS"], *SCRIPT["SETTINGS"])}
    assert not [folder for folder in folders if folder.startswith("quick")]

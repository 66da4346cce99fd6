# SPDX-License-Identifier: Apache-2.0
"""docs/choosing.md states the differences that the full runs have."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "choosing.py"))


def test_the_tables_are_those_of_the_runs() -> None:
    assert SCRIPT["with_tables"](PAGE) == PAGE, "python docs/choosing.py writes the tables"
    named = set(re.findall(r"<!-- table (\S+) -->", PAGE))
    assert named == {*SCRIPT["SECTIONS"], "costs"}


def test_no_other_difference_is_stated() -> None:
    text = re.sub(r"<!-- table .*?<!-- end -->", "", PAGE, flags=re.DOTALL)
    assert not re.findall(r"[+-]\d+\.\d+ \[-?[\d.]+, -?[\d.]+\]", text)


def test_only_full_runs_are_cited() -> None:
    folders = {item.folder for item in SCRIPT["COMPARISONS"]}
    assert not [folder for folder in folders if folder.startswith("quick")]


def test_the_figure_has_the_differences_to_plain_averaging_of_all_tables() -> None:
    """Only the table of rows in int8 compares a rule with itself."""
    drawn = [section for panel in SCRIPT["PANELS"] for section in panel]
    assert set(SCRIPT["SECTIONS"]) - set(drawn) == {"int8"}
    for setting, gains in SCRIPT["gains"]("adversary").items():
        assert f"| {setting} | `mifa` - `fedavg` |" in PAGE
        assert f"{gains['MIFA'].value / 100:+.3f} [" in PAGE

# SPDX-License-Identifier: Apache-2.0
"""The overview of results/ agrees with the files."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


claims_page = runpy.run_path(str(ROOT / "docs" / "claims_page.py"))
FOLDERS = {path.relative_to(RESULTS).as_posix(): path for path in claims_page["folders"]()}


def test_every_claim_is_listed() -> None:
    page = (RESULTS / "claims.md").read_text(encoding="utf-8")
    assert page == claims_page["page"](), "run: python docs/claims_page.py"


@pytest.mark.parametrize("name", FOLDERS)
def test_the_overview_counts_the_claims_of_every_run(name: str) -> None:
    """The row of the overview that links to a run has the verdicts of that run."""
    overview = (RESULTS / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = [row for row in overview.splitlines() if re.search(rf"\]\({re.escape(name)}/", row)]
    assert len(rows) == 1, f"{name}: expected one row of the overview with a link to it"
    assert claims_page["counts"](FOLDERS[name]) in rows[0]

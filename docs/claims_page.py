# SPDX-License-Identifier: Apache-2.0
"""Write results/claims.md: every checked claim of every committed run, with its numbers.

Run from the root of the repository: python docs/claims_page.py
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = RESULTS / "claims.md"
VERDICTS = {"PASS": "holds", "FAIL": "**fails**", "NOT MEASURED": "not measured"}
HEAD = """# Every claim

Written by `python docs/claims_page.py` from the `claims.json` of every folder;
[README.md](README.md) says how each was made and what we think of the claims that fail. "Not
measured": the run is shorter than the paper's, or its seeds cannot tell.
"""


def folders() -> list[Path]:
    """Return all folders with claims: full runs first, then those with --quick."""
    found = [path.parent for path in RESULTS.rglob("claims.json")]
    return sorted(found, key=lambda path: (path.parent.name == "quick", path.name))


def claims(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "claims.json").read_text(encoding="utf-8"))["claims"]


def counts(folder: Path) -> str:
    """Return e.g. "5 of 7 hold, 2 not measured"; the 7 exclude the claims not measured."""
    seen = Counter(claim["verdict"] for claim in claims(folder))
    unknown = f", {seen['NOT MEASURED']} not measured" if seen["NOT MEASURED"] else ""
    return f"{seen['PASS']} of {seen['PASS'] + seen['FAIL']} hold{unknown}"


def section(folder: Path) -> str:
    name = folder.relative_to(RESULTS).as_posix()
    lines = [f"## {name}", "", counts(folder), "", "| claim | verdict | numbers |", "|---|---|---|"]
    for claim in claims(folder):
        numbers = ", ".join(f"{key}: {value}" for key, value in claim["numbers"].items())
        cells = (claim["text"], VERDICTS[claim["verdict"]], numbers)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    return "\n".join([HEAD, *map(section, folders())])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

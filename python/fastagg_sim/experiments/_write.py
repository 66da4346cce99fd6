# SPDX-License-Identifier: Apache-2.0
"""Write what an experiment concludes from its CSV files, and the overview of a folder of results.

`conclude` writes claims.json, paper.md and the figure of one experiment. `repeat` does that again
for all finished experiments in a folder, and writes the overview: claims.md, and the counts of
verdicts in README.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastagg_sim.config import ConfigError
from fastagg_sim.experiments._base import (
    Claim,
    Experiment,
    Options,
    claims_content,
    claims_json,
    read_claims_json,
)
from fastagg_sim.files import write_atomically
from fastagg_sim.tables import Grid
from fastagg_sim.verdicts import VERDICTS

CLAIMS = "claims.json"
_BEGIN, _END = "<!-- counts: begin -->", "<!-- counts: end -->"
FULL = "full"  # runs that are not scaled down
_COLUMNS = slice(2, 5)  # of the overview: the counts of verdicts
_HEAD = """# Every claim

Written by `fastagg-sim claims` from the CSV files of every folder. [README.md](README.md) says how
each run was made and what we think of the claims that fail. A claim holds or fails if the 95 %
interval of its number, in square brackets, lies inside or outside the range that it names; else it
is undecided ([the rule](../python/fastagg_sim/verdicts.py)). "Counted" claims need no interval. An
interval from one seed says nothing about other seeds.
"""


@dataclass(frozen=True)
class Conclusion:
    """The claims of an experiment, its table if it has one, and the files that were written."""

    claims: Sequence[Claim]
    table: Grid | None
    files: list[Path]


def conclude(
    experiment: Experiment,
    options: Options,
    folders: Mapping[str, Path],
    out: Path,
    *,
    figures: bool = True,
) -> Conclusion:
    """Check the claims of finished runs and write claims.json, paper.md and figure.png to `out`.

    folders: the folders of the results by the names that `experiment.configs` returned.
    figures: also draw the figure.
    """
    claims = experiment.claims(folders, options)
    files = [out / CLAIMS]
    write_atomically(files[-1], claims_json(experiment, options, claims))
    grid = None
    if experiment.table is not None:
        grid = experiment.table(folders, options)
        files.append(out / "paper.md")
        write_atomically(files[-1], grid.to_markdown())
    if experiment.draw is not None and figures:
        files.append(out / "figure.png")
        experiment.draw(folders, options, files[-1])
    return Conclusion(claims, grid, files)


def repeat(root: Path, known: Mapping[str, Experiment], *, figures: bool = True) -> Iterator[Path]:
    """Conclude again from the CSV files of every experiment below `root`; yield the files written.

    The experiment and its options are those in claims.json. No run is repeated. claims.md is
    written to `root`, and the counts in README.md there are updated, if it has them.

    known: all experiments by name.
    figures: also draw all figures, those of the runs included.

    Raises ConfigError if there is no experiment, or a file is damaged.
    """
    from fastagg_sim.plots import plot_folder

    found = claim_folders(root)
    if not found:
        raise ConfigError(f"{root}: expected results of experiments ({CLAIMS}), found none")
    for out in found:
        experiment, options = read_claims_json(out / CLAIMS, known)
        configs = sorted(out.glob("config.json")) + sorted(out.glob("*/config.json"))
        runs = [path.parent for path in configs]
        folders = {"" if run == out else run.name: run for run in runs} or {"": out}
        yield from conclude(experiment, options, folders, out, figures=figures).files
        for run in runs if figures else ():
            yield from plot_folder(run)
    write_atomically(root / "claims.md", claims_page(root))
    yield root / "claims.md"
    overview = root / "README.md"
    if overview.exists():
        write_atomically(overview, with_counts(overview.read_text(encoding="utf-8"), root))
        yield overview


def claim_folders(root: Path) -> list[Path]:
    """Return all folders with claims: full runs first, then those with --quick."""
    found = [path.parent for path in root.rglob(CLAIMS)]
    return sorted(found, key=lambda path: (is_quick(path), path.name, path))


def _content(folder: Path) -> dict[str, Any]:
    return claims_content(folder / CLAIMS)


def is_quick(folder: Path) -> bool:
    return bool(_content(folder)["options"].get("quick", False))


def counts(folder: Path) -> Counter[str]:
    """Return the number of claims of a folder by verdict."""
    return Counter(claim["verdict"] for claim in _content(folder)["claims"])


def totals(root: Path) -> str:
    """Return a table of the numbers of claims below `root` by verdict.

    Its rows are all full runs, the same by the basis of a claim, and all scaled-down runs.
    """
    rows: dict[str, Counter[str]] = {FULL: Counter()}
    by_basis: dict[str, Counter[str]] = {}
    quick = Counter[str]()
    for folder in claim_folders(root):
        if is_quick(folder):
            quick += counts(folder)
            continue
        rows[FULL] += counts(folder)
        for claim in _content(folder)["claims"]:
            by_basis.setdefault(claim["basis"], Counter())[claim["verdict"]] += 1
    for basis in sorted(by_basis, key=_order):
        rows[f"{FULL}, {basis}"] = by_basis[basis]
    rows["scaled down (`--quick`)"] = quick
    lines = ["| runs | hold | fail | undecided |", "|---|---|---|---|"]
    for title, seen in rows.items():
        cells = [title, *(str(seen[verdict]) for verdict in VERDICTS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _order(basis: str) -> tuple[int, str]:
    """Return the place of a basis in a table: many seeds first, one seed, and then words."""
    number = basis.partition(" ")[0]
    return (-int(number) if number.isdigit() else -(basis == "one seed"), basis)


def claims_page(root: Path) -> str:
    """Return the text of claims.md: the `totals`, and every claim of every folder, with its
    numbers."""
    sections = (_section(folder, root) for folder in claim_folders(root))
    return "\n".join([_HEAD, totals(root) + "\n", *sections])


def _section(folder: Path, root: Path) -> str:
    name = folder.relative_to(root).as_posix()
    seen = counts(folder)
    numbers = ", ".join(f"{seen[verdict]} {verdict}" for verdict in VERDICTS)
    lines = [f"## {name}", "", numbers, "", "| claim | verdict | basis | numbers |"]
    lines.append("|---|---|---|---|")
    for claim in _content(folder)["claims"]:
        shown = ", ".join(f"{key}: {value}" for key, value in claim["numbers"].items())
        verdict = "**fails**" if claim["verdict"] == "fails" else claim["verdict"]
        cells = (claim["text"], verdict, claim["basis"], shown)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def with_counts(text: str, root: Path) -> str:
    """Return the overview `text` with the present counts of verdicts.

    They are the table of `totals` between two marks, and three columns of each row that links to a
    folder.
    """
    folders = claim_folders(root)
    begin, found, rest = text.partition(_BEGIN)
    if found:
        _, _, end = rest.partition(_END)
        text = f"{begin}{_BEGIN}\n\n{totals(root)}\n\n{_END}{end}"
    head, mark, body = text.partition("\n## ")
    names = {folder.relative_to(root).as_posix(): folder for folder in folders}
    lines = []
    for line in head.splitlines():
        linked = re.search(r"\]\(((?:quick/)?[^/()]+)/", line)
        if line.startswith("|") and linked and linked[1] in names:
            cells = line.split(" | ")
            seen = counts(names[linked[1]])
            cells[_COLUMNS] = [str(seen[verdict]) for verdict in VERDICTS]
            line = " | ".join(cells)
        lines.append(line)
    return "\n".join(lines) + ("\n" if head.endswith("\n") else "") + mark + body

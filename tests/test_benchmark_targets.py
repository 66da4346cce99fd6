# SPDX-License-Identifier: Apache-2.0
"""The page with the targets of all kinds of processor."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as entry
from benchmarks import by_kind, report, targets
from benchmarks.harness import Row

_OURS = Row(
    op="gram", K=None, S=3, d=1000, threads=2, contender="fastagg", role="ours", isa="avx2", us=2.0,
    us_q1=2.0, us_q3=2.0, gbytes_per_s=1.0, gflops=1.0, bound="read", percent_of_ceiling=50.0,
    baseline="torch", times_baseline=2.0, times_ours=1.0, peak_mb=0.0, home="DRAM",
    read_gbytes_per_s=1.0, update_gbytes_per_s=math.nan, fma_gflops=1.0, repeats=9, other_cores=0.0,
    verdict="ok",
)  # fmt: skip
# It takes 4 us and reaches a quarter of the ceiling: fastagg could be 4 times as fast.
_TORCH = replace(
    _OURS,
    contender="torch",
    role="careful",
    us=4.0,
    percent_of_ceiling=25.0,
    times_baseline=1.0,
    times_ours=2.0,
)
_ABOUT = {"cpu": "a processor", "cores": "2", "torch": "2.13", "commit": "abc", "blas": "none"}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the results of two kinds."""
    asked = [
        targets.Target("gram", ((3, 1000), (4, 1000)), "torch", value) for value in (1.5, 3.0, 5.0)
    ]
    asked.append(targets.Target("gram", ((3, 1000),), "ceiling", 80))
    monkeypatch.setattr(targets, "TARGETS", asked)
    noisy = replace(_TORCH, times_ours=math.nan)
    for kind, rows in (("one", [_OURS, _TORCH]), ("two", [_OURS, noisy])):
        report.write_csv(tmp_path / kind / "ops.csv", [report.Measured(r, _ABOUT) for r in rows])
    return tmp_path


def test_the_page_has_a_column_for_each_kind(results: Path) -> None:
    entry.main(["targets", "--out", str(results)])
    page = (results / "targets.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| gram")]
    assert lines == [
        "| gram | 3 | 1,000 | fastagg | torch | 1.50 x | 2.00 x | noisy |",
        "| gram | 4 | 1,000 | fastagg | torch | 1.50 x |  |  |",
        "| gram | 3 | 1,000 | fastagg | torch | 3.00 x | **2.00 x, limit 4.00 x** | noisy |",
        "| gram | 4 | 1,000 | fastagg | torch | 3.00 x |  |  |",
        "| gram | 3 | 1,000 | fastagg | torch | 5.00 x | *2.00 x, limit 4.00 x* | noisy |",
        "| gram | 4 | 1,000 | fastagg | torch | 5.00 x |  |  |",
        "| gram | 3 | 1,000 | fastagg | ceiling | 80 % | **50 %** | **50 %** |",
    ]
    assert "- `one`: 1 met, 2 missed, 1 out of reach\n- `two`: 3 noisy, 1 missed" in page


def test_pages_of_a_kind_are_those_of_their_files(results: Path) -> None:
    report.write_table_page(results / "one" / "ops.csv")
    page = (results / "one" / "ops.md").read_text()
    assert "`python -m benchmarks ops` on kind one: cpu a processor" in page
    assert "| gram |  | 3 | 1,000 | 2 | torch | 4 |" in page
    entry.main(["targets", "--out", str(results)])
    assert (results / "one" / "ops.md").read_text() == page


def test_committed_pages_are_up_to_date(tmp_path: Path) -> None:
    committed = Path(by_kind.__file__).parent / "results"
    for table in committed.glob("*/*.csv"):
        if table.stem in ("ops", "steps", "columns"):
            copy = tmp_path / table.relative_to(committed)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(table.read_bytes())
    entry.main(["targets", "--out", str(tmp_path)])
    pages = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.md")]
    assert len(pages) >= 5
    for page in pages:
        assert (tmp_path / page).read_text() == (committed / page).read_text(), page


def test_a_folder_without_results(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a folder with results"):
        entry.main(["targets", "--out", str(tmp_path)])

# SPDX-License-Identifier: Apache-2.0
"""The benchmark of many clients: each case is a process, and the table has them all."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import clients


@pytest.mark.slow
def test_cases_are_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CASES", [("synthetic", "fdms-means")])
    command.main(["clients", "--quick", "--rounds", "3", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*/clients.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["K"], row["S"]) for row in rows] == [("200", "100"), ("1000", "100")]
    assert float(rows[0]["growth"]) == 1.0
    for row in rows:
        assert 0 < float(row["q1"]) <= float(row["seconds"]) <= float(row["q3"])
        assert 0 < float(row["before_mb"]) < float(row["peak_mb"])
    text = path.with_suffix(".md").read_text("utf-8")
    assert text.count("| synthetic | `fdms-means` |") == 2

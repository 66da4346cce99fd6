# SPDX-License-Identifier: Apache-2.0
"""docs/flgo.md: the program runs as printed, in an empty folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.scripts import python_block, run_script


@pytest.mark.flower
def test_the_program_runs_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("flgo", reason="flgo is not installed (make test-flower installs it)")
    output = run_script(python_block("flgo.md"), tmp_path)
    found = re.findall(r"^([\w-]+): accuracy ([\d.]+), then ([\d.]+)$", output, re.MULTILINE)
    assert [rule for rule, _, _ in found] == ["fedavg", "fdms", "mifa"]
    assert all(float(after) > float(before) for _, before, after in found)
    records = sorted((tmp_path / "task" / "record").iterdir())
    rounds = [json.loads(file.read_text(encoding="utf-8"))["fastagg"] for file in records]
    assert [len(of_a_rule) for of_a_rule in rounds] == [15, 15, 15]
    # The page says that all rules meet the same absences.
    absences = [[entry["answered"] for entry in of_a_rule] for of_a_rule in rounds]
    assert absences[0] == absences[1] == absences[2]
    assert any(entry["unavailable"] for entry in rounds[0])
    assert any(entry["dropped"] for entry in rounds[0])

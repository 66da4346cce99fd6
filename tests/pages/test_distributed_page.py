# SPDX-License-Identifier: Apache-2.0
"""docs/distributed.md: its server runs as launched, and its tables match the measurements."""

from __future__ import annotations

import csv
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import HANG

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_server_runs_as_its_first_line_says(tmp_path: Path) -> None:
    (server,) = [block for block in blocks() if block.startswith("# torchrun ")]
    _, *arguments, script = shlex.split(server.splitlines()[0].removeprefix("# "))
    (tmp_path / script).write_text(server, encoding="utf-8")
    paths = [str(ROOT), str(ROOT / "python"), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "checkpoint").glob("*-of-00002.safetensors"))) == 2


def test_the_table_is_what_the_script_prints() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "distributed_budget.py"))
    assert "\n".join(script["lines"]()) in PAGE


def test_the_weak_scaling_is_that_of_the_csv() -> None:
    with (ROOT / "benchmarks" / "results" / "sharded.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["what"].startswith("step ")]
    assert {row["ranks"] for row in rows} == {"1", "2", "4"} and rows[0]["cores"] == "2"
    for ranks in ("2", "4"):
        steps = [row for row in rows if row["ranks"] == ranks]
        cells = [f"| {ranks} "]
        for name in ("efficiency", "per_core"):
            percent = [round(100.0 * float(row[name])) for row in steps]
            cells.append(f"| {min(percent)} to {max(percent)} % ")
        lost = [float(row["ms"]) - float(row["ms_apart"]) for row in steps]
        cells.append(f"| {min(lost):.0f} to {max(lost):.0f} ms a step |")
        assert "".join(cells) in PAGE

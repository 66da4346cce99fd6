# SPDX-License-Identifier: Apache-2.0
"""docs/distributed.md: its code runs, also as launched, and its table is what its script prints."""

from __future__ import annotations

import csv
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")


@pytest.fixture(name="one_rank")
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun sets for a single process; port 0: any that is free."""
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(blocks())))
def test_code_runs(
    one_rank: None, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: dict[str, object] = {}
    exec(compile(blocks()[number], f"block {number}", "exec"), seen)
    assert "params" in seen


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
        timeout=180,
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

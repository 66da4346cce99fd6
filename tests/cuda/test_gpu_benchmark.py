# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark as a dry run on the CPU: it completes, and contenders agree."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import cuda, cuda_cases
from benchmarks.work import WORK


def test_a_dry_run_writes_every_op(tmp_path: Path) -> None:
    assert cuda.main(["--dry-run", "--out", str(tmp_path)]) == 0
    with (tmp_path / "cuda.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    ops = {"gram", "weighted_sum_", "mimic_", "memory_update_", "step fdms", "step mimic"}
    assert {row["op"] for row in rows} == ops
    short = {row["op"] for row in rows if row["mode"] == "bfloat16"}
    assert short == {"weighted_sum_", "mimic_", "memory_update_"}
    assert {row["op"] for row in rows if row["mode"] == "tf32"} == {"gram"}
    for row in rows:
        seconds = float(row["us"]) * 1e-6
        S, d = int(row["S"]), int(row["d"])
        num_bytes = WORK[row["op"]](S, d).num_bytes
        if row["mode"] in ("bfloat16", "float16"):
            num_bytes -= 2 * S * d
        assert float(row["gbytes_per_s"]) == pytest.approx(num_bytes / seconds / 1e9, rel=1e-2)
        assert (row["met"] != "") == (row["floor"] != "")
    table = (tmp_path / "cuda.md").read_text(encoding="utf-8")
    assert table.count("\n| ") == len(rows) + 2  # plus the table head and its rule


@pytest.mark.parametrize(
    "build",
    [
        cuda_cases.gram,
        cuda_cases.tf32_gram,
        cuda_cases.weighted_sum,
        partial(cuda_cases.weighted_sum, dtype=torch.bfloat16),
        cuda_cases.fdms_step,
    ],
)
def test_contenders_compute_the_same(build: object) -> None:
    results = []
    for number in range(9):
        torch.manual_seed(0)
        setup = build(20, 300, "cpu")  # type: ignore[operator]
        if number == len(setup.ways):
            break
        way = setup.ways[number]
        if way.role in ("ours", "careful", "peer"):
            results.append(way.call(0))
    assert len(results) >= 2
    for result in results[1:]:
        assert isinstance(result, Tensor)
        assert torch.allclose(result.double(), results[0].double(), rtol=1e-4, atol=1e-5)
        assert result.abs().max() > 0


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="no GPU"):
        cuda.main([])

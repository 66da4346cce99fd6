# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark as a dry run on the CPU: it completes, and contenders agree."""

from __future__ import annotations

import csv
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import cuda, cuda_cases, cuda_profile, cuda_verdict
from benchmarks.cuda_timing import Ceilings, Timing
from benchmarks.cuda_worker import CaseError, Worker
from benchmarks.work import WORK
from tests.scripts import HANG


def check_every_op(folder: Path) -> None:
    """Check the files of a dry run, which test_benchmark_gpu_session.py makes."""
    with (folder / "cuda.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    ops = {"gram", "weighted_sum_", "mimic_", "memory_update_", "step fdms", "step mimic"}
    ops |= {"columns median", "columns trimmed-mean", "columns meamed"}
    ops |= {"step mifa, int8", "sketch_", "add_adaptive_"}
    assert {row["op"] for row in rows} == ops
    short = {row["op"] for row in rows if row["mode"] == "bfloat16"}
    assert short == {"weighted_sum_", "mimic_", "memory_update_"}
    assert {row["op"] for row in rows if row["mode"] in ("high", "tf32")} == {"gram"}
    for row in rows:
        seconds = float(row["us"]) * 1e-6
        S, d = int(row["S"]), int(row["d"])
        num_bytes = WORK[row["op"]](S, d).num_bytes
        if row["mode"] in ("bfloat16", "float16"):
            num_bytes -= 2 * S * d
        assert float(row["gbytes_per_s"]) == pytest.approx(num_bytes / seconds / 1e9, rel=1e-2)
        assert (row["met"] != "") == (row["floor"] != "")
    table = (folder / "cuda.md").read_text(encoding="utf-8")
    assert table.count("\n| ") == len(rows) + 2  # plus the table head and its rule


@pytest.mark.parametrize(
    "build",
    [
        cuda_cases.gram,
        cuda_cases.tf32_gram,
        cuda_cases.weighted_sum,
        partial(cuda_cases.weighted_sum, dtype=torch.bfloat16),
        cuda_cases.fdms_step,
        partial(cuda_cases.columns, "median"),
        partial(cuda_cases.columns, "trimmed-mean"),
        partial(cuda_cases.columns, "meamed"),
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


def test_sjlt_takes_part_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(cuda_cases.sketch(3, 300, "cpu").ways) == 2  # it has no kernels for a CPU

    class SJLT:
        class SJLTProjection:
            def __init__(self, original_dim: int, proj_dim: int, device: str) -> None:
                self.matrix = torch.ones(original_dim, proj_dim, device=device)

            def __call__(self, rows: Tensor) -> Tensor:
                return rows @ self.matrix

    monkeypatch.setattr(cuda_cases, "_sjlt", lambda: SJLT)
    way = cuda_cases.sketch(3, 300, "cpu").ways[-1]
    assert (way.name, way.role) == ("sjlt", "peer")
    result = way.call(0)
    assert isinstance(result, Tensor) and result.shape == (3, 1024)


def answer(what: str) -> int:
    """Return the number of this process, or fail in one of several ways."""
    if what == "raise":
        raise ValueError("a wrong value")
    if what == "exit":
        os._exit(3)
    if what == "hang":
        time.sleep(60)
    return os.getpid()


@pytest.mark.slow
def test_a_case_cannot_end_the_others() -> None:
    worker = Worker(answer)
    first = worker.call("", seconds=HANG)
    with pytest.raises(CaseError, match="a wrong value"):
        worker.call("raise", seconds=HANG)
    assert worker.call("", seconds=HANG) == first  # an error of Python leaves the process usable
    with pytest.raises(CaseError, match="status 3"):
        worker.call("exit", seconds=HANG)
    second = worker.call("", seconds=HANG)
    with pytest.raises(CaseError, match="ended after 0 s"):
        worker.call("hang", seconds=0.2)
    assert len({os.getpid(), first, second, worker.call("", seconds=HANG)}) == 4
    worker.close()


def test_verdicts_on_targets_and_on_missing_times(tmp_path: Path) -> None:
    case = cuda_cases.Case("gram", 20, 1000, lambda: cuda_cases.Setup(1, []), "read", 0.5, 1.7)
    ceilings = Ceilings(1.0, case.num_bytes / 1e-3, 1.0)  # a reading pass takes 1 ms

    def met(ours: float, careful: float | None = None) -> str:
        timings = [Timing("fastagg", "ours", ours)]
        if careful:
            timings.append(Timing("careful", "careful", careful))
        return cuda.rows_of(case, timings, ceilings)[0].met

    assert met(1.9e-3, 3.3e-3) == "yes"
    assert met(2.1e-3, 9e-3) == "NO"  # less than half of the ceiling
    assert met(1.9e-3, 3.2e-3) == "NO"  # not 1.7 times as fast
    assert met(1.9e-3) == "unknown"
    assert met(2.1e-3) == "NO"
    assert cuda.rows_of(case, [], ceilings)[0].met == "unknown"
    for timings in ([], [Timing("fastagg", "ours", 1.9e-3), Timing("c", "careful", 3.8e-3)]):
        cuda.write(cuda.rows_of(case, timings, ceilings), ceilings, "", tmp_path)
        assert cuda_verdict.main([str(tmp_path)]) == (0 if timings else 1)


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="no GPU"):
        cuda.main([])


def test_the_profile_calls_every_case_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_profile.main(["--dry-run", "--only", "gram (", "--only", "sketch_"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gram (20, 300)" and lines[-1] == "sketch_ (24, 300)"


def test_names_of_kernels_are_short() -> None:
    name = "void fastagg::cuda::(anonymous namespace)::sum_kernel<false, float, 4>(long, float *)"
    assert cuda_profile.short(name) == "sum_kernel<false, float, 4>"
    assert cuda_profile.short("Memcpy DtoD (Device -> Device)") == "Memcpy DtoD "

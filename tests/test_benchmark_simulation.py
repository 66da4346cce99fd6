# SPDX-License-Identifier: Apache-2.0
"""The simulation benchmark: its variants agree, and its table keeps the other rows."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import simulation
from benchmarks.simulation_products import Operand, time_products
from benchmarks.simulation_profile import profile_ways


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("case", [simulation.Case("digits", "digits-mlp", 10)])
def test_ways_of_local_training_do_the_same(case: simulation.Case) -> None:
    ways = simulation.training_ways(case)
    assert [way for way, _ in ways] == ["plain loop", "one by one", "at once"]
    plain, *others = (call() for call in ways.values())
    for updates in others:
        assert len(updates) == case.clients
        for found, right in zip(updates, plain, strict=True):
            # four float32 steps, summed in another order
            torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_simulation_replaces_the_lines_that_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "CASES", [simulation.Case("digits", "digits-mlp", 50)])
    monkeypatch.setattr(simulation, "installed", lambda name: False)
    command.main(["simulation", "--quick", "--out", str(tmp_path)])
    first = read(tmp_path / "simulation.csv")
    assert [row["way"] for row in first[:3]] == ["plain loop", "one by one", "at once"]
    assert {row["what"] for row in first} == {"digits-mlp digits batch 50", "rounds"}
    command.main(["simulation", "--quick", "--only", "batch 50", "--out", str(tmp_path)])
    again = read(tmp_path / "simulation.csv")
    assert [row for row in again if row["what"] == "rounds"] == first[3:]
    assert len(again) == len(first)
    for row in again:
        assert float(row["seconds_q1"]) <= float(row["seconds"]) <= float(row["seconds_q3"])
    text = (tmp_path / "simulation.md").read_text("utf-8")
    assert text.count("\n| ") == len(again) + 2


def test_profile_counts_operations_and_names_the_longest() -> None:
    a, out = torch.randn(100, 100), io.StringIO()

    def two_products() -> None:
        torch.mm(a, a) + torch.mm(a, a)

    ways = {("plain loop", 1): two_products, ("at once", 7): two_products}
    profile_ways("a case", ways, 2, Console(file=out, width=120))
    text = " ".join(out.getvalue().split())
    assert "a case: 2.0 million operations per local step" in text  # 2 x 100 x 100 x 100
    assert "plain loop, 1 clients │ mm │ 1.0 │" in text
    assert "at once, 7 clients │ mm │ 1.0 │" in text
    assert "products" not in text  # no batched ones


def test_profile_times_batched_products_alone() -> None:
    a, b, out = torch.randn(3, 4, 5), torch.randn(3, 6, 5).mT, io.StringIO()
    bias = torch.randn(3, 4, 6)

    def step() -> None:
        torch.bmm(a, b, out=torch.empty(3, 4, 6))
        torch.baddbmm(bias, a, b)
        torch.bmm(a[:1].expand(2, -1, -1), b[:2])

    time_products(step, 1, 1.0, 2.0, Console(file=out, width=120))
    text = " ".join(out.getvalue().split())
    assert "│ 3 of 4 x 5 x 6, second transposed │ 2.0 │" in text
    assert "│ 2 of 4 x 5 x 6, second transposed │ 1.0 │" in text
    assert "of 1000.00 ms per step; with the faster of torch and numpy for each" in text


@pytest.mark.parametrize("x", [torch.randn(3, 4, 5), torch.randn(3, 5, 4).mT])
def test_operand_of_same_sizes_and_strides(x: torch.Tensor) -> None:
    again = Operand(tuple(x.shape), x.stride()).make()
    assert again.shape == x.shape
    assert again.stride() == x.stride()
    assert again.count_nonzero() == again.numel()

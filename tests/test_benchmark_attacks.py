# SPDX-License-Identifier: Apache-2.0
"""The benchmark of attacks: what attackers send, who is active, claims, and parts that are kept."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.attacks import claims, runs, setting, tables
from benchmarks.attacks.setting import Result
from fastagg_sim.seeds import generator
from fastagg_sim.verdicts import judge

ROOT = Path(__file__).resolve().parents[1]


def test_attackers_send_what_the_page_says() -> None:
    rows = torch.randn(2, 5, 7)
    honest = rows[:, [0, 2, 4]]
    change = torch.randn(2, 7)

    def sent(attack: str, t: int = 0) -> torch.Tensor:
        before = rows.clone()
        found = runs.lies(attack, rows, [1, 3], t, 10, change)
        assert torch.equal(rows, before)
        assert torch.equal(found[:, [0, 2, 4]], honest)
        return found[:, [1, 3]]

    own = rows[:, [1, 3]]
    assert torch.equal(sent("none"), own) and torch.equal(sent("late"), own)
    assert torch.equal(sent("hijack"), change[:, None].expand(2, 2, 7))
    assert torch.equal(sent("hijack", 5), -own)
    assert torch.equal(sent("poison once"), -100 * own)
    assert torch.equal(sent("scaled"), -10 * own)
    for attack in ("sign-flipped", "silent"):
        assert torch.equal(sent(attack), -own)
    mean = honest.mean(1, keepdim=True).expand(2, 2, 7)
    assert torch.equal(sent("sybils"), -mean)
    assert torch.equal(sent("inner product"), -2 * mean)
    assert torch.equal(sent("mimic"), honest[:, :1].expand(2, 2, 7))
    spread = honest.var(1, unbiased=False, keepdim=True).sqrt()
    torch.testing.assert_close(sent("ALIE"), mean - 1.5 * spread)


def test_attackers_choose_when_they_are_active() -> None:
    for attack, rounds in (("poison once", [0]), ("silent", [0, 10, 20])):
        for t in range(25):
            clients = runs.active_clients(attack, [3, 7], t, 1, 10)
            assert len(clients) == 10 and clients == sorted(set(clients))
            present = {3, 7}.intersection(clients)
            assert present == ({3, 7} if t in rounds else set())
    assert runs.active_clients("scaled", [3], 4, 1, 10) == runs.active_clients("none", [], 4, 1, 10)


def test_training_is_gradient_descent_on_the_cross_entropy() -> None:
    task = object.__new__(runs.Task)
    task.seed = 0
    x = torch.randn(30, setting.INPUTS)
    y = torch.randint(10, (30,))
    task.samples = [(x, y)] * 2
    starts, drift = 0.1 * torch.randn(3, 2, setting.D), 0.01 * torch.randn(3, 2, setting.D)
    updates = task.train(starts, [1, 0], 4, drift)
    for r in range(3):
        for s, k in enumerate([1, 0]):
            rng = generator(0, "attacks", "batches", 4, k)
            order = torch.randint(30, (setting.STEPS, setting.BATCH), generator=rng)
            model = starts[r, s].reshape(setting.INPUTS, 10).clone().requires_grad_()
            for i in order:
                loss = torch.nn.functional.cross_entropy(x[i] @ model, y[i])
                (slope,) = torch.autograd.grad(loss, model)
                step = slope + drift[r, s].reshape(slope.shape)
                model = (model - setting.RATE * step).detach().requires_grad_()
            torch.testing.assert_close(
                updates[r, s], model.detach().flatten() - starts[r, s], rtol=1e-3, atol=1e-5
            )


def test_poison_of_one_round() -> None:
    errors = {row.rule: row.value for row in runs.poison_results(0, rounds=40)}
    assert errors["mifa"] == pytest.approx(40 / setting.K, rel=1e-4)
    assert errors["mifa, max_age"] == pytest.approx((1 + setting.AGE) / setting.K, rel=1e-4)
    assert errors["mimic"] > 1.5


def test_claims_are_judged_from_pairs_of_runs() -> None:
    rows = []
    for seed, (plain, capped) in enumerate([(0.80, 0.81), (0.70, 0.712), (0.75, 0.761)]):
        for task in setting.TASKS:
            for rule, value in (("fdms", plain), ("fdms, max_share", capped)):
                for name in (rule, rule.replace("fdms", "fdms-soft")):
                    row = Result("accuracy", task, "none", 0.0, name, seed, "accuracy", value)
                    rows.append(row)
    found = {claim.text: claim for claim in claims.claims(claims.Results(rows))}
    cost = found["max_share costs less than 0.01 of accuracy without attackers"]
    assert cost.known and judge(cost.statements) == "holds"
    assert cost.statements[0].estimate.value == pytest.approx(0.011)
    assert not found["ALIE by 20 %: geometric-median loses less than 0.05"].known
    rows.append(Result("accuracy", setting.TASKS[0], "late", 0.2, "fdms", 0, "accuracy", 0.5))
    text = tables.markdown(rows, 5)
    assert "| fdms, max_share | 0.761 |" in text and "| not run | not run |" in text


def test_results_survive_a_file(tmp_path: Path) -> None:
    rows = [Result("hijack", "t", "none", 0.05, "fdms, max_share", 1, "mean weight", math.pi)]
    assert tables.read(tmp_path / "attacks.csv") == []
    tables.write(tmp_path, rows, 3)
    assert tables.read(tmp_path / "attacks.csv") == rows


def test_the_page_shows_the_committed_results() -> None:
    text = (ROOT / "docs/security.md").read_text("utf-8")
    rows = tables.read(ROOT / "benchmarks/results/attacks.csv")
    for table in tables.page(rows).split("\n\n"):
        assert table in text

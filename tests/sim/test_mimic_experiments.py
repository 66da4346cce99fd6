# SPDX-License-Identifier: Apache-2.0
"""The experiments of MimiC: settings, and claims from results files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from fastagg_sim import experiments
from fastagg_sim.config import ConfigError, Task
from fastagg_sim.experiments import (
    _mimic,
    mimic_fig5,
    mimic_fig6,
    mimic_table3,
    mimic_table5,
)
from fastagg_sim.experiments._statistics import UPLOADS_AREA
from tests.sim.fake_results import write_fake_results


def mimic_results(
    tmp_path: Path, ends: dict[str, list[float]], setting: _mimic.Setting | None = None
) -> _mimic.Results:
    """Return curves with 50 uploads a round and accuracy 0.1, end / 2, end, end, one per seed."""
    setting = setting or _mimic.Setting("x", mimic_task(), _mimic.static(OPTIONS, 0.1))
    header = "method,rule,dropout,seed,round,uploads,active,accuracy,loss,"
    lines = [header + "wrong_friend_rate,substitutions,pairs"]
    for method, values in ends.items():
        for seed, end in enumerate(values):
            for t, accuracy in enumerate((0.1, end / 2, end, end)):
                job = f"{method},rule,{setting.dropout.label},{seed}"
                lines.append(f"{job},{t},{50 * (t + 1)},3,{accuracy},1.0,,0,0")
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    return _mimic.Results(setting, tmp_path)


OPTIONS = _mimic.MimicOptions()


def mimic_task() -> Task:
    return _mimic.fmnist(OPTIONS, 200)


def test_settings_of_mimic() -> None:
    config = experiments.available()["mimic-fig7"].configs(OPTIONS)[""]
    task, training = config.task, config.task.training
    assert (task.num_clients, task.rounds, task.max_uploads) == (30, 200, None)
    assert task.server_lr == 1.0
    assert (training.batch_size, training.local_epochs) == (16, 5)
    assert (training.rate(0), training.rate(1)) == (0.01, 0.0095)
    assert [m.label for m in config.methods] == list(_mimic.LABELS)
    assert all(m.full_first_round for m in config.methods)
    assert [m.gradient_units for m in config.methods] == [False] * 3 + [True] * 2
    prox = config.methods[1].training
    assert prox is not None and prox.prox == OPTIONS.mu
    assert config.dropouts[0].options == {"p": 0.1}
    vgg = mimic_fig5.setting(mimic_fig5.Fig5Options()).task
    assert (vgg.model, vgg.rounds, vgg.training.batch_size) == ("vgg11", 400, 32)


@pytest.mark.parametrize(
    ("count", "quick", "rounds", "uploads"),
    [
        ("rounds", False, 200, None),
        ("clients", False, 12000, 6000),  # 200 of each of 30 clients
        ("total", False, 400, 200),
        ("rounds", True, 400, 200),
    ],
)
def test_readings_of_200_uploads(
    count: Literal["rounds", "clients", "total"], quick: bool, rounds: int, uploads: int | None
) -> None:
    task = _mimic.fmnist(_mimic.MimicOptions(count=count, quick=quick), 200)
    assert (task.rounds, task.max_uploads) == (rounds, uploads)
    task = _mimic.fmnist(_mimic.MimicOptions(count=count, quick=quick, rounds=7), 200)
    assert (task.rounds, task.max_uploads) == (7, uploads)


def test_settings_of_mimic_as_released() -> None:
    options = _mimic.MimicOptions(as_released=True)
    assert _mimic.round_robin(options, 20).options["sampling"] == "half-normal"
    assert _mimic.static(options, 0.1).options["levels"] == 5
    assert not any(m.gradient_units for m in _mimic.methods(options, mimic_task().training))


def test_mimic_tables_share_runs_of_one_task() -> None:
    table3 = experiments.available()["mimic-table3"].configs(mimic_table3.Table3Options())
    assert len(table3) == 1
    (config,) = table3.values()
    assert [d.options["tau_max"] for d in config.dropouts] == [20, 50, 100]
    assert len(config.jobs()) == 3 * (3 * 5 + 1)  # seeds, settings, methods, and one without
    table5 = experiments.available()["mimic-table5"].configs(mimic_table5.Table5Options())
    assert [c.task.partition_options["classes_per_client"] for c in table5.values()] == [
        2,
        5,
        8,
        10,
    ]


def test_mimic_orderings_are_open_within_the_interval(tmp_path: Path) -> None:
    ends = {
        "FedAvg": [0.5, 0.6, 0.55],
        "SCAFFOLD": [0.9, 1.0, 0.95],
        "MIFA": [0.7, 0.6, 0.65],
        "MimiC": [0.6, 0.7, 0.66],
    }
    results = mimic_results(tmp_path, ends)
    found = _mimic.best("x", results)
    assert [c.verdict for c in found] == ["holds", "fails", "undecided"]
    assert {c.basis for c in found} == {"3 seeds"}
    # differences 10, 10, 11: mean 10.33, error 1/3, t 4.303
    assert found[0].numbers == {
        "MimiC": 65.33,
        "FedAvg": 55.0,
        "difference": "10.33 [8.899, 11.77]",
    }
    assert results.finals("MimiC") == pytest.approx([60.0, 70.0, 66.0])


def test_mimic_curves_are_judged_over_uploads(tmp_path: Path) -> None:
    ends = {label: [0.5, 0.52] for label in _mimic.LABELS}
    ends |= {"MimiC": [0.6, 0.62], "MIFA": [0.4, 0.42]}
    results = mimic_results(tmp_path, ends)
    # 50 uploads each with 0.1, 0.3 and 0.6; the second seed 0.1, 0.31 and 0.62
    area = results.levels(["MimiC"], UPLOADS_AREA)["MimiC"]
    assert area == pytest.approx(100 * (0.1 + 0.305 + 0.61) / 3, abs=0.01)
    found = {c.text: c for c in _mimic.curve_claims("x", results)}
    fastest = next(c for text, c in found.items() if "fastest" in text)
    assert fastest.verdict == "holds"
    # MIFA changes less: 20 instead of 25 points in the second half; MimiC changes more
    calm = [c.verdict for text, c in found.items() if "fluctuates" in text]
    assert calm == ["holds", "fails"]


def test_mimic_table_shows_published_beside_measured(tmp_path: Path) -> None:
    setting = mimic_table3.settings(mimic_table3.Table3Options())[0]
    ends = {label: [0.5, 0.7] for label in (*_mimic.LABELS, _mimic.REFERENCE)}
    results = mimic_results(tmp_path, ends, setting)
    grid = _mimic.table("t", [results])
    assert grid.columns == ("method", "tau_max = 20", "tail", "paper")
    assert grid.rows[-2] == ("MimiC", "60.00 ± 14.14", "60.00", "75.89")
    assert grid.rows[-1][0] == _mimic.REFERENCE and grid.rows[-1][-1] == "76.82"
    claims = mimic_table3.claims([results, results], mimic_table3.Table3Options())
    assert claims[-1].verdict == "undecided"  # two seeds 20 points apart
    assert claims[-1].numbers["measured"].startswith("60 [")


@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("mimic-fig6", {"p": (0.3,)}),
        ("mimic-table3", {"tau_max": (50,)}),
        ("mimic-table4-fmnist", {"percent": (30,)}),
        ("mimic-table5", {"classes": (5,)}),
    ],
)
@pytest.mark.parametrize("quick", [False, True])
def test_one_setting_shows_no_trend(
    name: str, one: dict[str, Any], quick: bool, tmp_path: Path
) -> None:
    experiment = experiments.available()[name]
    options = experiment.options(quick=quick, **one)
    folders = {}
    for part, config in experiment.configs(options).items():
        folders[part] = tmp_path / part
        write_fake_results(folders[part], config)
        assert len(config.dropouts) == 1
    claims = [claim.text for claim in experiment.claims(folders, options)]
    assert claims and not [t for t in claims if " from " in t or "rises" in t or "differ less" in t]


def test_mimic_fig6_compares_after_equally_many_rounds() -> None:
    (config,) = mimic_fig6.configs(mimic_fig6.Fig6Options()).values()
    assert config.task.max_uploads is None and config.task.rounds == 60
    assert [m.label for m in config.methods] == ["FedAvg", "MIFA", "MimiC"]
    assert mimic_fig6.Fig6Options(quick=True).chosen_p() == (0.1, 0.5)


@pytest.mark.parametrize("name", ["mimic-fig4", "mimic-fig5", "mimic-fig6"])
@pytest.mark.parametrize("rounds", [0, 1, None])
def test_rounds_of_mimic_are_those_given(name: str, rounds: int | None) -> None:
    experiment = experiments.available()[name]
    options = experiment.options(rounds=rounds)
    if rounds == 0:
        with pytest.raises(ConfigError, match="rounds: expected at least 1, got 0"):
            experiment.configs(options)
        return
    (config,) = experiment.configs(options).values()
    assert config.task.rounds == (rounds or {"4": 200, "5": 400, "6": 60}[name[-1]])

# SPDX-License-Identifier: Apache-2.0
"""The experiments of Su et al.: settings, theorem 4, and claims from results files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

import fastagg
from fastagg_sim.config import ConfigError
from fastagg_sim.experiments import (
    _adversarial,
    _adversarial_plots,
    _adversarial_results,
    _curves,
    _theorem4,
    adversarial_clipping,
    adversarial_fig1,
    adversarial_fig5,
    adversarial_fig8,
    adversarial_fig9,
    theorem4,
)
from fastagg_sim.experiments._adversarial_plots import write_epsilon
from fastagg_sim.experiments._base import Claim
from fastagg_sim.experiments._statistics import LOSS_CHANGE, LOSS_END, LOSS_RISE
from fastagg_sim.job_folder import JOB_COLUMNS, METRIC_COLUMNS
from fastagg_sim.records import Curve
from fastagg_sim.results import ResultsFolder

FIG9 = adversarial_fig9.EXPERIMENT


def verdicts(claims: list[Claim]) -> dict[str, str]:
    return {claim.text: claim.verdict for claim in claims}


# --- settings -------------------------------------------------------------------------------


def test_cifar_settings_are_table_1() -> None:
    configs = adversarial_fig1.configs(adversarial_fig1.Fig1Options())
    assert list(configs) == ["baselines", "byzantine"]
    task = configs["baselines"].task
    assert (task.num_clients, task.rounds, task.eval_every) == (100, 2000, 15)
    assert task.partition_options == {"alpha": 0.1, "samples_per_client": 500}
    (dropout,) = configs["baselines"].dropouts
    assert dropout.options == {"epsilon": 0.8, "candidates": "all"}
    jobs = {job.method.label: job for config in configs.values() for job in config.jobs()}
    assert list(jobs) == [*_adversarial.BASELINES, *_adversarial.BYZANTINE]
    for label, job in jobs.items():
        training = job.training
        assert training.batch_size == 100 and job.method.sample_weights
        prox = "FedProx" in label
        steps = 10 if prox else 25 if label in _adversarial.BASELINES else 1
        assert training.local_steps == steps
        assert (training.prox > 0) == prox
        assert training.lr_power == (0.5 if steps == 25 else 0.0)
        assert training.momentum == (0.0 if steps == 25 else 0.9)
        # momentum that is reused by a robust rule, in its own units
        kept = label in _adversarial.BYZANTINE
        assert training.keep_momentum == kept
        assert job.method.options.get("reuse", False) == kept
        assert job.method.gradient_units == (kept or label == "MIFA")
    assert jobs["FedAvg variant"].method.options == {"beta": 10.0}
    assert jobs["cclip"].method.options["tau"] == pytest.approx(100.0)


def test_each_method_has_its_own_learning_rate() -> None:
    chosen = {"fedavg_lr": 0.1, "mifa_lr": 0.2, "fedprox_lr": 0.3, "gm_lr": 0.4, "cclip_lr": 0.5}
    for figure in (adversarial_fig1, adversarial_fig9):
        options = figure.EXPERIMENT.options(candidates="all", **chosen)
        configs = figure.EXPERIMENT.configs(options).values()
        rates = {job.method.label: job.training.lr for config in configs for job in config.jobs()}
        assert rates == {
            **{"FedAvg": 0.1, "FedAvg variant": 0.1, "MIFA": 0.2},
            **{"FedProx": 0.3, "FedProx variant": 0.3},
            **{"GM": 0.4, "bucketing GM": 0.4, "cclip": 0.5, "bucketing cclip": 0.5},
        }


@pytest.mark.parametrize("figure", [adversarial_fig1, adversarial_fig5])
def test_quick_evaluates_often_enough_to_judge_changes(figure: ModuleType) -> None:
    options = figure.EXPERIMENT.options(quick=True)
    task = figure.configs(options)["baselines"].task
    assert task.rounds // task.eval_every >= 12 and task.eval_every <= options.eval_every


def test_as_released() -> None:
    options = adversarial_fig5.Fig5Options(as_released=True)
    config = adversarial_fig5.configs(options)["baselines"]
    assert config.dropouts[0].options == {"epsilon": 0.3, "strict": True, "candidates": "all"}
    variant = next(m for m in config.methods if m.label == "FedAvg variant")
    assert variant.options == {"beta": 10.0, "sequential": True}


def test_shadow_candidates_go_to_their_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastagg_sim.dropout.shadow import Candidates
    from fastagg_sim.shadow_runs import Shadow

    asked: list[Shadow] = []

    def candidates(self: Shadow, seeds: tuple[int, ...], **_: object) -> dict[int, Candidates]:
        asked.append(self)
        return {seed: Candidates((seed + 3, seed), (7,)) for seed in seeds}

    monkeypatch.setattr(Shadow, "candidates", candidates)
    options = adversarial_fig9.Fig9Options()
    (dropout,) = FIG9.configs(options)["baselines"].dropouts
    assert dropout.seed_options == {"0": {"candidates": [0, 3, 7]}, "1": {"candidates": [1, 4, 7]}}
    (shadow,) = asked
    assert shadow.task.data_options == {"redraw": 1}
    assert (shadow.first_round, shadow.last_round, shadow.seed_shift) == (5, 150, 0)
    assert (shadow.num_fedavg, shadow.num_clipping) == (25, 10)
    released = adversarial_fig1.Fig1Options(candidates="shadow", as_released=True)
    adversarial_fig1.configs(released)
    assert "redraw" not in asked[1].task.partition_options and asked[1].seed_shift != 0


# --- theorem 4 ------------------------------------------------------------------------------


@given(
    epsilon=st.sampled_from([0.05, 0.2, 0.5, 0.9]),
    seed=st.integers(0, 3),
    along=st.floats(-3, 3),
    across=st.floats(0, 3),
)
def test_no_model_is_below_the_bound(
    epsilon: float, seed: int, along: float, across: float
) -> None:
    """The bound holds for every model, on the line through the minimisers or off it."""
    u = _theorem4.hard_direction(epsilon, seed)
    off = torch.roll(u, 1) - (torch.roll(u, 1) @ u) / (u @ u) * u
    x = along * u + across * off
    worst = max(_theorem4.errors(x, u, epsilon))
    assert worst >= _theorem4.bound(epsilon) * (1 - 1e-9)  # float64


@pytest.mark.parametrize("epsilon", [0.1, 0.4])
def test_the_midpoint_attains_the_bound_and_zero_has_four_times_it(epsilon: float) -> None:
    u = _theorem4.hard_direction(epsilon, 0)
    # G^2 of Assumption 1 with B = 1: the variance of the clients' gradients
    assert epsilon * (1 - epsilon) * float(u @ u) == pytest.approx(1.0)
    bound = _theorem4.bound(epsilon)
    middle = _theorem4.errors(_theorem4.midpoint(u, epsilon), u, epsilon)
    assert middle == pytest.approx((bound, bound), rel=1e-9)
    assert max(_theorem4.errors(torch.zeros(len(u)), u, epsilon)) == pytest.approx(4 * bound)


def test_every_rule_is_measured() -> None:
    # Without late rows, fedbuff has the bits of fedavg (tests/rules/test_fedbuff.py); the model of
    # mifa-client is that of mifa (tests/rules/test_mifa_client.py).
    measured = {name for name, _ in _theorem4.RULES.values()}
    assert measured | {"fedbuff", "mifa-client"} == set(fastagg.available())


@pytest.mark.parametrize("rule", ["fedavg", "mifa", "scaffold", "geometric-median, reuse"])
@pytest.mark.parametrize("part", ["heterogeneity", "noise"])
@pytest.mark.slow
def test_both_instances_look_the_same(part: str, rule: str) -> None:
    first, second = (_theorem4.run(part, i, rule, 0.2, 0, 60) for i in (1, 2))
    assert torch.equal(first, second)
    assert first.norm() < 1e-2  # it converges to what it sees, from |x| of about 7


def test_uniform_silencing_can_be_told_apart_and_averaged_out() -> None:
    epsilon, u = 0.2, _theorem4.hard_direction(0.2, 0)
    x = _theorem4.run("noise, uniform", 2, "fedavg", epsilon, 0, 400)
    # 400 rounds of 16 clients: a variance of about 1 / 6400 per unit of sigma^2
    assert _theorem4.errors(x, u, epsilon)[1] < 0.5 * _theorem4.bound(epsilon)


@pytest.mark.slow
def test_theorem4_claims_pass_and_fail(tmp_path: Path) -> None:
    options = theorem4.Theorem4Options(epsilons=(0.2,), rounds=60)
    folders = {"": tmp_path}
    (path,) = theorem4.prepare(folders, options)
    rows = _theorem4.read_rows(path)
    assert len(rows) == 2 * (len(_theorem4.RULES) + 1) + 1
    assert set(verdicts(list(theorem4.claims(folders, options))).values()) == {"holds"}
    theorem4.draw(folders, options, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0
    text = path.read_text()
    start = text.index('"heterogeneity",0.2,"krum"')
    line = text[start : text.index("\n", start)]
    path.write_text(text.replace(line, '"heterogeneity",0.2,"krum",0,0.04,0.01,0.0625,0.64,1'))
    found = verdicts(list(theorem4.claims(folders, options)))
    assert [text for text, verdict in found.items() if verdict == "fails"] == [
        "heterogeneity: no rule is below the minimax bound",
        "heterogeneity: every rule is at 4 times the bound (within 1 %)",
    ]


def test_theorem4_needs_whole_clients(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"epsilons: .* got 0\.33"):
        theorem4.prepare({"": tmp_path}, theorem4.Theorem4Options(epsilons=(0.33,)))


# --- sizes, budgets, claims -----------------------------------------------------------------


def test_fig8_sizes(tmp_path: Path) -> None:
    options = adversarial_fig8.Fig8Options(seeds=(0, 1))
    folders = {"": tmp_path}
    adversarial_fig8.prepare(folders, options)
    sizes = adversarial_fig8.read_sizes(tmp_path / adversarial_fig8.CSV)
    assert set(sizes) == {0, 1} and all(len(s) == 100 and min(s) >= 45 for s in sizes.values())
    assert len(adversarial_fig8.claims(folders, options)) == 4


def curve(method: str, accuracy: list[float], loss: list[float]) -> Curve:
    rounds = list(range(len(accuracy)))
    return Curve(method, "rule", "x", 0, rounds, rounds, accuracy, [], loss)


def lines(**levels: float) -> _curves.Curves:
    """Return lines of methods (_ for spaces) at constant accuracies; those below .5 swing by .1."""
    curves = []
    for name, level in levels.items():
        swing = 0.1 if level < 0.5 else 0.0
        values = [level + swing * (t % 2) for t in range(120)]
        curves.append(curve(name.replace("_", " "), values, [1 - v for v in values]))
    return _curves.Curves(curves)


def test_claims_compare_levels_and_noise() -> None:
    found = lines(FedAvg=0.3, MIFA=0.35, FedAvg_variant=0.6, FedProx_variant=0.62)
    above, alike = _adversarial_results.above, _adversarial_results.alike
    smoother = _adversarial_results.smoother
    for claim, verdict in (
        (above(found, "x", _adversarial.VARIANTS, ["FedAvg", "MIFA"]), "holds"),
        (above(found, "x", ["FedAvg variant"], ["FedProx variant"]), "fails"),
        (alike(found, "x", _adversarial.VARIANTS), "holds"),
        (alike(found, "x", ["FedAvg", "FedAvg variant"]), "fails"),
        (smoother(found, "FedAvg variant", "FedAvg"), "holds"),
        (smoother(found, "MIFA", "FedAvg variant", LOSS_CHANGE), "fails"),
    ):
        assert (claim.verdict, claim.basis) == (verdict, "one seed"), claim
    assert found.levels(["MIFA"], LOSS_END)["MIFA"] == pytest.approx(0.6)


def test_a_slow_swing_is_unsteady_though_smooth() -> None:
    down_and_up = [abs(100 - t) / 100 for t in range(200)]
    falling = [1 - t / 200 + 0.03 * (t % 2) for t in range(200)]
    found = _curves.Curves(
        [curve("MIFA", falling, down_and_up), curve("FedAvg variant", falling, falling)]
    )
    rise = found.levels(["MIFA", "FedAvg variant"], LOSS_RISE)
    assert rise["MIFA"] == pytest.approx(0.19)  # blocks of 20 rounds, in which it only rises
    assert rise["FedAvg variant"] == pytest.approx(0.025)  # one step up, less the trend
    steadier = _adversarial_results.steadier(found, "FedAvg variant", "MIFA")
    assert steadier.verdict == "holds"
    smoother = _adversarial_results.smoother(found, "FedAvg variant", "MIFA", LOSS_CHANGE)
    assert smoother.verdict == "fails"


def test_clipping_changes_only_the_threshold() -> None:
    options = adversarial_clipping.ClippingOptions()
    (config,) = adversarial_clipping.configs(options).values()
    found = {method.label: method for method in config.methods}
    assert list(found) == ["cclip 100", "bucketing cclip 100", "cclip 1", "bucketing cclip 1"]
    figure = adversarial_fig1.configs(adversarial_fig1.Fig1Options())["byzantine"]
    for method in figure.methods:
        if method.label in (_adversarial.CCLIP, _adversarial.BUCKETING_CCLIP):
            assert replace(found[f"{method.label} 100"], label=method.label) == method
    assert found["cclip 1"].options["tau"] == 1
    assert found["bucketing cclip 1"].options["rule_options"]["tau"] == 1
    assert replace(config.task, norm_rounds=()) == figure.task


def test_claims_of_clipping(tmp_path: Path) -> None:
    """At 100 both methods are equal; at 1 three of four momenta are longer."""
    options = adversarial_clipping.ClippingOptions()
    rows = [",".join([*JOB_COLUMNS, *METRIC_COLUMNS, "train_loss"])]
    norms = ["method,seed,round,client,norm"]
    for tau, shift in ((100, 0.0), (1, 0.1)):
        for method, buckets in (("cclip", 0.0), ("bucketing cclip", shift)):
            label = f"{method} {tau}"
            rows += [
                f"{label},r,x,0,{t},{t},2,{0.3 + shift + 0.01 * buckets},1,,0,0,{2 - buckets}"
                for t in range(60)
            ]
            norms += [f"{label},0,{t},3,{length}" for t, length in enumerate((0.5, 2, 3, 99))]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "norms.csv").write_text("\n".join(norms) + "\n")
    found = adversarial_clipping.claims({"": tmp_path}, options)
    assert [claim.verdict for claim in found[:2]] == ["holds", "holds"]
    assert found[0].numbers["equal with and without buckets"] == "60 of 60 evaluations"
    assert found[1].numbers["equal with and without buckets"] == "0 of 60 evaluations"
    assert found[1].numbers["longer"] == "75.0 %"
    assert found[2].text.startswith("cclip 1 above cclip 100") and found[2].verdict == "holds"
    (tmp_path / "norms.csv").write_text("\n".join([*norms, "cclip 100,0,9,3,101"]) + "\n")
    assert adversarial_clipping.claims({"": tmp_path}, options)[0].verdict == "fails"


def test_epsilon_rows_and_their_claims(tmp_path: Path) -> None:
    """The rows come from the dropout process alone; nothing has been trained."""
    for candidates, constant in (("all", "holds"), ("shadow", "fails")):
        options = adversarial_fig9.Fig9Options(
            rounds=20, epsilon=0.8, seeds=(0, 1), candidates="all"
        )
        config = FIG9.configs(options)["baselines"]
        folder = tmp_path / candidates
        dropout = config.dropouts[0]
        equal = {**dropout.options, "sizes": "equal"}
        if candidates == "shadow":
            equal["candidates"] = list(range(35))
        changed = type(dropout)(dropout.process, equal)
        results = ResultsFolder(folder, type(config)(**vars(config) | {"dropouts": (changed,)}))
        results.prepare()
        write_epsilon(folder)
        epsilon = _adversarial_results.read_epsilon(folder)
        assert {seed: len(values) for seed, values in epsilon.items()} == {0: 20, 1: 20}
        if candidates == "all":
            assert all(values == [(0.8, 2)] * 20 for values in epsilon.values())
        assert _adversarial_results.constant_epsilon_claim(folder, 0.8).verdict == constant
        (budget,) = _adversarial_results.budget_claims(folder, 0.8, strict=False)
        assert (budget.verdict, budget.basis) == ("holds", "counted")
        (tight,) = _adversarial_results.budget_claims(folder, 0.1, strict=False)
        assert tight.verdict == "fails"


@pytest.mark.slow
def test_figures_of_two_seeds(tmp_path: Path) -> None:
    options = adversarial_fig9.Fig9Options(seeds=(0, 1))
    methods = {"baselines": _adversarial.BASELINES, "byzantine": _adversarial.BYZANTINE}
    folders = {part: tmp_path / part for part in methods}
    for part, names in methods.items():
        rows = [",".join([*JOB_COLUMNS, *METRIC_COLUMNS, "train_loss"])]
        for seed in options.seeds:
            for t in range(6):
                rows += [f"{m},r,x,{seed},{t},{t},2,0.{t + seed + 1},1,,0,0,1.5" for m in names]
        folders[part].mkdir()
        (folders[part] / "metrics.csv").write_text("\n".join(rows) + "\n")
    epsilon = [f"{seed},{t},0.8,2" for seed in options.seeds for t in range(6)]
    text = "\n".join(["seed,round,epsilon,active", *epsilon]) + "\n"
    (folders["baselines"] / _adversarial_results.EPSILON_FILE).write_text(text)
    assert FIG9.draw is not None
    FIG9.draw(folders, options, tmp_path / "figure.png")
    heights = []
    for name in ("figure.png", "figure-byzantine.png"):
        with Image.open(tmp_path / name) as image:
            heights.append(image.height)
    assert heights[0] > heights[1] > 400  # three rows of panels and two
    assert len(FIG9.claims(folders, options)) > 10


def test_published_ranges_are_beside_the_ends_of_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    panels: list[Axes] = []
    monkeypatch.setattr(_adversarial_plots, "save", lambda figure, _: panels.extend(figure.axes))
    names = (*_adversarial.BASELINES, *_adversarial.BYZANTINE)
    curves = [Curve(m, "r", "x", 0, [0, 9], [2, 20], [0.1, 0.2], train_loss=[2, 1]) for m in names]
    published = {
        "FedAvg": _adversarial_results.PublishedEnd(10, (1.4, 2.5), (0.30, 0.54)),
        "FedProx": _adversarial_results.PublishedEnd(11, (1.0, 1.1), (0.60, 0.61)),  # is longer
    }
    silenced = {0: [(0.8, 2)] * 10}
    lines = _curves.Curves(curves)
    _adversarial_plots._figure(lines, silenced, [names], Path("x.png"), published)
    loss, accuracy = (
        [tuple(map(float, line.get_ydata())) for line in panel.lines if min(line.get_xdata()) > 10]
        for panel in panels[:2]
    )
    assert loss == [(1.4, 2.5)] * 2  # a line, and its ends
    assert accuracy == [(0.30, 0.54)] * 2
    texts = [text.get_text() for text in panels[1].get_legend().get_texts()]
    assert texts[-1].startswith("published ranges at the end")
    plt.close(panels[0].get_figure())


def test_lines_of_fewer_seeds_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    panels: list[Axes] = []
    monkeypatch.setattr(_adversarial_plots, "save", lambda figure, _: panels.extend(figure.axes))
    of = {"FedAvg": 2, "FedProx": 1}
    curves = [
        Curve(m, "r", "x", seed, [0, 9], [2, 20], [0.1, 0.2], train_loss=[2, 1])
        for m, count in of.items()
        for seed in range(count)
    ]
    lines = _curves.Curves(curves)
    _adversarial_plots._figure(lines, {0: [(0.8, 2)] * 10}, [tuple(of)], Path("x.png"), {})
    legend = panels[1].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["FedAvg", "FedProx (n = 1)"]
    assert legend.get_title().get_text().startswith("n = 2 seeds")
    plt.close(panels[0].get_figure())


@pytest.mark.parametrize(("candidates", "drawn"), [("all", 4), ("shadow", 0)])
def test_published_ranges_are_those_of_a_uniform_choice(
    candidates: Literal["all", "shadow"], drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    monkeypatch.setattr(_adversarial_plots, "draw", lambda *given: shown.append(len(given[-1])))
    options = adversarial_fig1.Fig1Options(candidates=candidates)
    adversarial_fig1.EXPERIMENT.draw({}, options, Path("figure.png"))
    assert shown == [drawn]

# SPDX-License-Identifier: Apache-2.0
"""The experiments' settings and the claims they check."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastagg.rules.thresholds import from_option as make
from fastagg_sim import experiments
from fastagg_sim.config import NO_DROPOUT, ConfigError
from fastagg_sim.experiments import (
    _fdms,
    _panel,
    _published,
    _substitutes,
    _write,
    fdms_fig1_cifar,
    fdms_fig1_mnist,
    fdms_fig3,
    fdms_fig4,
    fdms_fig5,
    fdms_fig7,
    fdms_fig9,
    friends_fig1,
    friends_fig2,
    late_fig1,
    scale_friends,
)
from fastagg_sim.experiments._base import Claim, read_claims_json
from fastagg_sim.experiments._statistics import (
    AREA,
    CHANGE,
    END,
    UPLOADS_AREA,
    UPLOADS_CHANGE,
    UPLOADS_END,
    UPLOADS_FINAL,
    Statistic,
    Trace,
    contrast,
    largest_rise,
    over_time,
    rises,
)
from fastagg_sim.records import Curve
from tests.sim.fake_results import write_fake_results


def curve(method: str, dropout: str, accuracy: list[float], seed: int = 0) -> Curve:
    rounds = list(range(len(accuracy)))
    return Curve(method, "rule", dropout, seed, rounds, rounds, accuracy)


def panel(**accuracy: list[float]) -> _panel.Panel:
    return _panel.Panel(
        [curve(name, "x-0.5", values) for name, values in accuracy.items()], "x-0.5"
    )


@pytest.mark.usefixtures("no_shadow_runs")
def test_registry_lists_every_experiment_with_its_own_options() -> None:
    known = experiments.available()
    fdms = {f"fdms-fig{n}" for n in ("1-mnist", "1-cifar", *range(2, 10))}
    mimic = {f"mimic-fig{n}" for n in range(4, 9)} | {"mimic-table3", "mimic-table5"}
    mimic |= {"mimic-table4-fmnist", "mimic-table4-cifar"}
    adversarial = {f"adversarial-fig{n}" for n in (1, 5, 8, 9, 11)}
    adversarial |= {"adversarial-clipping", "theorem4"}
    ours = {"demo", "friends-from-means", "friends-sketched", "memory-dtypes", "scale-friends"}
    ours.add("late-fig1")
    assert ours | {"friends-fig1", "friends-fig2"} | fdms | mimic | adversarial == set(known)
    assert len({e.options for e in known.values()}) == len(known)
    for experiment in known.values():
        work = {}
        for quick in (False, True):
            configs = experiment.configs(experiment.options(quick=quick)).values()
            work[quick] = sum(c.task.rounds * len(c.jobs()) for c in configs)
        assert work[True] <= work[False]
        assert work[True] > 0 or experiment.prepare is not None  # nothing to train: theorem4
        assert experiment.expected is not None, experiment.name
        assert experiment.expected.quick <= 5
        assert experiment.name in ours or (experiment.paper and experiment.figure)


def test_wrong_friends_are_counted_over_a_run() -> None:
    def with_friends(method: str, seed: int, *friends: tuple[float, int]) -> Curve:
        made = curve(method, "x-0.5", [0.5] * 30, seed)
        made.wrong_friends.extend(friends)
        return made

    assert _substitutes.wrong(with_friends("A", 0, (0.5, 2), (0.1, 10))) == pytest.approx(2 / 12)
    assert math.isnan(_substitutes.wrong(with_friends("A", 0)))
    curves = [with_friends("A", seed, (0.1, 5), (0.0, 5 + seed)) for seed in range(3)]
    curves += [with_friends("B", seed, (0.5, 5), (0.2 + 0.1 * seed, 5)) for seed in range(3)]
    many = _panel.Panel(curves, "x-0.5")
    assert _substitutes.fewer_wrong("x", many, "A", "B").verdict == "holds"
    assert _substitutes.fewer_wrong("x", many, "B", "A").verdict == "fails"
    assert _substitutes.fewer_wrong("x", many, "B", "A", 0.9).verdict == "holds"
    one = _panel.Panel([c for c in curves if c.seed == 0], "x-0.5")
    claim = _substitutes.fewer_wrong("x", one, "A", "B")
    assert (claim.verdict, claim.basis) == ("undecided", "one seed")
    assert claim.numbers["A"] == 0.05 and claim.numbers["B"] == 0.35


@pytest.mark.parametrize(
    "name",
    [
        *("fdms-fig2", "fdms-fig6", "friends-sketched", "friends-fig2", "memory-dtypes"),
        *("mimic-fig7", "mimic-table5"),
    ],
)
def test_reading_options_change_the_settings(name: str) -> None:
    """--as-written and --as-released must not be ignored by an experiment that has them."""
    experiment = experiments.available()[name]
    option = {"as_released": True} if name.startswith("mimic") else {"as_written": True}
    assert experiment.configs(experiment.options(**option)) != experiment.configs(
        experiment.options()
    )


def test_claims_of_scale_friends(tmp_path: Path) -> None:
    """The numbers behind the claims, from files with known ones."""
    options = scale_friends.ScaleOptions(quick=True)
    config = scale_friends.configs(options)[""]
    assert (config.task.num_clients, config.dropouts[0].options["sample"]) == (10_000, 100)
    write_fake_results(tmp_path, config)
    assert scale_friends.peaks(tmp_path) == {"FedAvg": 311.0, "Means": 321.0, "MIFA": 331.0}
    assert scale_friends.seconds(tmp_path, "training")["MIFA"] == pytest.approx(0.4)
    found = {claim.text: claim for claim in scale_friends.claims({"": tmp_path}, options)}
    by_part = {part: [c for text, c in found.items() if part in text] for part in ("wrong", "MB")}
    assert [c.verdict for c in by_part["wrong"]] == ["undecided"]  # there are no substitutes
    assert [c.verdict for c in by_part["MB"]] == ["holds"]
    curve = Curve("Means", "fdms-means", "x", 0, wrong_friends=[(0.5, 10), (0.0, 30), (0.25, 40)])
    # 5 + 0 + 10 of 80
    assert contrast([(1, [curve])], scale_friends.WRONG).value == pytest.approx(15 / 80)


def test_accuracy_over_simulated_time() -> None:
    """At each of 100 times, that of the newest model; before the first one, guessing."""
    made = curve("A", "x", [0.5, 0.7, 0.9])
    made.time.extend([10.0, 35.0, 120.0])
    trace = over_time(made, 50.0)
    assert (len(trace.x), trace.x[0], trace.x[-1]) == (100, 0.5, 50.0)
    # The times are 0.5, 1, ..., 50: 19 of them before 10, 50 from 10 to 34.5, 31 from 35 on.
    assert trace.y.tolist() == [0.1] * 19 + [0.5] * 50 + [0.7] * 31


def test_claims_of_late_fig1_are_about_equal_time() -> None:
    """A method with many steps and one with few are compared at the same times."""
    options = late_fig1.LateOptions(seconds=100.0)
    end, whole = late_fig1.statistics(options)
    few, many = (curve(name, "full", values) for name, values in (("a", [0.9]), ("b", [0.5] * 50)))
    few.time.append(79.5)
    many.time.extend(2.0 * (t + 1) for t in range(50))
    assert contrast([(1, [few]), (-1, [many])], end).value == pytest.approx(0.4)
    # a: 0.1 before 79.5, 0.9 from 80 on, 21 of 100 times; b: 0.1 once, then 0.5.
    means = (79 * 0.1 + 21 * 0.9) / 100, (0.1 + 99 * 0.5) / 100
    assert contrast([(1, [few])], whole).value == pytest.approx(means[0])
    difference = contrast([(1, [few]), (-1, [many])], whole)
    assert difference.value == pytest.approx(means[0] - means[1])
    (config,) = late_fig1.configs(options).values()
    assert (config.task.max_seconds, config.task.rounds) == (100.0, 100)
    assert late_fig1.LateOptions(quick=True).chosen_seconds() == 200.0


def test_settings_of_mnist() -> None:
    config = fdms_fig1_mnist.EXPERIMENT.configs(fdms_fig1_mnist.MnistOptions())[""]
    task = config.task
    assert (task.num_clients, task.rounds, task.server_lr) == (20, 100, 1.0)
    assert (task.training.batch_size, task.training.local_epochs, task.training.lr) == (5, 2, 0.1)
    assert task.data_options == {"normalize": "unit"}
    assert [m.label for m in config.methods] == ["Full", "Dropout", "Stale", "FDMS"]
    assert [m.full_first_round for m in config.methods] == [False, False, True, True]
    assert config.methods[2].rule == "stale-models"
    assert {d.process for d in config.dropouts} == {"cluster-floor"}


def test_settings_as_written() -> None:
    options = fdms_fig1_cifar.CifarOptions(as_written=True)
    config = fdms_fig1_cifar.EXPERIMENT.configs(options)[""]
    task = config.task
    assert (task.training.batch_size, task.training.local_steps) == (20, 2)
    assert task.training.local_epochs is None
    assert (task.server_lr, task.train_fraction, task.rounds) == (0.1, 1.0, 500)
    assert config.methods[2].rule == "stale"
    assert not any(m.full_first_round for m in config.methods)
    assert {d.process for d in config.dropouts} == {"exact"}


def test_fig3_runs_fdms_alone_on_two_data_sets() -> None:
    configs = fdms_fig3.configs(fdms_fig3.Fig3Options())
    assert {c.task.dataset for c in configs.values()} == {"mnist", "cifar10"}
    assert all([m.rule for m in c.methods] == ["fdms"] for c in configs.values())


def test_panel_takes_runs_without_dropout_into_every_panel() -> None:
    curves = [
        curve("Full", NO_DROPOUT, [0.2, 0.4]),
        curve("Full", NO_DROPOUT, [0.4, 0.6], seed=1),
        curve("FDMS", "x-0.5", [0.1, 0.3]),
        curve("FDMS", "x-0.7", [0.0, 0.0]),
    ]
    chosen = _panel.Panel(curves, "x-0.5")
    assert chosen.level("Full", END) == pytest.approx(0.4)
    assert chosen.level("FDMS", AREA) == pytest.approx(0.2)
    assert chosen.after("Full", 2) == pytest.approx(0.5)
    assert chosen.after("Full", 3) is None


def test_methods_are_compared_in_pairs_over_seeds() -> None:
    """The seeds differ by 0.3, the methods by 0.02 and 0.03: paired, the interval is narrow."""
    levels = {0: (0.4, 0.38), 1: (0.7, 0.67), 2: (0.5, 0.475)}
    curves = [
        curve(name, "x", [level] * 20, seed)
        for seed, pair in levels.items()
        for name, level in zip("AB", pair, strict=True)
    ]
    estimate = _panel.Panel(curves, "x").minus("A", "B", END)
    assert (estimate.value, estimate.df, estimate.seeds) == (pytest.approx(0.025), 2, 3)
    assert estimate.error == pytest.approx(0.005 / math.sqrt(3))
    found = _panel.above("x", _panel.Panel(curves, "x"), "A", "B")
    assert (found.verdict, found.basis) == ("holds", "3 seeds")
    assert found.numbers["difference"] == "0.025 [0.01258, 0.03742]"
    # a seed that only one method has is left out
    more = [*curves, curve("A", "x", [0.9] * 20, 3)]
    assert _panel.Panel(more, "x").minus("A", "B", END).seeds == 3


def test_one_seed_is_judged_by_blocks_and_says_so() -> None:
    high, low = [0.5 + 0.01 * (t % 2) for t in range(100)], [0.4] * 100
    found = _panel.above("x", panel(A=high, B=low), "A", "B")
    assert (found.verdict, found.basis) == ("holds", "one seed")
    short = _panel.above("x", panel(A=high[:20], B=low[:20]), "A", "B")
    assert short.verdict == "undecided" and "too few rounds" in short.numbers["difference"]


def test_not_below_has_a_margin() -> None:
    both = panel(A=[0.5] * 60, B=[0.505] * 60, C=[0.52] * 60)
    assert _panel.not_below("x", both, "A", "B").verdict == "holds"
    assert _panel.not_below("x", both, "A", "C").verdict == "fails"


def test_fluctuation_is_the_mean_absolute_change_of_the_second_half() -> None:
    wild = [0.5] * 30 + [0.4, 0.6] * 15 + [0.5] * 30 + [0.4, 0.6] * 15
    found = panel(A=wild, B=[0.5] * 120)
    assert found.level("A", CHANGE) == pytest.approx((0.2 + 0.1 + 0.1 + 29 * 0.2) / 61)
    assert found.level("B", CHANGE) == 0.0


def test_curves_measured_at_other_uploads_are_compared_between() -> None:
    """SCAFFOLD needs two uploads per round, so it has half as many evaluations."""
    mimic = Curve("MimiC", "r", "x", 0, [0, 1, 2, 3], [10, 20, 30, 40], [0.2, 0.4, 0.6, 0.8])
    other = Curve("SCAFFOLD", "r", "x", 0, [0, 1], [20, 40], [0.3, 0.5])
    estimate = contrast([(1, [mimic]), (-1, [other])], UPLOADS_AREA)
    assert estimate.error is None
    # From half of the uploads on, where SCAFFOLD starts from its first model: MimiC starts one
    # quarter from 0.4 and one from 0.6.
    assert estimate.value == pytest.approx(50.0 - 30.0)
    found = contrast([(1, [mimic]), (-1, [other])], UPLOADS_FINAL)
    assert found.value == pytest.approx(30.0)


@pytest.mark.parametrize("statistic", [UPLOADS_END, UPLOADS_AREA, UPLOADS_CHANGE])
def test_a_difference_does_not_depend_on_the_order_of_methods(statistic: Statistic) -> None:
    rng = np.random.default_rng(1)
    methods = [
        Curve(name, "r", "x", 0, list(range(n)), [3 * k * (k0 + i) for i in range(n)], list(y))
        for name, n, k, k0 in (("A", 60, 1, 10), ("B", 31, 2, 7))
        for y in [rng.random(n)]
    ]
    one, two = ([curve] for curve in methods)
    there, back = (
        contrast([(1, one), (-1, two)], statistic),
        contrast([(1, two), (-1, one)], statistic),
    )
    assert there.value == pytest.approx(-back.value) and there.value != 0
    assert there.error == pytest.approx(back.error) and there.error


def test_a_difference_is_that_of_the_means_where_both_have_values() -> None:
    often = Curve(
        "A", "r", "x", 0, list(range(40)), list(range(1, 41)), [0.01 * k for k in range(40)]
    )
    seldom = Curve("B", "r", "x", 0, list(range(5)), [8, 16, 24, 32, 40], [0.1, 0.5, 0.2, 0.3, 0.9])
    found = contrast([(1, [often]), (-1, [seldom])], UPLOADS_END)
    assert found.value == pytest.approx(np.mean(range(31, 40)) - np.mean([30.0, 90.0]))
    assert found.error is None  # two values of B in the window


def test_rises_within_blocks() -> None:
    assert largest_rise([3.0, 2.0, 1.0]) == 0.0
    assert largest_rise([3.0, 1.0, 2.5, 2.0]) == 1.5
    falling = Trace(0, np.arange(40.0), np.arange(40.0)[::-1])
    assert list(rises(falling).y) == [0.0] * 5
    # the second half of 40 values, in five blocks of four
    assert list(rises(Trace(0, np.arange(40.0), np.arange(40.0))).y) == [3.0] * 5


def verdicts(claims: Sequence[Claim]) -> dict[str, str]:
    return {claim.text: claim.verdict for claim in claims}


def test_comparison_claims_pass_and_fail() -> None:
    good = panel(Full=[0.9] * 60, FDMS=[0.88] * 60, Dropout=[0.5, 0.7] * 30, Stale=[0.4] * 60)
    found = verdicts(_panel.comparison_claims("alpha=0.5", good))
    assert len(found) == 6 and set(found.values()) == {"holds"}
    bad = panel(Full=[0.9] * 60, FDMS=[0.3, 0.5] * 30, Dropout=[0.7] * 60, Stale=[0.6] * 60)
    found = verdicts(_panel.comparison_claims("alpha=0.5", bad))
    assert set(found.values()) == {"fails"}


def test_claims_across_alphas() -> None:
    low = panel(Full=[0.9] * 50, FDMS=[0.88] * 50, Dropout=[0.85] * 50, Stale=[0.8] * 50)
    high = panel(Full=[0.9] * 50, FDMS=[0.87] * 50, Dropout=[0.7] * 50, Stale=[0.6] * 50)
    for panels, verdict in (({0.3: low, 0.7: high}, "holds"), ({0.3: high, 0.7: low}, "fails")):
        found = list(verdicts(_panel.across_alphas(panels)).values())
        assert len(found) == 3 and found[:2] == [verdict] * 2
    assert _panel.across_alphas({0.3: low}) == []


def test_a_gain_that_falls_between_two_neighbours_fails() -> None:
    """The gain is larger at 0.7 than at 0.3, and the largest at 0.5."""
    panels = {
        alpha: panel(FDMS=[0.8 + gain] * 50, Dropout=[0.8] * 50, Stale=[0.7 - alpha / 2] * 50)
        for alpha, gain in ((0.3, 0.02), (0.5, 0.05), (0.7, 0.03))
    }
    gain, *others = _panel.across_alphas(panels)
    assert gain.verdict == "fails" and {claim.verdict for claim in others} == {"holds"}
    assert {n: gain.numbers[f"alpha={n}"] for n in (0.3, 0.5, 0.7)} == {
        0.3: 0.02,
        0.5: 0.05,
        0.7: 0.03,
    }
    assert gain.numbers["alpha=0.5 - 0.3"] == "0.03 [0.03, 0.03]"


def test_published_curves_are_compared_where_they_were_evaluated() -> None:
    published = _published.CIFAR_CLUSTERED
    rounds = np.arange(1, 201)
    values = {
        name: list(np.interp(rounds, published.rounds, known) + 0.039)
        for name, known in published.accuracy.items()
    }
    values["Stale"] = [value + 0.002 for value in values["Stale"]]
    found = _panel.published_claims("x", panel(**values), published)
    verdict = {c.text.split()[1]: c.verdict for c in found if "after 100 rounds" in c.text}
    assert verdict == {"Full": "holds", "Dropout": "holds", "Stale": "fails", "FDMS": "holds"}
    later = [c for c in found if c.basis == "no data"]
    assert {c.verdict for c in later} == {"undecided"}
    assert [c.numbers for c in later] == [{"not evaluated after rounds": [250, 300, 400, 500]}] * 4
    (full,) = (c for c in found if "Full within 0.04 of published after 100" in c.text)
    assert full.numbers == {
        "published": 0.35,
        "round 100 alone": 0.389,
        "difference": "0.039 [0.039, 0.039]",
    }
    # the published curve begins after 10 rounds, and ours ends after 200
    windows = [c.text.rpartition("(")[2] for c in found if " Full within" in c.text]
    ends = ("10 to 15", "20 to 30", "45 to 55", "95 to 105", "145 to 155", "195 to 200")
    assert windows == [f"mean of rounds {each})" for each in ends]


def test_published_curves_have_a_value_for_every_round() -> None:
    curves = [_published.CIFAR_CLUSTERED, _published.CIFAR_ONE_EPOCH, _published.CIFAR_FEDPROX]
    for published in [*curves, *_published.CIFAR_GENERAL.values(), _published.FMNIST_03]:
        assert set(published.accuracy) == set(_fdms.LABELS)
        for values in published.accuracy.values():
            assert len(values) == len(published.rounds)
            assert all(0.1 <= value < 0.9 for value in values)


def test_fig5_has_always_500_samples_and_uniform_dropout() -> None:
    options = fdms_fig5.HeterogeneityOptions()
    configs = fdms_fig5.EXPERIMENT.configs(options).values()
    assert [c.task.partition_options["heterogeneity"] for c in configs] == ["low", "medium", "high"]
    assert [c.task.training.batch_size for c in configs] == [200, 20, 200]
    assert {d.process for c in configs for d in c.dropouts} == {"exact"}


def test_fig7_keeps_the_number_of_samples() -> None:
    for part in fdms_fig7.parts(fdms_fig7.ClientsOptions()):
        total = part.task.num_clients * part.task.partition_options["samples_per_client"]
        assert total == {"mnist": 4000, "cifar10": 20000}[part.task.dataset]


def test_fig9_continues_where_training_diverges() -> None:
    """A method whose clients diverge ends with a useless model, not with an error."""
    (part,) = fdms_fig9.parts(fdms_fig9.FashionOptions())
    config = part.config("fdms-fig9", fdms_fig9.FashionOptions())
    assert [m.label for m in config.methods] == list(_fdms.LABELS)
    assert all(m.options == {"nonfinite": "drop"} for m in config.methods)


def test_fig4_thresholds_are_scaled_with_the_length_of_the_run() -> None:
    full = fdms_fig4.EliminationOptions()
    ends = []
    for options, rounds in ((full, 500), (fdms_fig4.EliminationOptions(quick=True), 60)):
        rules = [make(elimination) for elimination in fdms_fig4.thresholds(options, rounds)[1:]]
        ends.append([rule(rounds) for rule in rules])
        assert ends[-1][1] == pytest.approx(ends[-1][0] / 2)
    # delta_f, the constant part, is scaled as well
    assert ends[0] == pytest.approx(ends[1], abs=0.01)
    released = fdms_fig4.EliminationOptions(as_released=True)
    assert fdms_fig4.thresholds(released, 500)[1:] == ["released_case1", "released_case2"]


def test_fig4_counts_pairs_after_the_first_round(tmp_path: Path) -> None:
    options = fdms_fig4.EliminationOptions()
    header = "method,rule,dropout,seed,round,uploads,active,accuracy,loss,"
    lines = [header + "wrong_friend_rate,substitutions,pairs"]
    for name, last in zip(fdms_fig4.NAMES, (90, 60, 30), strict=True):
        for t, count in enumerate((380, *[90] * 50, *[last] * 50)):
            setting = "cluster-floor-0.5"
            accuracy = 0.1 + 0.001 * t
            lines.append(f"{name},fdms,{setting},0,{t},{10 * t},10,{accuracy:.3f},1.0,,0,{count}")
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    found = fdms_fig4.claims({"": tmp_path}, options)
    assert [c.verdict for c in found] == ["holds"] * 5
    assert [c.numbers["With CR case 1"] for c in (found[0], found[2])] == [60.0, 75.0]
    assert found[2].numbers["With CR case 2"] == 60.0
    assert fdms_fig4.draw({"": tmp_path}, options, tmp_path / "figure.png").stat().st_size > 1000


def test_friends_fig1_compares_round_by_round(tmp_path: Path) -> None:
    lines = ["method,rule,dropout,seed,round,distance2_friends,distance2_all"]
    lines += [
        f"Full,fedavg,full,{s},{t},{1 + t / 10},{4 + s / 10}" for s in (0, 1) for t in range(11)
    ]
    (tmp_path / "distances.csv").write_text("\n".join(lines) + "\n")
    options = friends_fig1.FriendsOptions()
    below, much = friends_fig1.claims({"": tmp_path}, options)
    # means over the seeds: 1 to 2, against 4.05
    assert (below.verdict, below.basis) == ("holds", "counted")
    assert below.numbers == {"largest ratio": 0.4938, "in round": 11}
    # of the seeds: 1.5 / 4 and 1.5 / 4.1
    assert (much.verdict, much.basis) == ("holds", "2 seeds")
    assert much.numbers["mean ratio"].startswith("0.3704 [")
    with pytest.raises(ConfigError, match="dataset"):
        friends_fig1.configs(friends_fig1.FriendsOptions(dataset="digits"))


def test_friends_fig2_has_groups_in_two_of_three_tasks() -> None:
    options = friends_fig2.ConferenceOptions()
    configs = friends_fig2.EXPERIMENT.configs(options)
    processes = {n: {d.process for d in c.dropouts} for n, c in configs.items()}
    grouped = {"cluster-floor"}
    assert processes == {"mnist": grouped, "cifar10": grouped, "general": {"exact"}}
    assert {len(c.dropouts) for c in configs.values()} == {2}

    def curves(fdms: float, dropout: float) -> _panel.Panel:
        return panel(Full=[0.9] * 60, FDMS=[fdms] * 60, Dropout=[dropout] * 60, Stale=[0.3] * 60)

    gains = {"MNIST": 0.2, "CIFAR-10": 0.2, "CIFAR-10, general": 0.1}
    panels = {
        f"{task} (alpha={alpha:g})": curves(0.8, 0.8 - gain * alpha)
        for task, gain in gains.items()
        for alpha in options.alphas
    }
    found = verdicts(friends_fig2.claims(panels, options))
    with_groups = [t for t in found if "gains more over Dropout with groups" in t]
    assert [found[t] for t in with_groups] == ["holds", "holds"]
    assert sum("the gain of FDMS over Dropout grows" in t for t in found) == 2
    panels = {t: curves(0.8, 0.6) if "general" in t else p for t, p in panels.items()}
    fewer = friends_fig2.claims(panels, friends_fig2.ConferenceOptions(alphas=(0.5,)))
    assert [c.verdict for c in fewer if "gains more" in c.text] == ["fails"]


def test_fig3_claims_from_score_files(tmp_path: Path) -> None:
    folders = {}
    for part, within in (("mnist", 0.7), ("cifar10", 0.9)):
        folders[part] = tmp_path / part
        job = folders[part] / "jobs" / "FDMS_cluster-floor-0.5_seed0"
        job.mkdir(parents=True)
        rows = [
            "client,group,0,1,2,3",
            f"0,0,,{within},0.4,0.42",
            f"1,0,{within},,0.4,0.42",
            f"2,1,0.4,0.4,,{within}",
            f"3,1,0.42,0.42,{within},",
        ]
        (job / "scores.csv").write_text("\n".join(rows) + "\n")
    found = fdms_fig3.claims(folders, fdms_fig3.Fig3Options())
    assert [(c.verdict, c.basis) for c in found] == [("holds", "one seed")] * 3
    assert found[0].numbers["within"] == "0.700 [0.700, 0.700]"
    # both groups: 0.7 within, 0.41 across
    assert found[0].numbers["difference"] == "0.29 [0.29, 0.29]"
    swapped = {"mnist": folders["cifar10"], "cifar10": folders["mnist"]}
    assert [c.verdict for c in fdms_fig3.claims(swapped, fdms_fig3.Fig3Options())][-1] == "fails"


def test_claims_json_keeps_the_verdicts_and_the_options(tmp_path: Path) -> None:
    known = experiments.available()
    options = known["demo"].options(alphas=(0.3,), out=tmp_path, workers=1)
    text = experiments.claims_json(known["demo"], options, [Claim.counted("a", False, {"x": 1})])
    assert json.loads(text) == {
        "experiment": "demo",
        "options": {"alphas": [0.3]},
        "claims": [{"text": "a", "verdict": "fails", "basis": "counted", "numbers": {"x": 1}}],
    }
    (tmp_path / "claims.json").write_text(text)
    experiment, read = read_claims_json(tmp_path / "claims.json", known)
    assert experiment is known["demo"] and read == known["demo"].options(alphas=(0.3,))
    with pytest.raises(ConfigError, match="experiment: expected one of"):
        read_claims_json(tmp_path / "claims.json", {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected JSON"),
        ("[]", "expected an object with experiment, options, claims"),
        ('{"experiment": "demo"}', "expected an object with experiment, options, claims"),
        ('{"experiment": [], "options": {}, "claims": []}', "expected an object with"),
        ('{"experiment": "demo", "options": {"x": 1}, "claims": []}', "options: demo has no x"),
    ],
)
def test_damaged_claims_are_one_clear_error(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "claims.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"claims\.json: {message}"):
        list(experiments.repeat(tmp_path, experiments.available()))


def test_a_folder_without_experiments_has_no_claims(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected results of experiments \(claims.json\)"):
        list(experiments.repeat(tmp_path, {}))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_everything_is_repeated_from_the_csv_files(tmp_path: Path) -> None:
    """`fastagg-sim claims`: verdicts, figures and the overview, without a run."""
    known = experiments.available()
    experiment = known["fdms-fig1-mnist"]
    options = experiment.options(alphas=(0.7,), seeds=(0, 1))
    out = tmp_path / "fdms-fig1-mnist"
    (config,) = experiment.configs(options).values()
    write_fake_results(out, config)
    (out / "config.json").write_text(config.to_json())
    (out / "claims.json").write_text(experiments.claims_json(experiment, options, []))
    (tmp_path / "README.md").write_text(
        "# x\n\n<!-- counts: begin -->before<!-- counts: end -->\n\n"
        "| figure | run | hold | fail | undecided | more |\n|---|---|---|---|---|---|\n"
        "| 1 | [a](fdms-fig1-mnist/figure.png) | 9 | 9 | 9 | [b](other/x) |\n\n## more\n"
    )
    written = list(experiments.repeat(tmp_path, known))
    names = {path.relative_to(tmp_path).as_posix() for path in written}
    assert {"fdms-fig1-mnist/claims.json", "claims.md", "README.md"} < names
    pictures = {"figure.png", "figure.svg", "accuracy.png", "accuracy.svg"}
    assert pictures <= {path.name for path in out.iterdir()}
    claims = json.loads((out / "claims.json").read_text())["claims"]
    assert len(claims) == 6 and {claim["basis"] for claim in claims} == {"2 seeds"}
    seen = [sum(c["verdict"] == v for c in claims) for v in ("holds", "fails", "undecided")]
    overview = (tmp_path / "README.md").read_text()
    cells = " | ".join(map(str, seen))
    assert f"| full | {cells} |\n| full, 2 seeds | {cells} |\n" in overview
    assert "before" not in overview
    assert f"figure.png) | {cells} | [b](other/x) |" in overview
    page = (tmp_path / "claims.md").read_text()
    assert f"| full, 2 seeds | {cells} |" in page and "## fdms-fig1-mnist" in page
    before = {path: path.read_bytes() for path in written}
    list(experiments.repeat(tmp_path, known))
    assert {path: path.read_bytes() for path in written} == before


def test_counts_by_basis_begin_with_many_seeds_and_leave_out_quick_runs(tmp_path: Path) -> None:
    bases = ("counted", "no data", "one seed", "3 seeds", "10 seeds", "10 seeds")
    for name, options in (("a", {}), ("b", {"quick": True})):
        claims = [{"verdict": "holds", "basis": basis} for basis in bases]
        (tmp_path / name).mkdir()
        content = {"experiment": "demo", "options": options, "claims": claims}
        (tmp_path / name / "claims.json").write_text(json.dumps(content))
    assert _write.totals(tmp_path).splitlines()[2:] == [
        "| full | 6 | 0 | 0 |",
        "| full, 10 seeds | 2 | 0 | 0 |",
        "| full, 3 seeds | 1 | 0 | 0 |",
        "| full, one seed | 1 | 0 | 0 |",
        "| full, counted | 1 | 0 | 0 |",
        "| full, no data | 1 | 0 | 0 |",
        "| scaled down (`--quick`) | 6 | 0 | 0 |",
    ]


# --- every experiment, on made-up results -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        n
        for n in experiments.available()
        if n.startswith(("fdms-", "friends-", "late-", "mimic-", "scale-"))
    ],
)
@pytest.mark.parametrize("quick", [False, True])
def test_claims_figure_and_table_of_every_experiment(
    name: str, quick: bool, tmp_path: Path
) -> None:
    experiment = experiments.available()[name]
    options = experiment.options(quick=quick)
    folders = {}
    for part, config in experiment.configs(options).items():
        folders[part] = tmp_path / "parts" / part
        write_fake_results(folders[part], config)
    claims = experiment.claims(folders, options)
    assert len({claim.text for claim in claims}) == len(claims) >= 2
    json.loads(experiments.claims_json(experiment, options, claims))
    assert experiment.draw is not None
    if not quick:  # a quick figure has fewer panels and lines of the same kinds
        experiment.draw(folders, options, tmp_path / "figure.png")
        with Image.open(tmp_path / "figure.png") as image:
            assert image.width > 400 and image.height > 300
        assert b"<svg" in (tmp_path / "figure.svg").read_bytes()[:500]
    if name.startswith(("late-", "mimic-")):
        assert experiment.table is not None
        grid = experiment.table(folders, options)
        assert grid.rows and all(len(row) == len(grid.columns) for row in grid.rows)

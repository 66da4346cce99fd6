# SPDX-License-Identifier: Apache-2.0
"""Every rule and method has its look, titles have one form, and bands are named."""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import fastagg
from fastagg_sim import looks, plots
from fastagg_sim.experiments import _figures, _theorem4, available
from fastagg_sim.experiments._adversarial import BASELINES, BYZANTINE, VARIANTS
from fastagg_sim.looks import LOOKS, METHODS, REFERENCE, RULES, Look
from fastagg_sim.records import Curve

ROOT = Path(__file__).resolve().parents[2]
CHOOSING = runpy.run_path(str(ROOT / "docs" / "choosing.py"))
# Pictures that show methods of several runs. The others show those of one run.
COMBINED = {
    "adversarial": BASELINES,
    "adversarial, byzantine": (*BYZANTINE, *VARIANTS),
    **{
        f"choosing, {section}": tuple({c.method: None for c in CHOOSING["drawn"](section)})
        for panel in CHOOSING["PANELS"]
        for section in panel
    },
}


def test_the_table_has_rules_and_their_looks_differ() -> None:
    """A new rule needs no entry: its name gives it a look."""
    assert set(RULES) <= set(fastagg.available())
    different = [*RULES.values(), *METHODS.values(), REFERENCE]
    assert len(set(different)) == len(different)
    assert len(set(looks.STYLES)) == len(looks.STYLES) == len(looks.COLORS) == len(looks.MARKERS)


def check(methods: Sequence[str]) -> None:
    """Check that the table has the methods of a picture, and that no two look alike.

    Each can be told apart by its colour alone, and by its line style alone.
    """
    found = looks.looks(methods)
    assert found == {method: LOOKS[method] for method in methods}
    for part in ("color", "style", "marker"):
        assert len({getattr(look, part) for look in found.values()}) == len(found), part


@pytest.mark.usefixtures("no_shadow_runs")
@pytest.mark.parametrize("name", available())
def test_the_methods_of_an_experiment_are_in_the_table_and_differ(name: str) -> None:
    experiment = available()[name]
    for config in experiment.configs(experiment.options()).values():
        check([method.label for method in config.methods])


@pytest.mark.parametrize("picture", COMBINED)
def test_the_methods_of_a_combined_picture_differ(picture: str) -> None:
    check(COMBINED[picture])


def test_a_method_of_an_experiment_has_the_colour_of_its_rule() -> None:
    # The same training, and nothing but the rule's own options.
    same = {"FDMS": "fdms", "Dropout": "fedavg", "FedAvg": "fedavg", "MIFA": "mifa"}
    same |= {"MimiC": "mimic", "SCAFFOLD": "scaffold", "GM": "geometric-median"}
    same |= {"cclip": "centered-clip", "bucketing GM": "bucketing", "FedAvg variant": "amplified"}
    assert all(looks.look(name) == looks.look(rule) for name, rule in same.items())
    # With another aggregation, "Stale" of the paper's literal text is the rule stale.
    assert looks.look("Stale").color == looks.look("stale").color


@pytest.mark.parametrize("method", ["mimic-mode=client", "cclip 10", "mimic-aged-fading=0.5"])
def test_options_keep_the_colour_of_a_method(method: str) -> None:
    parent = {"mimic-mode=client": "mimic", "cclip 10": "cclip"}.get(method, "mimic-aged")
    assert looks.look(method).color == looks.look(parent).color
    assert method not in LOOKS


def test_unknown_names_have_stable_colours_and_never_look_alike() -> None:
    # A user's rule: the look follows from the name, in every process and beside any others.
    assert looks.look("my-rule") == Look("green", 7)
    names = [f"rule{n}" for n in range(20)]
    together = looks.looks([*LOOKS, *names])
    assert len({together[name] for name in names}) == len(names)
    assert not {together[name] for name in names} & set(LOOKS.values())
    assert looks.looks(["fdms", "my-rule"])["my-rule"] == looks.look("my-rule")
    # A method with an unknown name and a known rule has the colour of the rule.
    assert looks.looks({"mine": "mifa", "MIFA": "mifa"})["mine"].color == LOOKS["MIFA"].color
    for one, other in itertools.combinations(looks.looks([*names, "fdms"]).values(), 2):
        assert one != other


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("MNIST (K=40)", "MNIST, K = 40"),
        ("P:500, S:100, Low", "P = 500, S = 100, Low"),
        ("tau_max = 20", r"$\tau_\mathrm{max}$ = 20"),
        ("CIFAR-10, alpha=0.5", r"CIFAR-10, $\alpha$ = 0.5"),
        ("training loss", "Training loss"),
        ("p = 0.1", "p = 0.1"),
        ("fdms, exact (alpha=0.5)", r"fdms, exact, $\alpha$ = 0.5"),
        ("2 threads (busy: look away)", "2 threads, busy: look away"),
        (plots.dropout_title("bernoulli-0.1-levels=5"), "Bernoulli, p = 0.1, levels = 5"),
        (plots.dropout_title("exact-0.5"), r"Exact, $\alpha$ = 0.5"),
        (
            plots.dropout_title("round-robin-tau-max=20-phase=random"),
            r"Round-robin, $\tau_\mathrm{max}$ = 20, phase = random",
        ),
        (plots.dropout_title("full"), "Full"),
        (plots.dropout_title("an old label"), "An old label"),
    ],
)
def test_titles_have_one_form(text: str, title: str) -> None:
    assert looks.form(text) == title
    assert looks.form(title) == title


def test_long_texts_are_broken_between_assignments() -> None:
    assert looks.wrapped("a = 1, b", 8) == "a = 1, b"
    assert looks.wrapped("Sampled, sample = 1000, among = all", 20) == (
        "Sampled,\nsample = 1000,\namong = all"
    )
    assert looks.wrapped("x" * 25, 10).split("\n") == ["x" * 10, "x" * 10, "x" * 5]


def curve(method: str, seed: int, dropout: str = "exact-0.5") -> Curve:
    start = 0.1 * seed + (0.5 if dropout == "full" else 0.0)
    accuracy = [start + 0.01 * t for t in range(5)]
    return Curve(method, "fedavg", dropout, seed, list(range(5)), accuracy=accuracy)


@pytest.mark.slow
def test_a_method_with_and_without_dropout_has_two_panels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their curves are not averaged. A method that ran without dropout only is in every panel."""
    drawn: list[list[float]] = []

    def draw_line(panel: Axes, label: str, lines: Sequence[plots.Line], *_: Any, **__: Any) -> None:
        drawn.append([y[0] for _, y in lines])

    monkeypatch.setattr(plots, "draw_line", draw_line)
    both = [curve("fedavg", 0, dropout) for dropout in ("full", "exact-0.5")]
    plots.accuracy_figure([*both, curve("Full", 0, "full")], tmp_path / "a.png")
    assert sorted(drawn) == [[0.0], [0.5], [0.5], [0.5]]


@pytest.mark.slow
def test_a_picture_uses_the_table_and_names_its_band(tmp_path: Path) -> None:
    curves = [curve(method, seed) for method in ("FDMS", "Full") for seed in (0, 1)]
    plots.accuracy_figure(curves, tmp_path / "a.png")
    lines = {"Full": [([1, 2], [0.1, 0.2])] * 2, "FDMS": [([1, 2], [0.2, 0.3])] * 2}
    _figures.draw([_figures.Plot("x", lines)], tmp_path / "b.png")
    for name in ("a", "b"):
        text = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        assert "band from the" in text
        assert LOOKS["FDMS"].color.lower() in text
        assert LOOKS["MIFA"].color.lower() not in text
    assert not plt.get_fignums()


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "banded"), [(1.001, False), (1.1, True)])
def test_theorem4_has_a_band_where_rules_differ(
    tmp_path: Path, factor: float, banded: bool
) -> None:
    rows = [
        _theorem4.Row(part, epsilon, rule, seed, (size * (1.0 + epsilon), 0.5), True)
        for part in _theorem4.PARTS[:2]
        for epsilon in (0.1, 0.2)
        for rule, size in (("fedavg", 1.0), ("mifa", factor), (_theorem4.MIDPOINT, 0.25))
        for seed in (0, 1)
    ]
    _theorem4.draw(rows, tmp_path / "a.png")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert ("band from the" in text) == banded and ("equal within 1 %" in text) != banded
    assert not plt.get_fignums()

# SPDX-License-Identifier: Apache-2.0
"""What figures say beside their lines."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from fastagg_sim import looks, plots, records
from fastagg_sim.experiments import _figures


def noted(**lines: list[float]) -> str:
    figure, panel = plt.subplots()
    panel.set_xlabel("round")
    plots.note_equal_lines(panel, {name: [np.array(values)] for name, values in lines.items()})
    label = panel.get_xlabel()
    plt.close(figure)
    return label


def test_constant_and_identical_lines_are_named() -> None:
    assert noted(a=[1.0, 2.0], b=[1.0, 3.0]) == "round"
    assert noted(a=[0.8, 0.8], b=[0.8, 0.8]) == "round\nconstant: 0.8"
    assert noted(a=[0.8, 0.8], b=[1.0, 2.0]) == "round\na: constant, 0.8"
    assert noted(a=[1.0, 2.0], b=[1.0, 2.0], c=[3.0, 2.0]) == "round\nidentical: a, b"


def test_long_lines_are_thinned_to_their_ends() -> None:
    short, long = np.arange(500), np.arange(2000)
    assert plots.thin(short) is short
    thinned = plots.thin(long)
    assert len(thinned) == plots.POINTS and thinned[0] == 0 and thinned[-1] == 1999


def test_seeds_without_a_common_time_are_named_and_not_drawn(tmp_path: Path) -> None:
    def curve(method: str, seed: int, time: list[float]) -> records.Curve:
        rounds = list(range(len(time)))
        accuracy = [0.5 + 0.1 * seed + 0.01 * t for t in rounds]
        return records.Curve(method, "fedavg", "full", seed, rounds, rounds, accuracy, time=time)

    apart = [curve("a", 0, [3.0]), curve("a", 1, [4.0])]
    plots.accuracy_figure(apart, tmp_path / "apart.png", over_time=True)
    assert "not drawn, seeds without a common time: a" in (tmp_path / "apart.svg").read_text()
    both = [*apart, curve("b", 0, [1.0, 2.0]), curve("b", 1, [1.5, 3.0])]
    plots.accuracy_figure(both, tmp_path / "both.png", over_time=True)
    text = (tmp_path / "both.svg").read_text()
    assert "common time: a" in text and ">b<" in text and ">a<" not in text


@pytest.mark.slow
def test_long_and_many_names_leave_the_panel_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning of matplotlib, that no room is left for panels, would be an error here."""
    figures: list[Figure] = []

    def keep(figure: Figure, target: Path) -> None:
        figure.canvas.draw()
        figures.append(figure)
        plt.close(figure)

    monkeypatch.setattr(plots, "save", keep)
    long = "bucketing-size=3-rule=centered-clip-rule-options=tau+1.5+iterati.1234abcd"
    dropout = "sampled-sample=1000-among=available-process=bernoulli-options=p+0.1+levels+50"
    for names in ([long, "fedavg"], [f"method {k}" for k in range(30)]):
        lines = [[0.01 * k + 0.1 * t for t in range(3)] for k in range(len(names))]
        curves = [
            records.Curve(name, "fedavg", dropout, 0, [0, 1, 2], [1, 2, 3], line)
            for name, line in zip(names, lines, strict=True)
        ]
        plots.accuracy_figure(curves, tmp_path / "a.png")
        (figure,) = figures
        (panel,), (legend,) = figure.axes, figure.legends
        whole, beside = figure.bbox, legend.get_window_extent()
        assert panel.get_window_extent().width > 0.3 * whole.width
        assert beside.y0 >= whole.y0 and beside.y1 <= whole.y1
        title = panel.title.get_window_extent()
        assert title.x0 >= whole.x0 and title.x1 <= whole.x1
        figures.clear()


def test_a_single_value_is_a_marker() -> None:
    figure, panel = plt.subplots()
    plots.draw_line(panel, "a", [([3.0], [0.5])], looks.looks({"a": "fedavg"})["a"])
    plots.draw_line(panel, "b", [([3.0, 4.0], [0.5, 0.6])], looks.looks({"a": "fedavg"})["a"])
    markers = [one.get_marker() for one in panel.lines]
    plt.close(figure)
    assert markers == ["o", "None"]


def line(start: float, count: int = 40) -> _figures.Line:
    return list(range(1, count + 1)), [start + 0.001 * t for t in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 3])
def test_a_figure_names_its_seeds_and_the_published_curve(tmp_path: Path, seeds: int) -> None:
    lines = {"Full": [line(0.1 * s) for s in range(seeds)], "FDMS": [line(0.2)] * seeds}
    published = {"FDMS": ((10, 20, 100), (0.2, 0.3, 0.4))}
    plot = _figures.Plot("x", lines, (0.0, 1.0), published=published)
    texts = []
    for name in ("a", "b"):
        _figures.draw([plot], tmp_path / f"{name}.png")
        texts.append((tmp_path / f"{name}.svg").read_text())
    assert texts[0] == texts[1] and "<dc:date>" not in texts[0]
    assert f"n = {seeds} seed" in texts[0] and "published, in" in texts[0]
    assert ("band from the" in texts[0]) == (seeds > 1)
    # the published curve ends where the measured ones do: at round 40 of 100
    grey = re.findall(rf'd="([^"]*)"[^>]*stroke: {_figures.GREY}', texts[0])
    assert len(grey) >= 1 and len(grey[0].split("L")) == 3


def test_a_running_mean_begins_with_the_first_value_and_ends_with_a_mean() -> None:
    values = np.arange(200.0) ** 2
    found = plots.running_mean(values)
    for place, window in ((0, slice(0, 1)), (2, slice(0, 5)), (100, slice(95, 106))):
        assert found[place] == pytest.approx(values[window].mean())
    assert found[-1] == pytest.approx(values[-6:].mean())


def texts(path: Path) -> str:
    """Return the words of an SVG, without the breaks of lines."""
    return " ".join(re.findall(r">([^<>]+)</text>", path.read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 3])
def test_panels_of_more_than_100_evaluations_have_running_means(tmp_path: Path, seeds: int) -> None:
    long, short = ([line(0.1 * s, count) for s in range(seeds)] for count in (101, 100))
    mean = "means of 11 evaluations"
    for name, panels, notes in (
        ("a", [long, long], [mean]),
        ("b", [long, short], [mean, "in panels of more than 100"]),
        ("c", [short, short], []),
    ):
        shown = [_figures.Plot(f"panel {k}", {"FDMS": each}) for k, each in enumerate(panels)]
        _figures.draw(shown, tmp_path / f"{name}.png")
        said = texts(tmp_path / f"{name}.svg")
        for note in (mean, "in panels of more than 100"):
            assert (note in said) == (note in notes)
        assert ("faint: all evaluations" in said) == (seeds == 1 and bool(notes))
    # a line that is short by itself keeps the others of its panel as they are
    mixed = _figures.Plot("x", {"FDMS": long, "Full": short})
    _figures.draw([mixed], tmp_path / "d.png")
    assert mean not in texts(tmp_path / "d.svg")


def test_a_band_may_be_the_interval_of_the_mean() -> None:
    figure, panel = plt.subplots()
    lines = [([0.0, 1.0], [value, value]) for value in (0.0, 1.0, 2.0)]
    plots.draw_line(panel, "FDMS", lines, looks.look("FDMS"), interval=True)
    corners = panel.collections[0].get_paths()[0].vertices[:, 1]
    plt.close(figure)
    # Student's quantile for two degrees of freedom, times the error of the mean
    assert np.ptp(corners) / 2 == pytest.approx(4.302653 / 3**0.5, abs=1e-6)


def test_upper_limits_give_way_to_higher_lines_and_stay_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[float, float]] = []

    def note(figure: Figure, target: Path) -> None:
        limits.extend(panel.get_ylim() for panel in figure.axes)
        plt.close(figure)

    monkeypatch.setattr(_figures, "save", note)
    low, high = {"FDMS": [line(0.2)]}, {"FDMS": [line(0.5)]}
    plot = _figures.Plot
    _figures.draw(
        [plot("a", low, (0.1, 0.5)), plot("b", high, (0.1, 0.5)), plot("c", low, (0.0, 0.4))],
        tmp_path / "a.png",
    )
    (_, first), (_, second), (_, third) = limits
    assert first == second > 0.539 and third == 0.4


def test_differences_are_paired_by_seed_and_round() -> None:
    curve = records.Curve
    one = [curve("A", "r", "x", s, [0, 1, 2], [1, 2, 3], [0.1, 0.2, 0.3 + s]) for s in (0, 1, 2)]
    two = [curve("B", "r", "x", s, [1, 2], [2, 3], [0.1, 0.1]) for s in (2, 0)]
    found = _figures.minus(one, two)
    assert [tuple(x) for x, _ in found] == [(2, 3)] * 2
    assert np.array([y for _, y in found]) == pytest.approx(np.array([[0.1, 0.2], [0.1, 2.2]]))

# SPDX-License-Identifier: Apache-2.0
"""What figures say beside their lines."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt

from fastagg_sim import plots
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

# SPDX-License-Identifier: Apache-2.0
"""Write epsilon.csv and the figures of the experiments of Su et al."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fastagg_sim import data
from fastagg_sim.dropout.adversarial import Adversarial
from fastagg_sim.experiments._adversarial import BYZANTINE, VARIANTS
from fastagg_sim.experiments._adversarial_results import (
    EPSILON_FILE,
    PublishedEnd,
    read_epsilon,
    read_lines,
)
from fastagg_sim.experiments._curves import Curves
from fastagg_sim.experiments._figures import GREY, over_rounds
from fastagg_sim.files import write_atomically
from fastagg_sim.looks import looks
from fastagg_sim.plots import are_long, draw_line, note_equal_lines, save, seeds_note, thin
from fastagg_sim.results import ResultsFolder
from fastagg_sim.simulation import dropout_process, split_clients

_MARKERS = (".", "+", "x", "1")  # of the seeds, in the panels of epsilon_t
_BYZANTINE_LEGEND = (*BYZANTINE, *VARIANTS)


def write_epsilon(folder: Path) -> Path:
    """Write epsilon.csv and return its path.

    It contains, per seed and round, the fraction of samples that was silenced and the number of
    active clients. The dropout process is a pure function, so the results of the runs are not
    needed.
    """
    config = ResultsFolder.read(folder).config
    task, (dropout,) = config.task, config.dropouts
    lines = ["seed,round,epsilon,active"]
    for seed in config.seeds:
        dataset = data.load(task.dataset, seed=seed, **task.data_options)
        process = dropout_process(dropout, split_clients(task, dataset, seed), dataset, seed)
        assert isinstance(process, Adversarial)
        for t in range(task.rounds):
            fraction = process.silenced_fraction(t)
            lines.append(f"{seed},{t},{fraction:.6f},{len(process.active(t))}")
    path = folder / EPSILON_FILE
    write_atomically(path, "\n".join(lines) + "\n")
    return path


def draw(
    folders: Mapping[str, Path],
    rows: Sequence[Sequence[str]],
    target: Path,
    published: Mapping[str, PublishedEnd],
) -> None:
    """Draw the comparison with the baselines to `target`, and that with the Byzantine-robust rules
    to figure-byzantine.png in the same folder.

    rows: for each row of panels in the first figure, the methods to draw.
    published: where the published curves end, by method, if that is known.
    """
    lines = read_lines(folders)
    epsilon = read_epsilon(folders["baselines"])
    _figure(lines, epsilon, rows, target, published)
    other = target.with_name("figure-byzantine.png")
    _figure(lines, epsilon, [_BYZANTINE_LEGEND], other, published)


def _figure(
    lines: Curves,
    epsilon: Mapping[int, Sequence[tuple[float, int]]],
    rows: Sequence[Sequence[str]],
    target: Path,
    published: Mapping[str, PublishedEnd],
) -> None:
    """Draw training loss and test accuracy over rounds, with a row of panels for each of `rows`,
    and epsilon_t in the last row.

    The lines are means over seeds, with a band from the lowest to the highest seed.
    """
    trained = min(curve.rounds[-1] + 1 for each in lines.curves.values() for curve in each)
    count = len(rows) + 1
    figure, panels = plt.subplots(
        count, 2, figsize=(9.5, 2.6 * count), sharex=True, squeeze=False, layout="constrained"
    )
    for row, methods in zip(panels, rows, strict=False):
        smooth = are_long(over_rounds(lines.curves[method]) for method in methods)
        for method, how in looks(methods).items():
            curves = lines.curves[method]
            rounds = [[t + 1 for t in curve.rounds] for curve in curves]
            losses, accuracies = [c.train_loss for c in curves], [c.accuracy for c in curves]
            for panel, values in zip(row, (losses, accuracies), strict=True):
                seeds = list(zip(rounds, values, strict=True))
                draw_line(panel, method, seeds, how, smooth=smooth)
        for panel, of in zip(row, ("train_loss", "accuracy"), strict=True):
            note_equal_lines(
                panel,
                {m: [np.array(getattr(c, of)) for c in lines.curves[m]] for m in methods},
            )
        row[0].set_ylabel("train loss")
        row[1].set_ylabel("test accuracy")
        handles, labels = row[1].get_legend_handles_labels()
        counts = {method: len(lines.curves[method]) for method in methods}
        for handle, method in zip(handles, labels, strict=True):
            if counts[method] < max(counts.values()):
                handle.set_label(f"{method} (n = {counts[method]})")
        ends = {m: end for m, end in published.items() if m in methods and trained >= end.rounds}
        if ends:
            _draw_ends(row[0], {m: (end.rounds, end.train_loss) for m, end in ends.items()})
            _draw_ends(row[1], {m: (end.rounds, end.accuracy) for m, end in ends.items()})
            label = "published ranges at the end,\nfrom the left in this order"
            handles.append(Line2D([], [], color=GREY, linewidth=1.0, label=label))
        row[1].legend(
            handles=handles,
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
            handlelength=3.2,
            title=seeds_note(
                max(counts.values()),
                smooth=[smooth],
            ),
            title_fontsize=8,
        )
    every = range(1, min(map(len, epsilon.values())) + 1)
    for panel in panels[-1]:
        silenced = {
            f"seed {seed}": np.array([fraction for fraction, _ in pairs])
            for seed, pairs in epsilon.items()
        }
        for (label, each), mark in zip(silenced.items(), cycle(_MARKERS), strict=False):
            x, y = thin(np.array(every)), thin(each[: len(every)])
            panel.plot(x, y, mark, color="#666666", markersize=2, label=label, rasterized=True)
        panel.set_ylim(-0.02, 1.02)
        panel.set_ylabel("$\\epsilon_t$")
        panel.set_xlabel("round")
        note_equal_lines(panel, {label: [each] for label, each in silenced.items()})
    for panel in panels.ravel():
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    save(figure, target)


def _draw_ends(panel: Axes, ends: Mapping[str, tuple[int, tuple[float, float]]]) -> None:
    """Draw a grey vertical line from the lowest to the highest published value of each method, in
    its line style, side by side to the right of its last round."""
    for place, (how, (rounds, values)) in enumerate(
        zip(looks(ends).values(), ends.values(), strict=True), start=2
    ):
        x = [rounds * (1 + 0.03 * place)] * 2
        panel.plot(x, values, color=GREY, linestyle=how.style, linewidth=1.0)
        panel.plot(x, values, color=GREY, linestyle="none", marker="_", markersize=6)

# SPDX-License-Identifier: Apache-2.0
"""Print the comparisons that docs/choosing.md cites, and draw docs/choosing.png and choosing.svg.

All of them are from full runs in results/; none is from a scaled-down one. Run from the root of
the repository: python docs/choosing_figure.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import pyplot as plt

from fastagg_sim.experiments import late_fig1
from fastagg_sim.experiments._statistics import (
    AREA,
    CHANGE,
    END,
    LOSS_CHANGE,
    LOSS_END,
    UPLOADS_END,
    Statistic,
    contrast,
)
from fastagg_sim.looks import looks
from fastagg_sim.plots import save
from fastagg_sim.records import Curve, read_curves
from fastagg_sim.verdicts import Estimate

ROOT = Path(__file__).resolve().parents[1]
CIFAR, MNIST, TABLE3 = "fdms-fig1-cifar-seeds", "fdms-fig1-mnist", "mimic-table3"
TABLE4 = "mimic-table4-fmnist"
SU = {n: f"adversarial-fig{n}" for n in (1, 9, 11)}
LATE = "late-fig1"
FIG7, DTYPES = "mimic-fig7", "memory-dtypes"
MEANS, MEANS_CIFAR = "friends-from-means/mnist", "friends-from-means-cifar/cifar10"
LAST_FIFTH, WHOLE_TIME = late_fig1.statistics(late_fig1.LateOptions())
FULL = "full"


def curves(folder: str, method: str, dropout: str) -> list[Curve]:
    """Return the curves of a method, one per seed. `dropout` is the end of the setting's name."""
    path = ROOT / "results" / folder
    files = (
        [path / "metrics.csv"] if (path / "metrics.csv").exists() else path.glob("*/metrics.csv")
    )
    found = [c for file in files for c in read_curves(file) if c.method == method]
    found = [c for c in found if c.dropout == FULL or c.dropout.endswith(dropout)]
    if not found:
        raise ValueError(f"{folder}: expected curves of {method} with {dropout}, found none")
    return found


@dataclass(frozen=True)
class Comparison:
    """`method` minus `other` in a statistic of a run."""

    folder: str
    dropout: str
    statistic: Statistic
    method: str
    other: str

    def estimate(self) -> Estimate:
        one, two = (curves(self.folder, m, self.dropout) for m in (self.method, self.other))
        return contrast([(1, one), (-1, two)], self.statistic)

    def cited(self) -> str:
        """Return the difference with its interval, as docs/choosing.md states it."""
        estimate = self.estimate()
        low, high = estimate.interval()
        digits = 1 if self.statistic is UPLOADS_END else 3
        return f"{estimate.value:+.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


COMPARISONS = (
    # groups of similar clients
    *(Comparison(MNIST, a, END, "FDMS", "Dropout") for a in ("0.3", "0.7")),
    *(Comparison(MNIST, a, AREA, "FDMS", "Dropout") for a in ("0.3", "0.5", "0.7")),
    Comparison(CIFAR, "0.5", END, "FDMS", "Dropout"),
    Comparison(CIFAR, "0.5", AREA, "FDMS", "Dropout"),
    Comparison(CIFAR, "0.5", END, "FDMS", "Full"),
    Comparison(CIFAR, "0.5", CHANGE, "FDMS", "Dropout"),
    *(Comparison(MNIST, "0.7", AREA, "Stale", other) for other in ("Dropout", "FDMS")),
    Comparison(CIFAR, "0.5", AREA, "Stale", "FDMS"),
    # pairs that are rarely active together
    *(Comparison(MEANS, a, AREA, "Means", "FDMS") for a in ("0.3", "0.5", "0.7", "0.9")),
    *(Comparison(MEANS, a, AREA, "Means first", "FDMS first") for a in ("0.5", "0.7")),
    Comparison(MEANS, "0.7", END, "Means", "FDMS"),
    Comparison(MEANS, "0.7", AREA, "Means", "Dropout"),
    *(Comparison(MEANS_CIFAR, a, AREA, "Means", "FDMS") for a in ("0.5", "0.7")),
    Comparison(MEANS_CIFAR, "0.7", END, "Means", "FDMS"),
    Comparison(MEANS_CIFAR, "0.7", AREA, "Means", "Dropout"),
    *(Comparison(folder, "0.9", AREA, "Means", "Dropout") for folder in (MEANS, MEANS_CIFAR)),
    # different data, long absences
    *(
        Comparison(TABLE3, f"={tau}", UPLOADS_END, "MimiC", other)
        for tau in (20, 100)
        for other in ("FedAvg", "MIFA")
    ),
    *(Comparison(TABLE3, f"={tau}", UPLOADS_END, "MIFA", "FedAvg") for tau in (20, 100)),
    Comparison(TABLE3, "=100", UPLOADS_END, "SCAFFOLD", "FedAvg"),
    # each active with probability 0.1
    *(Comparison(FIG7, "", UPLOADS_END, m, "FedAvg") for m in ("MimiC", "MIFA", "SCAFFOLD")),
    # few active clients, drawn uniformly
    Comparison(SU[1], "all", END, "MIFA", "FedAvg"),
    Comparison(SU[1], "all", END, "FedAvg variant", "FedAvg"),
    Comparison(SU[1], "all", CHANGE, "FedAvg variant", "FedAvg"),
    Comparison(SU[1], "all", END, "GM", "FedAvg"),
    # an adversary
    *(
        Comparison(SU[n], "", LOSS_END, f"{method} variant", method)
        for n in (9, 11)
        for method in ("FedAvg", "FedProx")
    ),
    *(Comparison(SU[n], "", LOSS_CHANGE, "FedAvg variant", "FedAvg") for n in (9, 11)),
    *(Comparison(SU[n], "", END, "cclip", "FedAvg") for n in (9, 11)),
    *(Comparison(SU[n], "", END, "MIFA", "FedAvg") for n in (9, 11)),
    # rows in int8
    *(Comparison(DTYPES, "0.7", END, f"{method} int8", method) for method in ("MIFA", "Stale")),
    # stragglers
    *(Comparison(LATE, FULL, LAST_FIFTH, method, "FedAvg") for method in late_fig1.REMEDIES),
    *(
        Comparison(LATE, FULL, WHOLE_TIME, method, "FedAvg waits")
        for method in ("MimiC", "MIFA", "FedBuff", "FedAvg late")
    ),
)

# --- the figure -------------------------------------------------------------------------------

# method in the results -> rule; everything else is a variant of the client's training
RULES = {
    "Stale": "stale-models",
    "FDMS": "fdms",
    "SCAFFOLD": "scaffold",
    "MIFA": "mifa",
    "MimiC": "mimic",
    "FedAvg variant": "amplified",
    "GM": "geometric-median",
    "cclip": "centered-clip",
}


@dataclass(frozen=True)
class Setting:
    """A row of the figure: its title, the folder of the run, and the end of the dropout's name."""

    title: str
    folder: str
    dropout: str
    methods: Sequence[str]
    plain: str = "FedAvg"

    def gains(self) -> dict[str, Estimate]:
        """Return percentage points above plain averaging under the same dropout, by rule."""
        found = {}
        for method in self.methods:
            pair = [curves(self.folder, name, self.dropout) for name in (method, self.plain)]
            found[RULES[method]] = contrast([(1, pair[0]), (-1, pair[1])], UPLOADS_END)
        return found


GROUPS = ("Stale", "FDMS")
MEMORY = ("SCAFFOLD", "MIFA", "MimiC")
REUSE = ("MIFA", "FedAvg variant", "GM", "cclip")
SETTINGS = (
    *(
        Setting(f"MNIST, groups,\n{100 * float(a):.0f} % away", MNIST, a, GROUPS, "Dropout")
        for a in ("0.3", "0.5", "0.7")
    ),
    Setting("CIFAR-10, groups,\n50 % away", CIFAR, "0.5", GROUPS, "Dropout"),
    *(
        Setting(f"Fashion-MNIST, two labels,\nup to {tau} rounds", TABLE3, f"={tau}", MEMORY)
        for tau in (20, 50, 100)
    ),
    *(
        Setting(f"Fashion-MNIST, two labels,\n{100 - 100 * float(p):.0f} % away", TABLE4, p, MEMORY)
        for p in ("0.1", "0.3", "0.5")
    ),
    Setting("CIFAR-10, Dirichlet,\n98 % away, uniform", SU[1], "all", REUSE),
    Setting("Synthetic(1, 1),\nadversary, 0.9", SU[9], "", REUSE),
    Setting("Synthetic(1, 1),\nadversary, 0.7", SU[11], "", REUSE),
)


def draw(target: Path) -> None:
    figure, panel = plt.subplots(figsize=(8.5, 0.62 * len(SETTINGS) + 1.2), layout="constrained")
    labelled = set()
    every = looks(RULES.values())
    titles = []
    for row, setting in enumerate(SETTINGS):
        gains = setting.gains()
        for number, (rule, gain) in enumerate(gains.items()):
            mark, color = every[rule].marker, every[rule].color
            y = row + 0.16 * (number - (len(gains) - 1) / 2)
            label = None if rule in labelled else rule
            labelled.add(rule)
            known = gain.error is not None
            if known:
                panel.plot(gain.interval(), (y, y), color=color, linewidth=1.4)
            face = color if known else "white"
            panel.plot(
                gain.value,
                y,
                mark,
                color=color,
                markersize=7,
                markerfacecolor=face,
                label=label,
                clip_on=True,
            )
        seeds = next(iter(gains.values())).seeds
        titles.append(f"{setting.title}\nn = {seeds} seed{'s' if seeds > 1 else ''}")
    panel.axvline(0.0, color="#000000", linewidth=0.8)
    panel.set_yticks(range(len(SETTINGS)), titles, fontsize=7)
    panel.set_xlim(-20, 40)
    panel.invert_yaxis()
    panel.set_xlabel(
        "test accuracy above fedavg under the same dropout (points)\n"
        "lines: 95 % interval; open marks: too few rounds for an interval"
    )
    panel.grid(color="#dddddd", linewidth=0.6)
    figure.legend(loc="outside right center", frameon=False)
    save(figure, target)


def main() -> None:
    for comparison in COMPARISONS:
        seeds = comparison.estimate().seeds
        print(
            f"{comparison.folder} {comparison.dropout}, {seeds} seed{'s' if seeds > 1 else ''}: "
            f"{comparison.method} - {comparison.other}: {comparison.cited()}  "
            f"({comparison.statistic.text})"
        )
    draw(Path(__file__).with_name("choosing.png"))


if __name__ == "__main__":
    main()

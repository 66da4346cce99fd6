# SPDX-License-Identifier: Apache-2.0
"""Draw docs/choosing.png: the gain of each rule over plain averaging, per setting.

The data come from results/. Run from the root of the repository: python docs/choosing_figure.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib

from fastagg_sim.records import Curve, read_curves

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
TAIL = 0.2
FULL = "full"
ROBIN = "round-robin-tau-max="
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
MARKS = {
    "stale-models": ("v", "#009E73"),
    "fdms": ("o", "#D55E00"),
    "scaffold": ("x", "#999999"),
    "mifa": ("s", "#0072B2"),
    "mimic": ("D", "#CC79A7"),
    "amplified": ("^", "#000000"),
    "geometric-median": ("P", "#E69F00"),
    "centered-clip": ("*", "#56B4E9"),
}


@dataclass(frozen=True)
class Setting:
    """A run: its title in the figure, its folder, and the name of its dropout in metrics.csv."""

    title: str
    folder: str
    dropout: str

    def tails(self) -> dict[str, float]:
        """Return mean accuracy in percent by method, over seeds and the last fifth of uploads."""
        found: dict[str, list[float]] = {}
        for curve in read_curves(ROOT / "results" / self.folder / "metrics.csv"):
            if curve.dropout in (self.dropout, FULL):
                found.setdefault(curve.method, []).append(100 * tail(curve))
        return {method: fmean(values) for method, values in found.items()}

    def gains(self) -> dict[str, float]:
        """Return percentage points above plain averaging under the same dropout, by rule."""
        tails = self.tails()
        plain = tails["Dropout"] if "Dropout" in tails else tails["FedAvg"]
        return {RULES[name]: value - plain for name, value in tails.items() if name in RULES}


def tail(curve: Curve) -> float:
    start = (1.0 - TAIL) * curve.uploads[-1]
    return fmean(a for u, a in zip(curve.uploads, curve.accuracy, strict=True) if u >= start)


SETTINGS = (
    Setting("CIFAR-10, groups,\nhalf away", "fdms-fig1-cifar", "cluster-floor-0.5"),
    Setting("MNIST, groups,\n50 % away", "fdms-fig1-mnist", "cluster-floor-0.5"),
    Setting("MNIST, groups,\n70 % away", "fdms-fig1-mnist", "cluster-floor-0.7"),
    Setting("Fashion-MNIST, groups,\n70 % away", "quick/fdms-fig9", "cluster-floor-0.7"),
    Setting("CIFAR-10, two shards each,\nhalf away", "quick/fdms-fig2", "exact-0.5"),
    Setting("Fashion-MNIST, two labels,\nup to 20 rounds", "mimic-table3", ROBIN + "20"),
    Setting("Fashion-MNIST, two labels,\nup to 100 rounds", "mimic-table3", ROBIN + "100"),
    Setting("Fashion-MNIST, two labels,\n90 % away", "quick/mimic-fig7", "bernoulli-0.1"),
)


def draw(target: Path) -> None:
    figure, panel = plt.subplots(figsize=(8.0, 0.55 * len(SETTINGS) + 1.2), layout="constrained")
    labelled = set()
    for row, setting in enumerate(SETTINGS):
        for rule, gain in setting.gains().items():
            mark, color = MARKS[rule]
            label = None if rule in labelled else rule
            labelled.add(rule)
            panel.plot(gain, row, mark, color=color, markersize=8, label=label)
    panel.axvline(0.0, color="#000000", linewidth=0.8)
    panel.set_yticks(range(len(SETTINGS)), [s.title for s in SETTINGS], fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel("test accuracy above fedavg under the same dropout (points)")
    panel.grid(color="#dddddd", linewidth=0.6)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(target, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_name("choosing.png"))

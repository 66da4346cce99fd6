# SPDX-License-Identifier: Apache-2.0
"""Pictures and claims that the experiments of Su et al. share, from their CSV files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

from matplotlib.axes import Axes

from fastagg_sim import data
from fastagg_sim.dropout.adversarial import Adversarial
from fastagg_sim.experiments._adversarial import BASELINES, BYZANTINE, MIFA, VARIANTS
from fastagg_sim.experiments._base import Claim
from fastagg_sim.job_folder import write_atomically
from fastagg_sim.plots import plt
from fastagg_sim.records import Curve, read_curves
from fastagg_sim.results import ResultsFolder
from fastagg_sim.simulation import dropout_process, split_clients

LAST = 10
EPSILON_FILE = "epsilon.csv"
_COLORS = {
    "FedAvg": "#0072B2",
    "FedProx": "#56B4E9",
    "MIFA": "#009E73",
    "GM": "#0072B2",
    "cclip": "#56B4E9",
    "bucketing GM": "#009E73",
    "bucketing cclip": "#CC79A7",
    "FedAvg variant": "#D55E00",
    "FedProx variant": "#000000",
}
_BYZANTINE_LEGEND = (*BYZANTINE, *VARIANTS)


class Lines:
    """The curves of one experiment by method, all seeds, from both of its folders."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.curves: dict[str, list[Curve]] = {}
        for curve in curves:
            self.curves.setdefault(curve.method, []).append(curve)

    @staticmethod
    def read(folders: Mapping[str, Path]) -> Lines:
        parts = [folders[part] / "metrics.csv" for part in ("baselines", "byzantine")]
        return Lines([curve for part in parts for curve in read_curves(part)])

    def accuracy(self, method: str) -> float:
        """Test accuracy, mean over seeds and the last evaluations."""
        return fmean(curve.last(LAST) for curve in self.curves[method])

    def loss(self, method: str) -> float:
        """Training loss, mean over seeds and the last evaluations."""
        return fmean(fmean(curve.train_loss[-LAST:]) for curve in self.curves[method])

    def noise(self, method: str, of: str = "accuracy") -> float:
        """Deviation of the change from one evaluation to the next in the second half of the run,
        mean over seeds; `of`: accuracy or train_loss."""
        return fmean(_noise(getattr(curve, of)) for curve in self.curves[method])


def _noise(values: Sequence[float]) -> float:
    half = values[len(values) // 2 :]
    return pstdev([after - before for before, after in pairwise(half)]) if len(half) > 2 else 0.0


# --- epsilon_t ------------------------------------------------------------------------------


def write_epsilon(folder: Path) -> Path:
    """Write epsilon.csv: per seed and round the fraction of samples that was silenced, and how many
    clients were left. The process is a pure function, so nothing of the runs is needed."""
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


def read_epsilon(folder: Path) -> dict[int, list[tuple[float, int]]]:
    """(epsilon_t, active clients) of every round, by seed."""
    found: dict[int, list[tuple[float, int]]] = {}
    with open(folder / EPSILON_FILE, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(int(row["seed"]), []).append(
                (float(row["epsilon"]), int(row["active"]))
            )
    return found


# --- pictures -------------------------------------------------------------------------------


def draw(folders: Mapping[str, Path], rows: Sequence[Sequence[str]]) -> list[Path]:
    """Write epsilon.csv, baselines.png (a row of panels for each of `rows`, which name methods) and
    byzantine.png."""
    written = [write_epsilon(folders["baselines"])]
    lines = Lines.read(folders)
    epsilon = read_epsilon(folders["baselines"])
    for name, panels in (("baselines", rows), ("byzantine", (_BYZANTINE_LEGEND,))):
        written.append(_figure(lines, epsilon, panels, folders[""] / f"{name}.png"))
    return written


def _figure(
    lines: Lines,
    epsilon: Mapping[int, Sequence[tuple[float, int]]],
    rows: Sequence[Sequence[str]],
    target: Path,
) -> Path:
    """Training loss and test accuracy over rounds, a row for each of `rows`, and epsilon_t below:
    means over seeds, with a band from the lowest to the highest."""
    count = len(rows) + 1
    figure, panels = plt.subplots(
        count, 2, figsize=(9.5, 2.6 * count), sharex=True, squeeze=False, layout="constrained"
    )
    for row, methods in zip(panels, rows, strict=False):
        for method in methods:
            curves = lines.curves[method]
            color = _COLORS[method]
            _band(row[0], curves, lambda curve: curve.train_loss, color, method)
            _band(row[1], curves, lambda curve: curve.accuracy, color, method)
        row[0].set_ylabel("train loss")
        row[1].set_ylabel("test accuracy")
        row[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    rounds = range(1, min(map(len, epsilon.values())) + 1)
    for panel in panels[-1]:
        for seed, values in epsilon.items():
            fractions = [fraction for fraction, _ in values]
            panel.plot(rounds, fractions, ".", markersize=2, label=f"seed {seed}")
        panel.set_ylim(-0.02, 1.02)
        panel.set_ylabel("$\\epsilon_t$")
        panel.set_xlabel("round")
    for panel in panels.ravel():
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=150)
    plt.close(figure)
    return target


def _band(
    panel: Axes,
    curves: Sequence[Curve],
    values: Callable[[Curve], Sequence[float]],
    color: str,
    label: str,
) -> None:
    x = [t + 1 for t in curves[0].rounds]
    seeds = list(zip(*(values(curve) for curve in curves), strict=True))
    panel.plot(x, [fmean(v) for v in seeds], color=color, linewidth=1.2, label=label)
    if len(curves) > 1:
        low, high = [min(v) for v in seeds], [max(v) for v in seeds]
        panel.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


# --- claims ---------------------------------------------------------------------------------


def budget_claims(folder: Path, epsilon: float, strict: bool) -> list[Claim]:
    """Assumption 2 and, for clients of equal size, the published row of epsilon_t."""
    seen = [values for seed in read_epsilon(folder).values() for values in seed]
    fractions = [fraction for fraction, _ in seen]
    numbers = {
        "mean": round(fmean(fractions), 4),
        "largest": round(max(fractions), 4),
        "active clients": f"{fmean(active for _, active in seen):.2f} on average",
    }
    limit = epsilon + (0.1 if strict else 0.0)
    return [
        Claim(f"epsilon_t <= {limit:g} in every round", max(fractions) <= limit + 1e-6, numbers)
    ]


def constant_epsilon_claim(folder: Path, epsilon: float) -> Claim:
    fractions = [f for values in read_epsilon(folder).values() for f, _ in values]
    share = fmean(abs(fraction - epsilon) < 1e-6 for fraction in fractions)
    return Claim(
        f"epsilon_t = {epsilon:g} in every round",
        share == 1.0,
        {"rounds with it": f"{100 * share:.1f} %", "mean": round(fmean(fractions), 4)},
    )


def above(lines: Lines, text: str, upper: Sequence[str], lower: Sequence[str]) -> Claim:
    """Each of `upper` has a higher accuracy at the end than each of `lower`."""
    values = {method: round(lines.accuracy(method), 4) for method in (*upper, *lower)}
    passed = min(values[m] for m in upper) > max(values[m] for m in lower)
    return Claim(f"{text} (accuracy, last {LAST} evaluations)", passed, values)


def alike(lines: Lines, text: str, methods: Sequence[str], tolerance: float = 0.03) -> Claim:
    """The accuracies of `methods` at the end are within `tolerance` of each other."""
    values = {method: round(lines.accuracy(method), 4) for method in methods}
    passed = max(values.values()) - min(values.values()) <= tolerance
    return Claim(f"{text} (within {tolerance:g}, last {LAST} evaluations)", passed, values)


def smoother(lines: Lines, calm: str, noisy: str, of: str = "accuracy") -> Claim:
    """`calm` changes less from one evaluation to the next than `noisy`."""
    values = {method: round(lines.noise(method, of), 5) for method in (calm, noisy)}
    name = of.replace("_", " ")
    text = f"{calm} progresses more smoothly than {noisy} ({name}, deviation of changes)"
    return Claim(text, values[calm] < values[noisy], values)


def naive_pairs() -> list[tuple[str, str]]:
    """(variant, the naive method it is of)."""
    return [(variant, variant.removesuffix(" variant")) for variant in VARIANTS]


def synthetic_claims(
    folders: Mapping[str, Path], epsilon: float, as_released: bool
) -> Sequence[Claim]:
    """Appendix E.2, figures 9 to 12."""
    lines = Lines.read(folders)
    found = budget_claims(folders["baselines"], epsilon, as_released)
    for variant, naive in naive_pairs():
        losses = {method: round(lines.loss(method), 4) for method in (variant, naive)}
        text = f"{variant} has a lower train loss than {naive} (last {LAST} evaluations)"
        found.append(Claim(text, losses[variant] < losses[naive], losses))
        found.append(smoother(lines, variant, naive, "train_loss"))
    found.append(
        alike(lines, "test accuracies of all but MIFA alike", [m for m in BASELINES if m != MIFA])
    )
    for method in (MIFA, *BYZANTINE):
        found += [smoother(lines, variant, method, "train_loss") for variant in VARIANTS]
    return found

# SPDX-License-Identifier: Apache-2.0
"""Su et al., figure 1 b: centred clipping at the paper's threshold and at one that clips.

The paper's threshold is tau = 10 / (1 - 0.9) = 100. On CIFAR-10 the clients' momenta are at most 56
long, so nothing is ever clipped: "cclip" and "bucketing cclip" are both the weighted mean, and a
comparison with them says nothing about clipping. This experiment repeats the two methods with a
threshold that most momenta exceed, and records the lengths of momenta in norms.csv.

All other settings are those of `adversarial-fig1`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from fastagg_sim.config import Config, Method
from fastagg_sim.experiments import _adversarial, _figures
from fastagg_sim.experiments._adversarial import (
    BUCKETING_CCLIP,
    CCLIP,
    CLIPPING,
    AdversarialOptions,
)
from fastagg_sim.experiments._adversarial_results import above, lower
from fastagg_sim.experiments._base import Claim, Expected, Experiment
from fastagg_sim.experiments._curves import Curves
from fastagg_sim.experiments._statistics import CHANGE

CSV = "norms.csv"
EVERY = 20  # rounds between two that record norms


@dataclass(frozen=True)
class ClippingOptions(AdversarialOptions):
    """Centred clipping on CIFAR-10 at several thresholds."""

    seeds: tuple[int, ...] = (0,)
    """Seeds; the experiment is repeated once per seed."""
    eval_every: int = 15
    """Evaluate the global model every this many rounds."""
    tau: tuple[float, ...] = (CLIPPING["tau"], 1.0)
    """Thresholds: the paper's first, then those to compare with it."""


def label(method: str, tau: float) -> str:
    return f"{method} {tau:g}"


def at(method: Method, tau: float) -> Method:
    """Return `method` with another threshold."""
    options = dict(method.options)
    if "rule_options" in options:
        options["rule_options"] = {**options["rule_options"], "tau": tau}
    else:
        options["tau"] = tau
    return replace(method, label=label(method.label, tau), options=options)


def configs(options: ClippingOptions) -> Mapping[str, Config]:
    config = _adversarial.cifar("adversarial-clipping", options, quick_rounds=200)["byzantine"]
    clipping = [method for method in config.methods if method.label in (CCLIP, BUCKETING_CCLIP)]
    return {
        "": replace(
            config,
            name="adversarial-clipping",
            task=replace(config.task, norm_rounds=tuple(range(0, config.task.rounds, EVERY))),
            methods=tuple(at(method, tau) for tau in options.tau for method in clipping),
        )
    }


def prepare(folders: Mapping[str, Path], options: ClippingOptions) -> Sequence[Path]:
    """Write norms.csv: the length of the momentum of each active client in every 20th round."""
    from fastagg_sim.job_folder import write_atomically
    from fastagg_sim.results import ResultsFolder

    lines = ["method,seed,round,client,norm"]
    for folder in ResultsFolder.read(folders[""]).job_folders():
        rows = (folder.path / CSV).read_text(encoding="utf-8").splitlines()[1:]
        lines += [f"{folder.job.method.label},{folder.job.seed},{row}" for row in rows]
    path = folders[""] / CSV
    write_atomically(path, "\n".join(lines) + "\n")
    return [path]


def read_norms(path: Path) -> dict[str, list[float]]:
    """Return the recorded lengths of momenta, by method."""
    found: dict[str, list[float]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["method"], []).append(float(row["norm"]))
    return found


def equal_evaluations(lines: Curves, method: str, other: str) -> tuple[int, int]:
    """Return the number of evaluations with equal accuracy and loss, and the number of all."""
    pairs = [
        (a, b)
        for one, two in zip(lines.curves[method], lines.curves[other], strict=True)
        for a, b in zip(
            zip(one.accuracy, one.train_loss, strict=True),
            zip(two.accuracy, two.train_loss, strict=True),
            strict=True,
        )
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def claims(folders: Mapping[str, Path], options: ClippingOptions) -> Sequence[Claim]:
    from fastagg_sim.records import read_curves

    lines = Curves(read_curves(folders[""] / "metrics.csv"))
    norms = read_norms(folders[""] / CSV)
    found = []
    for tau in options.tau:
        plain, buckets = label(CCLIP, tau), label(BUCKETING_CCLIP, tau)
        lengths = norms[plain] + norms[buckets]
        longer = sum(length > tau for length in lengths) / len(lengths)
        equal, count = equal_evaluations(lines, plain, buckets)
        numbers = {
            "longer": f"{100 * longer:.1f} %",
            "median": round(median(lengths), 2),
            "longest": round(max(lengths), 2),
            "equal with and without buckets": f"{equal} of {count} evaluations",
        }
        if tau == options.tau[0]:
            text = f"tau = {tau:g}: no momentum is longer, and buckets make no difference"
            found.append(Claim.counted(text, not longer and equal == count, numbers))
        else:
            text = f"tau = {tau:g}: more than half of the momenta are longer"
            found.append(Claim.counted(text, longer > 0.5, numbers))
    for tau in options.tau[1:]:
        for method in (CCLIP, BUCKETING_CCLIP):
            clipped, other = label(method, tau), label(method, options.tau[0])
            found.append(above(lines, f"{clipped} above {other}", [clipped], [other]))
            text = f"{clipped} progresses more smoothly than {other}"
            found.append(lower(lines, text, clipped, other, CHANGE))
    return found


def draw(folders: Mapping[str, Path], options: ClippingOptions, path: Path) -> Path:
    from fastagg_sim.records import read_curves

    lines = Curves(read_curves(folders[""] / "metrics.csv"))
    accuracy = {name: _figures.over_rounds(curves) for name, curves in lines.curves.items()}
    loss = {
        name: [([r + 1 for r in curve.rounds], curve.train_loss) for curve in curves]
        for name, curves in lines.curves.items()
    }
    plots = [
        _figures.Plot("accuracy", accuracy),
        _figures.Plot("training loss", loss, ylabel="Train Loss"),
    ]
    return _figures.draw(plots, path)


EXPERIMENT = Experiment(
    name="adversarial-clipping",
    title="CIFAR-10, centred clipping at two thresholds, budget 0.8",
    options=ClippingOptions,
    configs=configs,
    claims=claims,
    prepare=prepare,
    draw=draw,
    expected=Expected(cpu=8, quick=1),
    paper="Su et al.",
    figure="1 b",
)

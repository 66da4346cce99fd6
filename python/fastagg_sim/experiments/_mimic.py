# SPDX-License-Identifier: Apache-2.0
"""Common parts of the MimiC experiments: options, methods, tasks, figures and tables.

The paper compares methods "after 200 model uploadings" and does not say what it counts. Its value
for FedAvg without dropout is 76.82 %. If the uploads of all clients are counted, 200 uploads are
seven rounds of 30 clients, and the accuracy is 62 %. If each round, or each client's uploads, are
counted, they are 200 rounds, and it is 76.6 %. With dropout neither reading gives the published
values. `MimicOptions.count` has these readings; the default is rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from fastagg_sim.config import Config, ConfigError, Dropout, LocalTraining, Method, Task
from fastagg_sim.experiments import _figures
from fastagg_sim.experiments._base import Claim, Expected, Experiment, Options
from fastagg_sim.experiments._curves import Curves, compare
from fastagg_sim.experiments._statistics import (
    UPLOADS_AREA,
    UPLOADS_CHANGE,
    UPLOADS_END,
    UPLOADS_FINAL,
    contrast,
)
from fastagg_sim.records import read_curves
from fastagg_sim.tables import Grid
from fastagg_sim.verdicts import Statement

PAPER = "MimiC"
NUM_CLIENTS = 30
LABELS = ("FedAvg", "FedProx", "SCAFFOLD", "MIFA", "MimiC")
OTHERS = ("FedAvg", "FedProx", "SCAFFOLD")  # the methods without memory of updates
REFERENCE = "FedAvg without dropout"
QUICK_SAMPLES = 200


@dataclass(frozen=True)
class MimicOptions(Options):
    """Options of the MimiC experiments."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; the experiment is repeated once per seed. For a seed all methods have the same data,
    initial model, batches and dropout, so they are compared in pairs."""
    mu: float = 0.1
    """Weight of FedProx's proximal term; the paper does not state it."""
    count: Literal["rounds", "clients", "total"] = "rounds"
    """What "200 model uploadings" counts. rounds: 200 rounds. clients: 200 uploads per client on
    average. total: 200 uploads of all clients together. A client sends two uploads per round with
    SCAFFOLD and one with all other methods. Without dropout, rounds and clients are the same; with
    dropout they end close to each other, since the learning rate falls by 5 % per round and is
    below 1 % of its first value after 90 rounds (results/README.md: 0.2 points with half of the
    clients). With --quick it is always total."""
    as_released: bool = False
    """Availability and units as in the released code: intervals |N(0, 3^2)| instead of
    U[0, tau_max], five levels of static probabilities instead of one, and corrections and stale
    updates that are applied at the learning rate of their own round instead of the current one."""


@dataclass(frozen=True)
class CifarMimicOptions(MimicOptions):
    """Options of the MimiC experiments on CIFAR-10."""

    model: str = "vgg11"
    """Model: vgg11 (as in the paper; 400 updates of clients take about 5 hours on one core), or
    lenet."""


def methods(options: MimicOptions, training: LocalTraining) -> tuple[Method, ...]:
    """Return the five methods, in the order of the paper's tables.

    All clients are active in the first round, as the paper's analysis assumes and as its released
    code does for all methods. Updates of clients whose training diverges are left out: a method
    that fails then ends with a useless model, which is a result, and not with an error.
    """
    units = not options.as_released
    prox = replace(training, prox=options.mu)
    common: dict[str, Any] = {"options": {"nonfinite": "drop"}, "full_first_round": True}
    return (
        Method("FedAvg", "fedavg", **common),
        Method("FedProx", "fedavg", training=prox, **common),
        Method("SCAFFOLD", "scaffold", **common),
        Method("MIFA", "mifa", gradient_units=units, **common),
        Method("MimiC", "mimic", gradient_units=units, **common),
    )


def fmnist(options: MimicOptions, uploads: int | None, rounds: int | None = None) -> Task:
    """Section 7.1: 2 classes and 2000 samples per client, batches of 16, lr 0.01 * 0.95^t.

    The number 5 is the number of local epochs in table 2, but the number of local steps in
    Algorithm 1. We use epochs and sums of gradients, as the released code does; with steps,
    Fashion-MNIST is not learned.

    With `--quick`: 200 samples per client and a learning rate of 0.05.
    """
    training = LocalTraining(batch_size=16, local_epochs=5, lr=0.01, lr_decay=0.95)
    return _task(options, "fmnist", "niid-cnn", training, 2, uploads, rounds)


def cifar(options: CifarMimicOptions, uploads: int, classes: int = 2) -> Task:
    """As `fmnist`, but with 1666 samples per client, batches of 32, and lr 0.01 * 0.99^t.

    The released code also crops and flips images at random; we do not. With `--quick`: LeNet, 200
    samples per client, a learning rate of 0.05, and an evaluation every third round.
    """
    model = "lenet" if options.quick else options.model
    training = LocalTraining(batch_size=32, local_epochs=5, lr=0.01, lr_decay=0.99)
    task = _task(options, "cifar10", model, training, classes, uploads, None)
    return replace(task, eval_every=max(options.eval_every, 3)) if options.quick else task


def _task(
    options: MimicOptions,
    dataset: str,
    model: str,
    training: LocalTraining,
    classes: int,
    uploads: int | None,
    rounds: int | None,
) -> Task:
    partition: dict[str, Any] = {"classes_per_client": classes}
    if options.quick:
        partition["shard_size"] = QUICK_SAMPLES // max(1, classes)  # fewer classes are refused
        training = replace(training, lr=0.05)
    limit = None if options.count == "rounds" and not options.quick else uploads
    if limit is not None and options.count == "clients" and not options.quick:
        limit *= NUM_CLIENTS
    if options.rounds is not None:
        rounds = options.rounds
    elif rounds is None:
        # Rounds without active clients cost no uploads, so the limit on the number of rounds is far
        # above the number usually needed.
        rounds = (uploads or 0) if limit is None else 2 * limit
    return Task(
        dataset=dataset,
        partition="label-limited",
        model=model,
        training=training,
        rounds=rounds,
        num_clients=NUM_CLIENTS,
        partition_options=partition,
        eval_every=options.eval_every,
        max_uploads=limit,
    )


def round_robin(options: MimicOptions, tau_max: int) -> Dropout:
    sampling = {"sampling": "half-normal"} if options.as_released else {}
    return Dropout("round-robin", {"tau_max": tau_max, **sampling})


def static(options: MimicOptions, p: float) -> Dropout:
    return Dropout("bernoulli", {"p": p, **({"levels": 5} if options.as_released else {})})


def time_varying(options: MimicOptions, fraction: float) -> Dropout:
    return Dropout("time-varying", {"fraction": fraction})


@dataclass(frozen=True)
class Setting:
    """A task with one dropout setting: a column of a table, or a panel of a figure.

    column: the name of the column or panel.
    folder: the subfolder of its results; "" for the results folder of the experiment itself.
    published: the accuracy in percent by method, if the paper has a table.
    """

    column: str
    task: Task
    dropout: Dropout
    folder: str = ""
    published: Mapping[str, float] | None = None


class Results(Curves):
    """The curves of one setting, in percent."""

    digits = 2

    def __init__(self, setting: Setting, folder: Path) -> None:
        super().__init__(read_curves(folder / "metrics.csv"), setting.dropout.label)
        self.setting = setting

    def finals(self, method: str) -> list[float]:
        """Return the accuracy in percent at the end, for every seed."""
        return [UPLOADS_FINAL.of([curve]) for curve in self.curves[method]]

    def tails(self, method: str) -> list[float]:
        """Return the mean accuracy in percent over the last fifth of the uploads, for every
        seed."""
        return [UPLOADS_END.of([curve]) for curve in self.curves[method]]


def best(name: str, results: Results) -> list[Claim]:
    """Claim, for every other method: MimiC has a higher accuracy near the end.

    name: the setting, for the text of the claims.
    """
    return [
        compare(f"{name}: MimiC above {other}", results, "MimiC", other, UPLOADS_END, low=0)
        for other in results.curves
        if other not in ("MimiC", REFERENCE)
    ]


def all_change(
    text: str, first: Results, last: Results, labels: Sequence[str] = LABELS, sign: int = 1
) -> Claim:
    """Claim: every method is better at the end in `last` than in `first`; with sign = -1, worse."""
    estimates = {
        label: contrast([(1, last.curves[label]), (-1, first.curves[label])], UPLOADS_END)
        for label in labels
    }
    low, high = (0.0, math.inf) if sign > 0 else (-math.inf, 0.0)
    statements = [Statement(label, e, low, high) for label, e in estimates.items()]
    return Claim.about(f"{text} ({UPLOADS_END.text})", statements)


def check_ascending(option: str, values: Sequence[float]) -> None:
    """Raise ConfigError unless the values of `option` ascend.

    Claims compare the first with the last, or neighbours, and lines are drawn from left to right.
    """
    if list(values) != sorted(values):
        shown = " ".join(map(str, values))
        raise ConfigError(f"--{option}: expected ascending values, got {shown}")


def ends(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the first and the last of a list of settings, for `--quick`; one if it has only
    one."""
    return tuple(values) if len(values) < 2 else (values[0], values[-1])


def curve_claims(name: str, results: Results) -> list[Claim]:
    """The claims of section 7.2 about figures 4, 5, 7 and 8."""
    return [
        *best(name, results),
        Claim.about(
            f"{name}: MimiC converges fastest ({UPLOADS_AREA.text})",
            results.differences(
                [("MimiC", other) for other in LABELS if other != "MimiC"], UPLOADS_AREA, low=0
            ),
            results.levels(LABELS, UPLOADS_AREA),
        ),
        *(
            Claim.about(
                f"{name}: {label} fluctuates less than FedAvg, FedProx and SCAFFOLD "
                f"({UPLOADS_CHANGE.text})",
                results.differences([(label, other) for other in OTHERS], UPLOADS_CHANGE, high=0),
                results.levels((label, *OTHERS), UPLOADS_CHANGE),
            )
            for label in ("MIFA", "MimiC")
        ),
    ]


def table(title: str, columns: Sequence[Results]) -> Grid:
    """Return a table with one row per method.

    For each setting it has three columns: the accuracy in percent at the end (mean and deviation
    over seeds), the mean over the last fifth of the uploads, and the paper's number.
    """
    names = ["method"]
    for results in columns:
        names += [results.setting.column, "tail", "paper"]
    rows = []
    for label in columns[0].curves:
        cells = [label]
        for results in columns:
            published = (results.setting.published or {}).get(label)
            cells += [
                _spread(results.finals(label)),
                f"{fmean(results.tails(label)):.2f}",
                "" if published is None else f"{published:.2f}",
            ]
        rows.append(tuple(cells))
    note = (
        "test accuracy in % after the last upload (mean ± deviation over seeds); tail: mean over "
        "the last fifth of the uploads; paper: as published"
    )
    return Grid(title, tuple(names), rows, note)


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


Settings = Callable[[Any], Sequence[Setting]]


def _at_the_end(results: Results) -> dict[str, _figures.Line]:
    """Return the accuracies of the paper's table, known at the end only, as short level lines."""
    lines: dict[str, _figures.Line] = {}
    for method, accuracy in (results.setting.published or {}).items():
        end = float(max(x[-1] for x, _ in _over(results, method)))
        lines[method] = (0.85 * end, end), (accuracy, accuracy)
    return lines


def _counts_rounds(results: Results) -> bool:
    """Return whether the runs end after a number of rounds, not of uploads."""
    return results.setting.task.max_uploads is None


def _over(results: Results, method: str) -> list[_figures.Line]:
    """Return, for every seed, the accuracy in percent over what ends the runs."""
    curves = results.curves[method]
    if not _counts_rounds(results):
        return _figures.over_uploads(curves)
    return [(x, [100 * a for a in y]) for x, y in _figures.over_rounds(curves)]


def mimic_experiment(
    name: str,
    title: str,
    figure: str,
    options: type[MimicOptions],
    settings: Settings,
    claims: Callable[[Sequence[Results], Any], Sequence[Claim]],
    expected: Expected,
    *,
    labels: Sequence[str] = LABELS,
    reference: bool = False,
) -> Experiment:
    """Create an experiment with a table and a figure of accuracy over uploads, or over rounds if
    these are counted.

    settings: `settings(options)` returns the columns of the table, which are also the panels of the
        figure.
    claims: `claims(results of the settings, options)` checks the claims.
    labels: the methods to run.
    reference: also run FedAvg without dropout.

    For the other arguments see `Experiment`.
    """

    def configs(chosen: MimicOptions) -> Mapping[str, Config]:
        found: dict[str, Config] = {}
        for setting in settings(chosen):
            before = found.get(setting.folder)
            training = setting.task.training
            compared = tuple(m for m in methods(chosen, training) if m.label in labels)
            full = Method(REFERENCE, "fedavg", full_participation=True)
            found[setting.folder] = Config(
                name=f"{name} {setting.folder}".strip(),
                task=setting.task,
                methods=(*compared, full) if reference else compared,
                dropouts=(*(before.dropouts if before else ()), setting.dropout),
                seeds=chosen.chosen_seeds(),
            )
        return found

    def read(folders: Mapping[str, Path], chosen: MimicOptions) -> list[Results]:
        return [Results(setting, folders[setting.folder]) for setting in settings(chosen)]

    def draw(folders: Mapping[str, Path], chosen: MimicOptions, path: Path) -> Path:
        plots, columns = [], read(folders, chosen)
        for results in columns:
            lines = {method: _over(results, method) for method in results.curves}
            plots.append(
                _figures.Plot(
                    results.setting.column,
                    lines,
                    ylabel="Test Accuracy (%)",
                    published=_at_the_end(results),
                )
            )
        counted = "Rounds" if _counts_rounds(columns[0]) else "Model Uploadings"
        return _figures.draw(plots, path, xlabel=f"Number of {counted}")

    return Experiment(
        name=name,
        title=title,
        options=options,
        configs=configs,
        claims=lambda folders, chosen: claims(read(folders, chosen), chosen),
        paper=PAPER,
        figure=figure,
        expected=expected,
        draw=draw,
        table=lambda folders, chosen: table(f"{name}: {title}", read(folders, chosen)),
    )


def curve_experiment(
    name: str,
    title: str,
    figure: str,
    options: type[MimicOptions],
    setting: Callable[[Any], Setting],
    expected: Expected,
) -> Experiment:
    """Create an experiment whose figure is one panel with five curves."""

    def claims(columns: Sequence[Results], chosen: MimicOptions) -> Sequence[Claim]:
        return curve_claims(columns[0].setting.column, columns[0])

    return mimic_experiment(
        name, title, figure, options, lambda chosen: [setting(chosen)], claims, expected
    )

# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS, conference version ("Friends to Help"), figure 2: three tasks at two dropout ratios.

Clustered MNIST, clustered CIFAR-10, and CIFAR-10 in the general setting, in which clients have no
groups. The settings are those of figures 1 and 2 of the journal version; this paper states the same
E and learning rates, and no batch size or number of rounds.

The paper says of the clustered tasks what the journal version says. Of the general one it says that
FDMS is the best method with dropout, and that it gains less there than with groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fastagg_sim.experiments._base import Claim, Expected
from fastagg_sim.experiments._fdms import (
    FdmsOptions,
    Part,
    cifar_clustered,
    cifar_general,
    fdms_experiment,
    mnist_clustered,
)
from fastagg_sim.experiments._panel import (
    Panel,
    across_alphas,
    comparison_claims,
    faster,
    gain_larger,
    not_below,
)

MNIST, CIFAR, GENERAL = "MNIST", "CIFAR-10", "CIFAR-10, general"


@dataclass(frozen=True)
class ConferenceOptions(FdmsOptions):
    """Figure 2 of the conference version of FL-FDMS: three tasks."""

    alphas: tuple[float, ...] = (0.5, 0.7)
    """Dropout ratios; --quick uses one of them."""


def title(task: str, alpha: str = "{alpha}") -> str:
    """Return the title of a panel, by default with a placeholder for the dropout ratio."""
    return f"{task} (alpha={alpha})"


def parts(options: ConferenceOptions) -> Sequence[Part]:
    alphas = options.chosen_alphas(quick=0.7)
    rounds = options.chosen_rounds
    mnist = mnist_clustered(options, rounds(100, quick=20))
    cifar = cifar_clustered(options, rounds(500, quick=20))
    general = cifar_general(options, rounds(500, quick=30))
    return [
        Part("mnist", mnist, alphas, title(MNIST), (0.5, 1.0)),
        Part("cifar10", cifar, alphas, title(CIFAR), (0.1, 0.5)),
        Part("general", general, alphas, title(GENERAL), (0.1, 0.55), uniform=True),
    ]


def claims(panels: Mapping[str, Panel], options: ConferenceOptions) -> Sequence[Claim]:
    alphas = options.chosen_alphas(quick=0.7)
    of = {
        task: {alpha: panels[title(task, f"{alpha:g}")] for alpha in alphas}
        for task in (MNIST, CIFAR, GENERAL)
    }
    found: list[Claim] = []
    for task in (MNIST, CIFAR):
        for alpha, panel in of[task].items():
            found += comparison_claims(title(task, f"{alpha:g}"), panel)
        found += [replace(c, text=f"{task}: {c.text}") for c in across_alphas(of[task])]
    for alpha, panel in of[GENERAL].items():
        name = title(GENERAL, f"{alpha:g}")
        found += [
            not_below(name, panel, "FDMS", "Dropout"),
            faster(name, panel, "FDMS", "Dropout"),
            faster(name, panel, "FDMS", "Stale"),
        ]
        grouped = of[CIFAR][alpha]
        text = f"alpha={alpha:g}: FDMS gains more over Dropout with groups"
        names = ("with groups", "general")
        found.append(gain_larger(text, names, (grouped, panel), "FDMS", "Dropout"))
    return found


EXPERIMENT = fdms_experiment(
    name="friends-fig2",
    title="MNIST and CIFAR-10, clustered, and CIFAR-10 in the general setting",
    figure="2",
    options=ConferenceOptions,
    parts=parts,
    claims=claims,
    expected=Expected(cpu=75, quick=4),  # from the times of figures 1 and 2 of the journal version
    paper="FL-FDMS, conference",
    columns=2,
)

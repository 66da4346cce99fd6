# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS, figure 6: one and five local epochs on clustered MNIST and CIFAR-10.

alpha = 0.5; the other settings are those of figure 1. The paper says that FDMS remains the best,
and that the advantage of Stale over Dropout grows with the number of local epochs. In its curves
for CIFAR-10 with five epochs Stale has caught up with FDMS at the end, so FDMS and Stale are
compared over the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastagg_sim.experiments._base import Claim, Expected
from fastagg_sim.experiments._fdms import (
    FdmsOptions,
    Part,
    cifar_clustered,
    fdms_experiment,
    mnist_clustered,
)
from fastagg_sim.experiments._panel import (
    Panel,
    faster,
    gain_larger,
    not_below,
    published_claims,
)
from fastagg_sim.experiments._published import CIFAR_ONE_EPOCH

EPOCHS = (1, 5)


@dataclass(frozen=True)
class EpochsOptions(FdmsOptions):
    """Figure 6 of the FL-FDMS paper: numbers of local epochs."""

    alphas: tuple[float, ...] = (0.5,)
    """Dropout ratio; only the first one is used."""


def parts(options: EpochsOptions) -> Sequence[Part]:
    alpha = options.alphas[:1]
    mnist = [
        Part(
            f"mnist-{epochs}",
            mnist_clustered(options, options.chosen_rounds(100, quick=30 // epochs), epochs=epochs),
            alpha,
            f"MNIST (E={epochs})",
            (0.5, 1.0),
        )
        for epochs in EPOCHS
    ]
    cifar = [
        Part(
            f"cifar10-{epochs}",
            cifar_clustered(options, options.chosen_rounds(500, quick=25 // epochs), epochs=epochs),
            alpha,
            f"CIFAR-10 (E={epochs})",
            (0.1, 0.5),
            published={0.5: CIFAR_ONE_EPOCH} if epochs == 1 else {},
        )
        for epochs in EPOCHS
    ]
    return [*mnist, *cifar]


def claims(panels: Mapping[str, Panel], options: EpochsOptions) -> Sequence[Claim]:
    found = []
    for name, panel in panels.items():
        found += [
            not_below(name, panel, "FDMS", "Dropout"),
            faster(name, panel, "FDMS", "Dropout"),
            faster(name, panel, "FDMS", "Stale"),
        ]
    for dataset in ("MNIST", "CIFAR-10"):
        one, five = (panels[f"{dataset} (E={epochs})"] for epochs in EPOCHS)
        text = f"{dataset}: Stale gains on Dropout from E=1 to E=5"
        found.append(gain_larger(text, ("E=5", "E=1"), (five, one), "Stale", "Dropout"))
    if options.alphas[0] == 0.5:
        found += published_claims("CIFAR-10 (E=1)", panels["CIFAR-10 (E=1)"], CIFAR_ONE_EPOCH)
    return found


EXPERIMENT = fdms_experiment(
    name="fdms-fig6",
    title="MNIST and CIFAR-10, clustered, one and five local epochs",
    figure="6",
    options=EpochsOptions,
    parts=parts,
    claims=claims,
    expected=Expected(cpu=100, quick=3),
    columns=2,
)

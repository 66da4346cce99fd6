# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS, figure 7: 40 clients on clustered MNIST and CIFAR-10.

Twice as many clients as in figure 1, with half as many samples each, at alpha = 0.5. The paper says
that the lead of FDMS over Dropout and Stale grows with the number of clients. The experiment
therefore also runs 20 clients, without Full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastagg_sim.experiments._base import Claim, Expected
from fastagg_sim.experiments._fdms import (
    LABELS,
    FdmsOptions,
    Part,
    cifar_clustered,
    fdms_experiment,
    mnist_clustered,
)
from fastagg_sim.experiments._panel import Panel, comparison_claims, gain_larger

CLIENTS = (40, 20)


@dataclass(frozen=True)
class ClientsOptions(FdmsOptions):
    """Figure 7 of the FL-FDMS paper: 40 clients."""

    alphas: tuple[float, ...] = (0.5,)
    """Dropout ratio; only the first one is used."""


def parts(options: ClientsOptions) -> Sequence[Part]:
    alpha = options.alphas[:1]
    mnist = options.chosen_rounds(100, quick=30)
    cifar = options.chosen_rounds(500, quick=20)
    found = []
    for clients in CLIENTS:
        labels = LABELS if clients == 40 else LABELS[1:]
        for name, task, ylim in (
            ("MNIST", mnist_clustered(options, mnist, num_clients=clients), (0.5, 1.0)),
            ("CIFAR-10", cifar_clustered(options, cifar, num_clients=clients), (0.1, 0.5)),
        ):
            folder, title = f"{task.dataset}-{clients}", f"{name} (K={clients})"
            found.append(Part(folder, task, alpha, title, ylim, labels=labels))
    return found


def claims(panels: Mapping[str, Panel], options: ClientsOptions) -> Sequence[Claim]:
    found = []
    for dataset in ("MNIST", "CIFAR-10"):
        name = f"{dataset} (K=40)"
        found += comparison_claims(name, panels[name])
        for other in ("Dropout", "Stale"):
            more, fewer = (panels[f"{dataset} (K={clients})"] for clients in CLIENTS)
            text = f"{dataset}: the lead of FDMS over {other} grows with K"
            found.append(gain_larger(text, ("K=40", "K=20"), (more, fewer), "FDMS", other))
    return found


EXPERIMENT = fdms_experiment(
    name="fdms-fig7",
    title="MNIST and CIFAR-10, clustered, 40 clients",
    figure="7",
    options=ClientsOptions,
    parts=parts,
    claims=claims,
    expected=Expected(cpu=60, quick=3),
    columns=2,
)

# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS, figure 8: FedAvg against FedProx (mu = 0.2) on clustered CIFAR-10 at alpha = 0.5.

The four methods with plain local training, as in figure 1 e, and with FedProx's proximal term. The
paper says that FDMS remains the best of the three methods with dropout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastagg_sim.experiments._base import Claim, Expected
from fastagg_sim.experiments._fdms import FdmsOptions, Part, cifar_clustered, fdms_experiment
from fastagg_sim.experiments._panel import Panel, comparison_claims, published_claims
from fastagg_sim.experiments._published import CIFAR_CLUSTERED, CIFAR_FEDPROX

PUBLISHED = {"FedAvg": CIFAR_CLUSTERED, "FedProx": CIFAR_FEDPROX}


@dataclass(frozen=True)
class ProxOptions(FdmsOptions):
    """Figure 8 of the FL-FDMS paper: FedAvg and FedProx."""

    alphas: tuple[float, ...] = (0.5,)
    """Dropout ratio; only the first one is used."""
    mu: float = 0.2
    """Weight of FedProx's proximal term."""


def parts(options: ProxOptions) -> Sequence[Part]:
    rounds = options.chosen_rounds(500, quick=25)
    return [
        Part(
            name.lower(),
            cifar_clustered(options, rounds, prox=prox),
            options.alphas[:1],
            name,
            (0.1, 0.5),
            published={0.5: PUBLISHED[name]} if prox in (0.0, 0.2) else {},
        )
        for name, prox in (("FedAvg", 0.0), ("FedProx", options.mu))
    ]


def claims(panels: Mapping[str, Panel], options: ProxOptions) -> Sequence[Claim]:
    found = [claim for item in panels.items() for claim in comparison_claims(*item)]
    if options.alphas[0] == 0.5 and options.mu == 0.2:
        for name, published in PUBLISHED.items():
            found += published_claims(name, panels[name], published)
    return found


EXPERIMENT = fdms_experiment(
    name="fdms-fig8",
    title="CIFAR-10, clustered, FedAvg and FedProx",
    figure="8",
    options=ProxOptions,
    parts=parts,
    claims=claims,
    expected=Expected(cpu=60, quick=4),
    columns=2,
)

# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS, figure 9: clustered Fashion-MNIST at three dropout ratios.

The paper states neither the sizes nor the model. We use MNIST's CNN, 500 samples per client,
batches of 200, pixels in [-1, 1] (docs/papers.md has the reasons) and 300 rounds. In the published
curves Dropout is nearly as good as FDMS at every ratio, so the claim is that FDMS is not below
Dropout. Stale is worse than the others, and more so at larger ratios.

With this model and lr = 0.1, training can diverge (for instance Stale at 70 % dropout with seed 0,
in round 235). The updates of clients whose training diverges are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastagg_sim.experiments._base import Claim, Expected
from fastagg_sim.experiments._fdms import FdmsOptions, Part, fashion_clustered, fdms_experiment
from fastagg_sim.experiments._panel import (
    Panel,
    above,
    across_alphas,
    close,
    faster,
    not_below,
    published_claims,
)
from fastagg_sim.experiments._published import FMNIST_03

PUBLISHED = {0.3: FMNIST_03}


@dataclass(frozen=True)
class FashionOptions(FdmsOptions):
    """Figure 9 of the FL-FDMS paper: clustered Fashion-MNIST."""


def parts(options: FashionOptions) -> Sequence[Part]:
    task = fashion_clustered(options, options.chosen_rounds(300, quick=40))
    alphas = options.chosen_alphas(quick=0.7)
    return [
        Part("", task, alphas, "alpha={alpha}", (0.3, 0.9), drop_diverged=True, published=PUBLISHED)
    ]


def claims(panels: Mapping[str, Panel], options: FashionOptions) -> Sequence[Claim]:
    found = []
    for name, panel in panels.items():
        found += [
            not_below(name, panel, "FDMS", "Dropout"),
            above(name, panel, "FDMS", "Stale"),
            faster(name, panel, "FDMS", "Stale"),
            close(name, panel, "FDMS", "Full"),
        ]
    alphas = options.chosen_alphas(quick=0.7)
    # Leave out the first claim across ratios, the gain of FDMS over Dropout: the figure shows none.
    found += across_alphas(dict(zip(alphas, panels.values(), strict=True)))[1:]
    if "alpha=0.3" in panels:
        found += published_claims("alpha=0.3", panels["alpha=0.3"], FMNIST_03)
    return found


EXPERIMENT = fdms_experiment(
    name="fdms-fig9",
    title="Fashion-MNIST, clustered, 20 clients",
    figure="9",
    options=FashionOptions,
    parts=parts,
    claims=claims,
    expected=Expected(cpu=25, quick=2),
)

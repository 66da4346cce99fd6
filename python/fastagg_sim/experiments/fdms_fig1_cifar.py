# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS, figure 1 d-f: clustered CIFAR-10 at three dropout ratios.

20 clients in 5 groups of two labels, 1000 samples each; Full, Dropout, Stale and FDMS over 500
rounds. The paper averages 10 repeats.

The default settings are those of the released code, which reproduce the published curves: batches
of 200, 2 local epochs, server learning rate 1, the first 80 % of each client's samples, pixels
normalised with mean and deviation 0.5, all clients active in round 0 for Stale and FDMS, at least
one active client per group, Stale with the last models. `--as-written` follows the text instead:
batches of 20, 2 iterations, eta = 0.1, all samples, uniform dropout, Stale with the last updates.

The curves at alpha = 0.5 are compared with the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastagg_sim.experiments._base import Claim, Expected
from fastagg_sim.experiments._fdms import FdmsOptions, Part, cifar_clustered, fdms_experiment
from fastagg_sim.experiments._panel import (
    Panel,
    across_alphas,
    comparison_claims,
    published_claims,
)
from fastagg_sim.experiments._published import CIFAR_CLUSTERED

PUBLISHED = {0.5: CIFAR_CLUSTERED}


@dataclass(frozen=True)
class CifarOptions(FdmsOptions):
    """Figure 1 d-f of the FL-FDMS paper: clustered CIFAR-10."""


def parts(options: CifarOptions) -> Sequence[Part]:
    task = cifar_clustered(options, options.chosen_rounds(500, quick=30))
    alphas = options.chosen_alphas(quick=0.5)
    return [Part("", task, alphas, "alpha={alpha}", (0.1, 0.5), published=PUBLISHED)]


def claims(panels: Mapping[str, Panel], options: CifarOptions) -> Sequence[Claim]:
    found = [claim for item in panels.items() for claim in comparison_claims(*item)]
    alphas = options.chosen_alphas(quick=0.5)
    found += across_alphas(dict(zip(alphas, panels.values(), strict=True)))
    if "alpha=0.5" in panels:
        found += published_claims("alpha=0.5", panels["alpha=0.5"], CIFAR_CLUSTERED)
    return found


EXPERIMENT = fdms_experiment(
    name="fdms-fig1-cifar",
    title="CIFAR-10, clustered, 20 clients",
    figure="1 d-f",
    options=CifarOptions,
    parts=parts,
    claims=claims,
    expected=Expected(cpu=60, quick=3),
)

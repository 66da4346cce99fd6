# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS, figure 2: CIFAR-10 in the general setting at three dropout ratios.

20 clients with two shards of 250 samples each, cut from the training set sorted by label; Full,
Dropout, Stale and FDMS over 500 rounds. The settings are those of figure 1 d-f with two exceptions:
batches of 20, which the published curves need here, and uniform dropout, because the clients have
no groups.

The paper says that FDMS is the best of the three methods with dropout. In its own curves at
alpha = 0.5, however, Stale ends above FDMS (0.502 against 0.498). The claims are therefore that
FDMS is not below Dropout, and that the curves agree with the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastagg_sim.experiments._base import Claim, Expected
from fastagg_sim.experiments._fdms import FdmsOptions, Part, cifar_general, fdms_experiment
from fastagg_sim.experiments._panel import Panel, above, faster, not_below, published_claims
from fastagg_sim.experiments._published import CIFAR_GENERAL

PUBLISHED = {0.5: CIFAR_GENERAL["medium"]}


@dataclass(frozen=True)
class GeneralOptions(FdmsOptions):
    """Figure 2 of the FL-FDMS paper: CIFAR-10, general setting."""


def parts(options: GeneralOptions) -> Sequence[Part]:
    task = cifar_general(options, options.chosen_rounds(500, quick=50))
    alphas = options.chosen_alphas(quick=0.5)
    return [Part("", task, alphas, "alpha={alpha}", (0.1, 0.55), uniform=True, published=PUBLISHED)]


def claims(panels: Mapping[str, Panel], options: GeneralOptions) -> Sequence[Claim]:
    found = []
    for name, panel in panels.items():
        found += [
            not_below(name, panel, "FDMS", "Dropout"),
            above(name, panel, "Full", "FDMS"),
            faster(name, panel, "FDMS", "Dropout"),
            faster(name, panel, "FDMS", "Stale"),
        ]
    if "alpha=0.5" in panels:
        found += published_claims("alpha=0.5", panels["alpha=0.5"], CIFAR_GENERAL["medium"])
    return found


EXPERIMENT = fdms_experiment(
    name="fdms-fig2",
    title="CIFAR-10, general setting (two shards per client)",
    figure="2",
    options=GeneralOptions,
    parts=parts,
    claims=claims,
    expected=Expected(cpu=40, quick=2),
)

# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS, figure 5: CIFAR-10 in the general setting at three levels of heterogeneity.

Each client has 500 samples: five shards of 100 (low), two of 250 (medium) or one of 500 (high).
alpha = 0.5; the other settings are those of figure 2.

The paper says that the gap between FDMS and Full grows with the heterogeneity, and that FDMS still
outperforms both Dropout and Stale. Its own curves show the first statement, but of the second only
that FDMS is not below Dropout: Stale ends above FDMS at the medium level (0.502 against 0.498) and
equal to it at the high level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastagg_sim.experiments._base import Claim, Expected
from fastagg_sim.experiments._fdms import FdmsOptions, Part, cifar_general, fdms_experiment
from fastagg_sim.experiments._panel import Panel, above, not_below, published_claims
from fastagg_sim.experiments._published import CIFAR_GENERAL
from fastagg_sim.experiments._statistics import END, contrast
from fastagg_sim.verdicts import Statement

TITLES = {
    "low": "P:500, S:100, Low",
    "medium": "P:200, S:250, Medium",
    "high": "P:100, S:500, High",
}


@dataclass(frozen=True)
class HeterogeneityOptions(FdmsOptions):
    """Figure 5 of the FL-FDMS paper: three levels of heterogeneity."""

    alphas: tuple[float, ...] = (0.5,)
    """Dropout ratio; only the first one is used."""


def parts(options: HeterogeneityOptions) -> Sequence[Part]:
    rounds = options.chosen_rounds(500, quick=25)
    return [
        Part(
            level,
            cifar_general(options, rounds, level),
            options.alphas[:1],
            title,
            (0.1, 0.5),
            uniform=True,
            published={0.5: CIFAR_GENERAL[level]},
        )
        for level, title in TITLES.items()
    ]


def claims(panels: Mapping[str, Panel], options: HeterogeneityOptions) -> Sequence[Claim]:
    found = [not_below(name, panel, "FDMS", "Dropout") for name, panel in panels.items()]
    losses = {level: panels[title].minus("Full", "FDMS", END) for level, title in TITLES.items()}
    low, high = panels[TITLES["low"]].curves, panels[TITLES["high"]].curves
    terms = [(1, high["Full"]), (-1, high["FDMS"]), (-1, low["Full"]), (1, low["FDMS"])]
    found.append(
        Claim.about(
            "FDMS loses more to Full at the high level of heterogeneity than at the low one "
            f"({END.text})",
            [Statement("difference", contrast(terms, END), low=0)],
            {level: round(loss.value, 4) for level, loss in losses.items()},
        )
    )
    found.append(above(TITLES["low"], panels[TITLES["low"]], "FDMS", "Stale"))
    if options.alphas[0] == 0.5:
        for level, title in TITLES.items():
            found += published_claims(title, panels[title], CIFAR_GENERAL[level])
    return found


EXPERIMENT = fdms_experiment(
    name="fdms-fig5",
    title="CIFAR-10, general setting, low / medium / high heterogeneity",
    figure="5",
    options=HeterogeneityOptions,
    parts=parts,
    claims=claims,
    expected=Expected(cpu=55, quick=3),
)

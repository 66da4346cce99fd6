# SPDX-License-Identifier: Apache-2.0
"""MimiC, table 5: CIFAR-10 after 400 uploads at p = 0.1, with 2, 5, 8 and 10 classes per client.

The paper says that MimiC is always the best, and that with 8 or 10 classes all methods are about
equal. `--model lenet` is small enough for a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastagg_sim.experiments._base import Claim, Expected
from fastagg_sim.experiments._mimic import (
    LABELS,
    CifarMimicOptions,
    Results,
    Setting,
    best,
    check_ascending,
    cifar,
    ends,
    mimic_experiment,
    static,
)
from fastagg_sim.experiments._statistics import UPLOADS_END, contrast
from fastagg_sim.records import Curve
from fastagg_sim.verdicts import Statement

PUBLISHED = {
    2: (30.52, 36.66, 37.75, 50.37, 52.91),
    5: (77.76, 77.74, 78.15, 77.06, 78.44),
    8: (81.59, 81.22, 82.00, 81.84, 82.16),
    10: (82.10, 81.96, 82.74, 82.04, 82.93),
}


@dataclass(frozen=True)
class Table5Options(CifarMimicOptions):
    """Table 5 of the MimiC paper: classes per client."""

    classes: tuple[int, ...] = (2, 5, 8, 10)
    """Classes per client, ascending; --quick only uses the first and the last."""


def settings(options: Table5Options) -> Sequence[Setting]:
    check_ascending("classes", options.classes)
    classes = ends(options.classes) if options.quick else options.classes
    return [
        Setting(
            f"{c} classes",
            cifar(options, 400, c),
            static(options, 0.1),
            folder=f"classes-{c}",
            published=dict(zip(LABELS, PUBLISHED.get(c, ()), strict=False)),
        )
        for c in classes
    ]


def claims(columns: Sequence[Results], options: Table5Options) -> Sequence[Claim]:
    found = [claim for r in columns for claim in best(r.setting.column, r)]
    if len(columns) < 2:
        return found
    first, last = columns[0], columns[-1]
    spreads = {}
    terms: list[tuple[float, Sequence[Curve]]] = []
    for sign, results in ((1.0, first), (-1.0, last)):
        means = results.levels(LABELS, UPLOADS_END)
        high, low = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
        terms += [(sign, results.curves[high]), (-sign, results.curves[low])]
        spreads[results.setting.column] = f"{high} - {low} = {means[high] - means[low]:.2f}"
    text = (
        f"methods differ less with {last.setting.column} per client than with "
        f"{first.setting.column} (highest minus lowest, in points; {UPLOADS_END.text})"
    )
    statement = Statement("difference", contrast(terms, UPLOADS_END), low=0)
    return [*found, Claim.about(text, [statement], spreads)]


EXPERIMENT = mimic_experiment(
    name="mimic-table5",
    title="CIFAR-10 after 400 uploads, classes per client",
    figure="table 5",
    options=Table5Options,
    settings=settings,
    claims=claims,
    expected=Expected(cpu=28800, quick=4, gpu=1800),
)

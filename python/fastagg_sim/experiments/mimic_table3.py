# SPDX-License-Identifier: Apache-2.0
"""MimiC, table 3: Fashion-MNIST after 200 uploads, absences bounded by 20, 50 and 100 rounds.

The paper says that the accuracy of every method falls as the bound grows, that of MIFA and MimiC
the least, and that MimiC is always the best. It also states 76.82 % for FedAvg without dropout
after 200 uploads (section 7.1). This experiment runs that too. `--count` has the readings of "200
uploads".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastagg_sim.experiments._base import Claim, Expected
from fastagg_sim.experiments._mimic import (
    LABELS,
    OTHERS,
    REFERENCE,
    MimicOptions,
    Results,
    Setting,
    all_change,
    best,
    check_ascending,
    ends,
    fmnist,
    mimic_experiment,
    round_robin,
)
from fastagg_sim.experiments._statistics import UPLOADS_END, UPLOADS_FINAL, contrast
from fastagg_sim.verdicts import Statement

PUBLISHED = {
    20: (69.39, 72.67, 73.46, 72.92, 75.89),
    50: (68.42, 67.44, 72.30, 72.82, 74.86),
    100: (68.21, 64.74, 68.7, 72.20, 74.71),
}
PUBLISHED_REFERENCE = 76.82


@dataclass(frozen=True)
class Table3Options(MimicOptions):
    """Table 3 of the MimiC paper: bounded absences."""

    tau_max: tuple[int, ...] = (20, 50, 100)
    """Largest intervals, ascending; --quick only uses the first and the last."""


def settings(options: Table3Options) -> list[Setting]:
    check_ascending("tau-max", options.tau_max)
    task = fmnist(options, 200)
    return [
        Setting(
            f"tau_max = {tau}",
            task,
            round_robin(options, tau),
            published={
                **dict(zip(LABELS, PUBLISHED.get(tau, ()), strict=False)),
                REFERENCE: PUBLISHED_REFERENCE,
            },
        )
        for tau in (ends(options.tau_max) if options.quick else options.tau_max)
    ]


def claims(columns: Sequence[Results], options: Table3Options) -> Sequence[Claim]:
    found = [claim for r in columns for claim in best(r.setting.column, r)]
    first, last = columns[0], columns[-1]
    if len(columns) > 1:
        span = f"from {first.setting.column} to {last.setting.column}"
        found.append(all_change(f"every method loses {span}", first, last, sign=-1))
        statements = [
            Statement(
                f"{other} - {kept}",
                contrast(
                    [
                        (1, first.curves[other]),
                        (-1, last.curves[other]),
                        (-1, first.curves[kept]),
                        (1, last.curves[kept]),
                    ],
                    UPLOADS_END,
                ),
                low=0,
            )
            for kept in ("MIFA", "MimiC")
            for other in OTHERS
        ]
        text = f"MIFA and MimiC lose less than the others {span} ({UPLOADS_END.text})"
        found.append(Claim.about(text, statements))
    reference = contrast([(1, first.curves[REFERENCE])], UPLOADS_FINAL)
    low, high = PUBLISHED_REFERENCE - 3, PUBLISHED_REFERENCE + 3
    text = f"FedAvg without dropout within 3 points of published ({UPLOADS_FINAL.text})"
    statement = Statement("measured", reference, low, high)
    return [*found, Claim.about(text, [statement], {"published": PUBLISHED_REFERENCE})]


EXPERIMENT = mimic_experiment(
    name="mimic-table3",
    title="Fashion-MNIST after 200 uploads, bounded absences",
    figure="table 3",
    options=Table3Options,
    settings=settings,
    claims=claims,
    expected=Expected(cpu=240, quick=3),
    reference=True,
)

# SPDX-License-Identifier: Apache-2.0
"""MimiC, table 4: Fashion-MNIST after 200 uploads, a fraction P of the clients active.

The paper's standard deviations over three trials, up to ten percentage points, are larger than most
differences between its methods. The claims therefore compare the methods in pairs with the same
seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastagg_sim.experiments._base import Expected
from fastagg_sim.experiments._mimic import (
    MimicOptions,
    Setting,
    fmnist,
    mimic_experiment,
)
from fastagg_sim.experiments._mimic_tables import participation_claims, participation_settings

PUBLISHED = {
    10: (64.71, 66.91, 63.77, 68.58, 72.22),
    30: (69.22, 69.43, 73.18, 73.43, 74.86),
    50: (71.31, 72.91, 71.88, 73.24, 74.24),
}


@dataclass(frozen=True)
class Table4FmnistOptions(MimicOptions):
    """Table 4 of the MimiC paper, Fashion-MNIST: time-varying participation."""

    percent: tuple[int, ...] = (10, 30, 50)
    """Percentages of active clients, ascending; --quick only uses the first and the last."""


def settings(options: Table4FmnistOptions) -> Sequence[Setting]:
    return participation_settings(options, options.percent, fmnist(options, 200), PUBLISHED)


EXPERIMENT = mimic_experiment(
    name="mimic-table4-fmnist",
    title="Fashion-MNIST after 200 uploads, time-varying participation",
    figure="table 4",
    options=Table4FmnistOptions,
    settings=settings,
    claims=participation_claims,
    expected=Expected(cpu=355, quick=3),
)

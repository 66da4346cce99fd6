# SPDX-License-Identifier: Apache-2.0
"""MimiC, table 4: CIFAR-10 after 400 uploads, a fraction P of the clients active.

The paper's standard deviations over three trials, up to ten percentage points, are larger than most
differences between its methods. The claims therefore compare the methods in pairs with the same
seed.

`--model lenet` is small enough for a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastagg_sim.experiments._base import Expected
from fastagg_sim.experiments._mimic import (
    CifarMimicOptions,
    Setting,
    cifar,
    mimic_experiment,
)
from fastagg_sim.experiments._mimic_tables import participation_claims, participation_settings

PUBLISHED = {
    10: (42.03, 48.12, 38.88, 52.69, 56.21),
    30: (51.63, 50.08, 56.21, 55.62, 60.07),
    50: (52.21, 59.23, 53.59, 56.14, 60.59),
}


@dataclass(frozen=True)
class Table4CifarOptions(CifarMimicOptions):
    """Table 4 of the MimiC paper, CIFAR-10: time-varying participation."""

    percent: tuple[int, ...] = (10, 30, 50)
    """Percentages of active clients, ascending; --quick only uses the first and the last."""


def settings(options: Table4CifarOptions) -> Sequence[Setting]:
    return participation_settings(options, options.percent, cifar(options, 400), PUBLISHED)


EXPERIMENT = mimic_experiment(
    name="mimic-table4-cifar",
    title="CIFAR-10 after 400 uploads, time-varying participation",
    figure="table 4",
    options=Table4CifarOptions,
    settings=settings,
    claims=participation_claims,
    expected=Expected(cpu=64800, quick=4, gpu=4050),
)

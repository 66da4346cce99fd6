# SPDX-License-Identifier: Apache-2.0
"""MimiC, figure 4: Fashion-MNIST, clients active at regular intervals of up to 20 rounds.

Five methods up to 200 uploads; the left column of table 3 has the final accuracies. The paper says
that MIFA and MimiC oscillate less than the other methods, and that MimiC is the best and converges
fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastagg_sim.experiments._base import Expected
from fastagg_sim.experiments._mimic import (
    MimicOptions,
    Setting,
    curve_experiment,
    fmnist,
    round_robin,
)


@dataclass(frozen=True)
class Fig4Options(MimicOptions):
    """Figure 4 of the MimiC paper: Fashion-MNIST, bounded absences."""


def setting(options: Fig4Options) -> Setting:
    return Setting("tau_max = 20", fmnist(options, 200), round_robin(options, 20))


EXPERIMENT = curve_experiment(
    name="mimic-fig4",
    title="Fashion-MNIST, bounded absences",
    figure="4",
    options=Fig4Options,
    setting=setting,
    expected=Expected(cpu=90, quick=1.5),
)

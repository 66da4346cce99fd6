# SPDX-License-Identifier: Apache-2.0
"""MimiC, figure 5: CIFAR-10, clients active at regular intervals of up to 20 rounds.

As figure 4, up to 400 uploads. `--model lenet` is small enough for a CPU. The paper also says that
SCAFFOLD may fail to converge here.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastagg_sim.experiments._base import Expected
from fastagg_sim.experiments._mimic import (
    CifarMimicOptions,
    Setting,
    cifar,
    curve_experiment,
    round_robin,
)


@dataclass(frozen=True)
class Fig5Options(CifarMimicOptions):
    """Figure 5 of the MimiC paper: CIFAR-10, bounded absences."""


def setting(options: Fig5Options) -> Setting:
    return Setting("tau_max = 20", cifar(options, 400), round_robin(options, 20))


EXPERIMENT = curve_experiment(
    name="mimic-fig5",
    title="CIFAR-10, bounded absences",
    figure="5",
    options=Fig5Options,
    setting=setting,
    expected=Expected(cpu=15800, quick=2, gpu=990),
)

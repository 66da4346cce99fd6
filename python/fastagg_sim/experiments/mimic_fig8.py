# SPDX-License-Identifier: Apache-2.0
"""MimiC, figure 8: CIFAR-10, every client active with probability 0.3.

As figure 7, up to 400 uploads. `--model lenet` is small enough for a CPU. The paper also says that
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
    static,
)


@dataclass(frozen=True)
class Fig8Options(CifarMimicOptions):
    """Figure 8 of the MimiC paper: CIFAR-10, static probabilities."""


def setting(options: Fig8Options) -> Setting:
    return Setting("p = 0.3", cifar(options, 400), static(options, 0.3))


EXPERIMENT = curve_experiment(
    name="mimic-fig8",
    title="CIFAR-10, static probability 0.3",
    figure="8",
    options=Fig8Options,
    setting=setting,
    expected=Expected(cpu=21600, quick=2, gpu=1350),
)

# SPDX-License-Identifier: Apache-2.0
"""MimiC, figure 7: Fashion-MNIST, every client active with probability 0.1.

Five methods up to 200 uploads. The paper says that MIFA and MimiC oscillate less than the other
methods, and that MimiC is the best and converges fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastagg_sim.experiments._base import Expected
from fastagg_sim.experiments._mimic import MimicOptions, Setting, curve_experiment, fmnist, static


@dataclass(frozen=True)
class Fig7Options(MimicOptions):
    """Figure 7 of the MimiC paper: Fashion-MNIST, static probabilities."""


def setting(options: Fig7Options) -> Setting:
    return Setting("p = 0.1", fmnist(options, 200), static(options, 0.1))


EXPERIMENT = curve_experiment(
    name="mimic-fig7",
    title="Fashion-MNIST, static probability 0.1",
    figure="7",
    options=Fig7Options,
    setting=setting,
    expected=Expected(cpu=45, quick=1.5),
)

# SPDX-License-Identifier: Apache-2.0
"""Build the experiments of Su et al. that train models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastagg_sim.config import Config
from fastagg_sim.experiments._adversarial import BASELINES, MIFA, AdversarialOptions, synthetic
from fastagg_sim.experiments._adversarial_results import PublishedEnd, synthetic_claims
from fastagg_sim.experiments._base import Claim, Expected, Experiment


def adversarial_experiment(
    name: str,
    title: str,
    figure: str,
    options: type[AdversarialOptions],
    configs: Callable[[Any], Mapping[str, Config]],
    claims: Callable[[Mapping[str, Path], Any], Sequence[Claim]],
    expected: Expected,
    *,
    rows: Sequence[Sequence[str]] = (BASELINES,),
    published: Mapping[str, PublishedEnd] | None = None,
) -> Experiment:
    """Create an experiment that compares the variants with baselines and with robust rules.

    It also writes epsilon.csv, the fraction of samples that was silenced in every round.

    rows: for each row of panels in the figure, the methods to draw.
    published: where the published curves end, by method.

    For the other arguments see `Experiment`.
    """

    def prepare(folders: Mapping[str, Path], chosen: AdversarialOptions) -> Sequence[Path]:
        from fastagg_sim.experiments._adversarial_plots import write_epsilon

        return [write_epsilon(folders["baselines"])]

    def draw(folders: Mapping[str, Path], chosen: AdversarialOptions, target: Path) -> None:
        from fastagg_sim.experiments import _adversarial_plots

        # The published curves are not those of the adversary of section 6.1.
        shown = published if published and chosen.candidates == "all" else {}
        _adversarial_plots.draw(folders, rows, target, shown)

    return Experiment(
        name=name,
        title=title,
        options=options,
        configs=configs,
        claims=claims,
        prepare=prepare,
        draw=draw,
        expected=expected,
        paper="Su et al.",
        figure=figure,
    )


def synthetic_experiment(
    name: str, title: str, figure: str, options: type[AdversarialOptions], expected: Expected
) -> Experiment:
    """Create an experiment of appendix E.2. Its figure shows the baselines without and with
    MIFA."""

    def claims(folders: Mapping[str, Path], chosen: AdversarialOptions) -> Sequence[Claim]:
        return synthetic_claims(folders, chosen.epsilon, chosen.as_released)

    return adversarial_experiment(
        name,
        title,
        figure,
        options,
        lambda chosen: synthetic(name, chosen),
        claims,
        expected,
        rows=([method for method in BASELINES if method != MIFA], BASELINES),
    )

# SPDX-License-Identifier: Apache-2.0
"""A few rounds of the MNIST experiment on the real data."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastagg_sim.data import cache_path
from fastagg_sim.data.images import IMAGE_SETS
from fastagg_sim.experiments._panel import Panel
from fastagg_sim.experiments.fdms_fig1_mnist import EXPERIMENT, MnistOptions
from fastagg_sim.records import read_curves
from fastagg_sim.report import compute


@pytest.mark.realdata
@pytest.mark.slow
def test_fdms_is_above_dropout_on_mnist(tmp_path: Path) -> None:
    path = cache_path(IMAGE_SETS["mnist"])
    if not path.is_file():
        pytest.skip(f"mnist is not cached: no {path}; get it: fastagg-sim data mnist")
    config = EXPERIMENT.configs(MnistOptions(seeds=(0,), alphas=(0.7,), rounds=12))[""]
    compute([(tmp_path, config)])
    curves = read_curves(tmp_path / "metrics.csv")
    panel = Panel(curves, config.dropouts[0].label)
    # One seed, twelve rounds: measured 0.81 against 0.75 (and 0.84 for Full), so a few hundredths
    # of room for another instruction set.
    last = {method: seeds[0].last(6) for method, seeds in panel.curves.items()}
    assert last["FDMS"] > last["Dropout"] and last["FDMS"] > 0.7
    (fdms,) = (curve for curve in curves if curve.method == "FDMS")
    rates = [rate for rate, _ in fdms.wrong_friends]
    assert len(rates) == 11 and sum(rates) / len(rates) < 0.05

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastagg_sim.latency import make_latency


class TestPareto:
    @pytest.mark.parametrize("shape", [0.8, 1.5, 3.0])
    def test_the_tail(self, shape: float) -> None:
        """P(x > c minimum) = c^-shape, within five standard errors, and ln(x / minimum) is
        exponential with the mean 1 / shape."""
        process = make_latency("pareto", num_clients=10, seed=0, minimum=4.0, shape=shape)
        draws = [process.seconds(k, t) for t in range(1000) for k in range(10)]
        ratio = torch.tensor(draws, dtype=torch.float64) / 4.0
        n = len(ratio)
        assert ratio.min() >= 1
        for c in (1.5, 4.0, 20.0):
            p = c**-shape
            share = float((ratio > c).double().mean())
            assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / n)
        assert abs(ratio.log().mean() * shape - 1) < 5 / math.sqrt(n)

    def test_hand_worked(self) -> None:
        process = make_latency("pareto", num_clients=2, seed=0, minimum=[1.0, 3.0], shape=2.0)
        assert process.draw(0, 0, 0.75) == pytest.approx(2.0, rel=1e-15)  # (1 / 4)^(-1 / 2)
        assert process.draw(1, 0, 0.75) == pytest.approx(6.0, rel=1e-15)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"minimum": -1.0}, "minimum: expected a number between 1e-09 and 1e[+]09, got -1.0"),
            ({"shape": 0.0}, "shape: expected a number between 0.1 and 100, got 0.0"),
            ({"shape": [1.0]}, "shape: expected one number or one per client, 3, got 1"),
        ],
    )
    def test_bad_options_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make_latency("pareto", num_clients=3, seed=0, **options)

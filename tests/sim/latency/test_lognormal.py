# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastagg_sim.latency import make_latency

ROUNDS, K = 500, 20


def logarithms(**options: Any) -> torch.Tensor:
    """Return the logarithms of latencies, float64 [rounds, K]."""
    process = make_latency("lognormal", num_clients=K, seed=0, **options)
    draws = [[math.log(process.seconds(k, t)) for k in range(K)] for t in range(ROUNDS)]
    return torch.tensor(draws, dtype=torch.float64)


class TestLognormal:
    def test_moments_and_independence(self) -> None:
        """Bounds are five standard errors: a correct process exceeds one for one seed in a
        million."""
        z = (logarithms(median=8.0, sigma=0.5) - math.log(8.0)) / 0.5
        n = z.numel()
        assert abs(z.mean()) < 5 / math.sqrt(n)
        assert abs(z.square().mean() - 1) < 5 * math.sqrt(2 / n)
        assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / n)
        above = (z > 1.959964).double().mean()  # the quantile of 0.975
        assert abs(above - 0.025) < 5 * math.sqrt(0.025 * 0.975 / n)
        # rounds of a client, and clients of a round, are independent
        assert abs((z[1:] * z[:-1]).mean()) < 5 / math.sqrt(n - K)
        assert abs((z[:, 1:] * z[:, :-1]).mean()) < 5 / math.sqrt(n - ROUNDS)

    def test_lists_give_each_client_its_own(self) -> None:
        medians = [1.0 + k for k in range(K)]
        sigmas = [0.0] * (K - 1) + [1.0]
        found = logarithms(median=medians, sigma=sigmas).exp()
        for k in range(K - 1):  # exact but for log and exp of the test
            torch.testing.assert_close(found[:, k], torch.full_like(found[:, k], medians[k]))
        assert found[:, -1].std() > 1

    def test_hand_worked(self) -> None:
        process = make_latency("lognormal", num_clients=1, seed=0, median=2.0, sigma=0.5)
        # The normal quantile of 0.975 is 1.959964 to six digits; 2 e^(0.979982) = 5.328817.
        assert process.draw(0, 0, 0.975) == pytest.approx(5.328817, rel=1e-6)
        assert process.draw(0, 0, 0.5) == 2.0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"median": 0}, "median: expected a number between 1e-09 and 1e[+]09, got 0"),
            ({"median": math.nan}, "median: expected a number .* got nan"),
            ({"median": "slow"}, "median: expected a number .* got 'slow'"),
            ({"median": [1.0, 2.0]}, "median: expected one number or one per client, 20, got 2"),
            ({"sigma": -1}, "sigma: expected a number between 0 and 10, got -1"),
            ({"sigma": True}, "sigma: expected a number .* got True"),
        ],
    )
    def test_bad_options_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            logarithms(**options)

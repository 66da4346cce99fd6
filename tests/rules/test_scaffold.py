# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD: hand-worked numbers, an oracle, the clients' part, and valid bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fastagg
from fastagg import Scaffold


def test_hand_worked() -> None:
    agg = Scaffold(num_clients=4, num_params=1, local_work=0.5)
    params = torch.zeros(1)
    # u = 2, -6: mean -2; d = -u / .5 = -4, 12; c = 8 / 4 = 2
    agg.step(params, torch.tensor([[2.0], [-6.0]]), [0, 2])
    assert params.tolist() == [-2.0]
    assert agg.controls.clone().flatten().tolist() == [-4.0, 0.0, 12.0, 0.0]
    assert agg.mean_control.tolist() == [2.0]
    assert [agg.control(k).item() for k in range(4)] == [6.0, 2.0, -10.0, 2.0]
    # u_0 = 1: d = -2 - 2 = -4, c_0 = -8, c = 2 - 4/4 = 1
    agg.step(params, torch.tensor([[1.0]]), [0])
    assert params.tolist() == [-1.0]
    assert agg.controls.clone().flatten().tolist() == [-8.0, 0.0, 12.0, 0.0]
    assert agg.mean_control.tolist() == [1.0]


def test_follows_the_oracle(follow: Callable[..., None]) -> None:
    work = [0.5, 1.0, 0.25, 2.0, 0.1, 3.0]
    own, server = {k: np.zeros(33) for k in range(6)}, np.zeros(33)

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        nonlocal server
        differences = {k: -server - u / work[k] for k, u in updates.items()}
        for k, difference in differences.items():
            own[k] = own[k] + difference
        server = server + sum(differences.values()) / 6
        return params + 0.3 * sum(updates.values()) / len(updates)

    agg = Scaffold(num_clients=6, num_params=33, server_lr=0.3, local_work=work)
    follow(agg, oracle, tolerance=2 * 2.0**-24)  # the parameters are rounded once a round
    for k in range(6):
        # 20 rounds of float32 roundings of numbers up to about 5 times the largest
        scale = max(np.abs(c).max() for c in own.values())
        assert np.abs(agg.controls[k].double().numpy() - own[k]).max() <= 20 * 5 * 2.0**-24 * scale
        expected = server - own[k]
        assert np.abs(agg.control(k).double().numpy() - expected).max() <= 2e-5 * scale


def test_control_variates_are_the_clients_mean_gradients() -> None:
    """Run the clients' part on quadratics, as the paper defines it."""
    d, steps, lr = 5, 4, 0.1
    optima = torch.randn(3, d, dtype=torch.float64)
    agg = Scaffold(num_clients=3, num_params=d, local_work=steps * lr)
    params = torch.zeros(d)
    for t in range(30):
        active = [0, 1, 2] if t % 2 else [t % 3, (t + 1) % 3]
        rows = []
        means = []
        for k in active:
            model, gradients = params.double(), []
            for _ in range(steps):
                gradients.append(model - optima[k])  # of |model - optimum|^2 / 2
                model = model - lr * (gradients[-1] + agg.control(k).double())
            rows.append((model - params.double()).float())
            means.append(torch.stack(gradients).mean(0))
        agg.step(params, rows, active)
        for k, mean in zip(active, means, strict=True):
            # float32 updates divided by .4, plus earlier errors of the control variates
            torch.testing.assert_close(agg.controls[k].double(), mean, rtol=0, atol=1e-5)
        mean_of_all = agg.controls.clone().double().mean(0)
        torch.testing.assert_close(agg.mean_control.double(), mean_of_all, rtol=0, atol=1e-5)
    # no client drift: the optimum of the mean is reached, although clients' optima differ
    assert (params - optima.mean(0)).abs().max() < 0.02


def test_control_can_be_written_to_a_given_vector() -> None:
    agg = Scaffold(num_clients=2, num_params=3, local_work=1.0)
    agg.step(torch.zeros(3), torch.ones(1, 3), [1])
    out = torch.full((3,), float("nan"))
    assert agg.control(1, out=out) is out
    assert torch.equal(out, agg.control(1))
    for client in (2, -1):
        with pytest.raises(IndexError, match="client"):
            agg.control(client)


def test_local_work_may_change_between_steps() -> None:
    agg = Scaffold(num_clients=2, num_params=1, local_work=1.0)
    agg.local_work = torch.tensor([0.5, 2.0])
    agg.step(torch.zeros(1), torch.tensor([[1.0], [1.0]]), [0, 1])
    assert agg.controls.clone().flatten().tolist() == [-2.0, -0.5]


def test_bounds_hold_and_restart_from_measured_values() -> None:
    agg = Scaffold(num_clients=3, num_params=4, local_work=1.0)
    generator = torch.Generator().manual_seed(0)
    params = torch.zeros(4)
    for t in range(200):  # bounds grow by 2e36 a round and would exceed float32's range after 80
        clients = [t % 3, (t + 1) % 3]
        rows = 1e36 * torch.randn(2, 4, generator=generator).clamp(-1, 1)
        agg.step(params.zero_(), rows, clients)
        assert torch.isfinite(agg.controls.clone()).all()
        assert bool((agg.controls.clone().abs().amax(1) <= agg._peaks).all())
        assert agg.mean_control.abs().max() <= agg._mean_peak


def test_control_variates_out_of_range_are_refused(
    same_bits: Callable[..., None], same_state: Callable[..., None]
) -> None:
    agg, twin = (Scaffold(num_clients=3, num_params=2, local_work=1e-5) for _ in range(2))
    params = torch.ones(2)
    with pytest.raises(ValueError, match="control variates could leave the range of float32"):
        agg.step(params, torch.full((1, 2), 1e34), [0])
    same_bits(params, torch.ones(2))
    same_state(agg, twin)


@pytest.mark.parametrize("name", ["controls", "mean_control"])
def test_its_state_is_refused_as_an_update(same_bits: Callable[..., None], name: str) -> None:
    agg = Scaffold(num_clients=2, num_params=3, local_work=1.0)
    params = torch.zeros(3)
    agg.step(params, torch.ones(2, 3), [0, 1])
    row = agg.controls.rows[0] if name == "controls" else agg.mean_control
    old, state = params.clone(), agg.state_dict()
    with pytest.raises(ValueError, match=r"must not share memory .* client 1"):
        agg.step(params, [torch.ones(3), row], [0, 1])
    same_bits(params, old)
    same_bits(agg.controls.clone(), state["controls"])


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (0.0, ValueError),
        (-1.0, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ([1.0, 1.0, 1.0], ValueError),
        ([1.0, 0.0], ValueError),
        ("much", TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
def test_bad_local_work(work: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="local_work"):
        Scaffold(num_clients=2, num_params=1, local_work=work)  # type: ignore[arg-type]


def test_a_rule_for_one_client_is_saved(tmp_path: Path) -> None:
    agg = fastagg.make("scaffold", num_clients=1, num_params=4, local_work=0.5)
    agg.save(tmp_path / "agg")
    assert fastagg.load(tmp_path / "agg").local_work.tolist() == [0.5]


def test_a_state_whose_controls_are_too_far_apart_is_refused() -> None:
    agg = Scaffold(num_clients=2, num_params=1, local_work=1.0)
    state = agg.state_dict()
    state["controls"] = torch.full((2, 1), 3e38)
    with pytest.raises(ValueError, match=r"state\['controls'\]: expected numbers in \[-1.7"):
        agg.load_state_dict(state)

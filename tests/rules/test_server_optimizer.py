# SPDX-License-Identifier: Apache-2.0
"""``server_optimizer``: the aggregate of any rule moves parameters by the published equations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import Aggregator, ServerOptimizer
from fastagg.server_optimizer import optimizer_cost
from tests.rules.conftest import CONFIGURATIONS

K, D = 6, 23
NAMES = ("momentum", "nesterov", "adam", "yogi", "adagrad")
Rounds = Callable[..., Iterator[tuple[Tensor, Tensor]]]
Check = Callable[..., None]
# One configuration of each rule, with its default optimizer.
PLAIN = {
    name: options for name, options in reversed(CONFIGURATIONS) if "server_optimizer" not in options
}
CLIPS = {"centered-clip", "bucketing", "nnm"}  # in these configurations, updates of any length


class Published:
    """The equations of Reddi et al., Algorithm 2, Hsu et al. and Nesterov, in float64 of NumPy."""

    def __init__(self, name: str, server_lr: float, tau: float = 1e-3, bias: int | None = None):
        self.name, self.eta, self.tau, self.bias = name, server_lr, tau, bias
        self.beta_1 = 0.0 if name == "adagrad" else 0.9
        self.m = self.v = np.float64(0.0)
        self.t = 0

    def __call__(self, x: np.ndarray, delta: np.ndarray) -> np.ndarray:
        self.t += 1
        if self.name in ("momentum", "nesterov"):
            self.m = self.beta_1 * self.m + delta
            look_ahead = delta + self.beta_1 * self.m
            return x + self.eta * (look_ahead if self.name == "nesterov" else self.m)
        self.m = self.beta_1 * self.m + (1 - self.beta_1) * delta
        if self.name == "adagrad":
            self.v = self.v + delta**2
        elif self.name == "yogi":
            self.v = self.v - (1 - 0.99) * delta**2 * np.sign(self.v - delta**2)
        else:
            self.v = 0.99 * self.v + (1 - 0.99) * delta**2
        eta = self.eta
        if self.bias is not None:
            n = self.t + self.bias
            eta *= math.sqrt(1 - 0.99**n) / (1 - 0.9**n)
        return x + eta * self.m / (np.sqrt(self.v) + self.tau)


def make(name: str, optimizer: Any, **options: Any) -> Aggregator:
    options = {"server_lr": 0.1} | PLAIN.get(name, {}) | options
    return fastagg.make(name, num_clients=K, num_params=D, server_optimizer=optimizer, **options)


@pytest.mark.parametrize("optimizer", NAMES)
def test_fedavg_follows_the_published_equations(optimizer: str, random_rounds: Rounds) -> None:
    published = Published(optimizer, 0.1)
    agg, params = make("fedavg", optimizer), torch.randn(D)
    expected = params.double().numpy()
    for updates, clients in random_rounds(K, D, 30, 1):
        report = agg.step(params, updates, clients)
        assert report.skipped is (len(clients) == 0)
        if len(clients):
            expected = published(expected, updates.double().mean(dim=0).numpy())
    # 30 steps, each with a few roundings of 6e-8
    error = np.abs(params.double().numpy() - expected).max() / np.abs(expected).max()
    assert error <= 1e-6


@pytest.mark.parametrize(("correction", "bias"), [("adam", 0), ("flower", 1)])
def test_bias_correction_counts_steps(correction: str, bias: int, random_rounds: Rounds) -> None:
    chosen = {"name": "adam", "tau": 1e-2, "bias_correction": correction}
    agg, published = make("fedavg", chosen), Published("adam", 0.1, 1e-2, bias)
    params, steps = torch.randn(D), 0
    expected = params.double().numpy()
    for updates, clients in random_rounds(K, D, 30, 1):
        agg.step(params, updates, clients)
        if len(clients):
            steps += 1
            expected = published(expected, updates.double().mean(dim=0).numpy())
    assert 0 < steps < 30 and int(agg.state_dict()["steps"]) == steps  # skipped rounds do not count
    error = np.abs(params.double().numpy() - expected).max() / np.abs(expected).max()
    assert error <= 1e-6  # as above


@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize("name", sorted(PLAIN))
def test_every_rule_gives_its_aggregate_to_the_optimizer(
    name: str, optimizer: str, random_rounds: Rounds
) -> None:
    """The aggregate is how a twin with plain steps moves from the same parameters."""
    chosen = {"name": optimizer} | ({} if optimizer in NAMES[:2] else {"tau": 1.0})
    agg, twin = make(name, chosen, server_lr=0.1), make(name, "sgd", server_lr=1.0)
    published = Published(optimizer, 0.1, 1.0)
    params = torch.randn(D, generator=torch.Generator().manual_seed(3))
    expected = params.double().numpy()
    for updates, clients in random_rounds(K, D, 8, 4):
        moved = params.clone()
        plain = twin.step(moved, updates, clients)
        delta = (moved.double() - params.double()).numpy()
        report = agg.step(params, updates, clients)
        assert report.skipped is plain.skipped
        assert torch.equal(report.weights, plain.weights)
        if not plain.skipped:
            expected = published(expected, delta)
        # Parameters and aggregates are below 64, so the twin's rounding is at most 2^-19. Eight
        # steps add it up to ten times each (momentum), and tau = 1 does not enlarge it.
        assert np.abs(params.double().numpy() - expected).max() <= 80 * 2.0**-19
        expected = params.double().numpy()
    moments = agg.state_dict().keys() - twin.state_dict().keys()
    assert moments == ({"m"} if optimizer in NAMES[:2] else {"m", "s"})


def test_plain_steps_have_no_state_and_the_bits_of_momentum_zero(
    random_rounds: Rounds, same_bits: Check
) -> None:
    # server_lr = 0.5 is a float32 number; others are rounded to one by "momentum" only
    plain = make("fedavg", "sgd", server_lr=0.5)
    zero = make("fedavg", {"name": "momentum", "beta_1": 0.0}, server_lr=0.5)
    params, twin = torch.zeros(D), torch.zeros(D)
    for updates, clients in random_rounds(K, D, 8, 4):
        plain.step(params, updates, clients)
        zero.step(twin, updates, clients)
        same_bits(params, twin)
    assert plain.state_dict() == {}


def test_by_hand() -> None:
    """Two clients, one parameter, tau = 1 and betas that are powers of two."""
    chosen = ServerOptimizer("adam", beta_1=0.5, beta_2=0.75, tau=1.0)
    agg = fastagg.make("fedavg", num_clients=2, num_params=1, server_optimizer=chosen)
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[1.0], [3.0]]), [0, 1])  # v = 2, m = 1, s = 1
    assert params.item() == 0.5
    state = agg.state_dict()
    assert (state["m"].item(), state["s"].item()) == (1.0, 1.0)


def test_an_empty_round_of_mifa_is_a_step_along_what_it_remembers() -> None:
    agg = make("mifa", "momentum", server_lr=1.0)
    params = torch.zeros(D)
    agg.step(params, torch.full((K, D), 8.0), range(K))  # m = 8
    report = agg.step(params, [], [])  # m = 0.9 * 8 + 8
    assert not report.skipped and params[0].item() == pytest.approx(8.0 + 15.2, rel=1e-6)
    still = make("mifa", "momentum", server_lr=1.0, empty_rounds="skip")
    still.step(params.zero_(), torch.full((K, D), 8.0), range(K))
    state = still.state_dict()
    assert still.step(params, [], []).skipped and params[0].item() == 8.0
    assert torch.equal(still.state_dict()["m"], state["m"])


@given(seed=st.integers(0, 2**31), optimizer=st.sampled_from(NAMES), threads=st.integers(1, 3))
def test_arrival_order_and_threads_do_not_matter(seed: int, optimizer: str, threads: int) -> None:
    g = torch.Generator().manual_seed(seed)
    first, second = make("fdms", optimizer), make("fdms", optimizer)
    params, twin = torch.zeros(D), torch.zeros(D)
    for _ in range(4):
        clients, updates = torch.randperm(K, generator=g)[:4], torch.randn(4, D, generator=g)
        order = torch.randperm(4, generator=g)
        torch.set_num_threads(1)
        first.step(params, updates, clients)
        torch.set_num_threads(threads)
        second.step(twin, updates[order], clients[order])
    assert torch.equal(params, twin)
    state = second.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in first.state_dict().items())


# --- range and transactions -------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize("name", sorted(PLAIN.keys() - CLIPS))
def test_a_step_beyond_float32_changes_nothing(
    name: str, optimizer: str, same_bits: Check, random_rounds: Rounds
) -> None:
    agg, params = make(name, optimizer, server_lr=0.1), torch.randn(D)
    for updates, clients in random_rounds(K, D, 3, 5):
        agg.step(params, updates, clients)
    before, state = params.clone(), agg.state_dict()
    # The square of 1e20 is beyond float32; a momentum of 3.3e38 is, if it is there twice.
    size = 1e20 if optimizer not in NAMES[:2] else 3.3e38
    refused = 0
    for _ in range(2):
        try:
            agg.step(params, torch.full((K, D), size), range(K))
        except ValueError as error:
            assert "range of float32" in str(error) or "too large" in str(error)
            refused += 1
            break
        before, state = params.clone(), agg.state_dict()
    assert refused == 1
    same_bits(params, before)
    for key, value in agg.state_dict().items():
        same_bits(value, state[key], key)


def test_exact_moments_count_where_their_bounds_would_refuse_a_step() -> None:
    agg = make("fedavg", {"name": "momentum", "beta_1": 0.9}, server_lr=1e-3)
    params, bound = torch.zeros(D), 0.0
    for size in (1e38, -0.9e38, 1e38, -0.9e38, 1e38):  # m = 1e38, then 0, and so on
        agg.step(params, torch.full((1, D), size), [0])
        bound = 0.9 * bound + abs(size)
    assert bound > torch.finfo(torch.float32).max
    assert agg.state_dict()["m"].tolist() == pytest.approx([1e38] * D, rel=1e-5)


def test_params_that_share_memory_with_a_moment_are_refused() -> None:
    agg = make("fedavg", "adam")
    with pytest.raises(ValueError, match=r"^params: must not share memory with the state"):
        agg.step(agg.live_state()["m"], torch.ones(1, D), [0])  # type: ignore[arg-type]


# --- options and checkpoints ------------------------------------------------------------------


def test_defaults_are_those_of_fedopt() -> None:
    assert ServerOptimizer("adam") == ServerOptimizer("adam", 0.9, 0.99, 1e-3, "none")
    assert ServerOptimizer("yogi") == ServerOptimizer("yogi", 0.9, 0.99, 1e-3)
    assert ServerOptimizer("adagrad") == ServerOptimizer("adagrad", 0.0, None, 1e-3)
    assert ServerOptimizer("momentum") == ServerOptimizer("momentum", 0.9)
    assert make("fedavg", {"name": "yogi", "tau": 0.5}).server_optimizer.tau == 0.5


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("adamw", ValueError, r"^server_optimizer: expected one of \['sgd', .*got 'adamw'"),
        (3, TypeError, r"^server_optimizer: expected one of .*got 3 \(int\)"),
        (None, TypeError, r"^server_optimizer: .*got None"),
        ({"name": "adam", "lr": 1.0}, ValueError, r"^server_optimizer: expected some of .*'lr'"),
        (
            {"name": "sgd", "beta_1": 0.5},
            ValueError,
            "beta_1: expected None, because 'sgd'",
        ),
        (
            {"name": "adagrad", "beta_2": 0.5},
            ValueError,
            "beta_2: expected None, because 'ada",
        ),
        ({"name": "adam", "beta_1": 1.0}, ValueError, r"beta_1: expected a number in \[0, 1 - 2"),
        ({"name": "adam", "beta_2": -0.1}, ValueError, "beta_2: expected a finite number >= 0"),
        ({"name": "adam", "tau": 0.0}, ValueError, "tau: expected a number >= 1e-12, got 0.0"),
        ({"name": "adam", "tau": math.nan}, ValueError, "tau: expected a finite number"),
        ({"name": "adam", "tau": "1"}, TypeError, "tau: expected a number, got '1'"),
        (
            {"name": "adam", "bias_correction": "yes"},
            ValueError,
            "bias_correction: expected one",
        ),
        ({"kind": "AdaptiveNorm", "name": "adam"}, ValueError, "expected some of"),
    ],
)
def test_bad_options_are_refused(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make("fedavg", value)


def trained(optimizer: Any, name: str = "mimic") -> tuple[Aggregator, Tensor]:
    agg, params = make(name, optimizer), torch.zeros(D)
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        agg.step(params, torch.randn(3, D, generator=g), [0, 4, 2])
    return agg, params


@pytest.mark.parametrize("optimizer", [*NAMES, {"name": "adam", "bias_correction": "adam"}])
def test_a_file_continues_with_the_same_bits(
    optimizer: Any, tmp_path: Path, same_bits: Check
) -> None:
    agg, params = trained(optimizer)
    agg.save(tmp_path / "a", params=params)
    loaded, twin = fastagg.load(tmp_path / "a"), params.clone()
    assert loaded.server_optimizer == agg.server_optimizer
    for rule, vector in ((agg, params), (loaded, twin)):
        rule.step(vector, torch.ones(2, D), [1, 2])
    same_bits(params, twin)
    same_bits(agg.state_dict()["m"], loaded.state_dict()["m"])


def test_only_arguments_of_the_same_optimizer_may_change_in_load(tmp_path: Path) -> None:
    agg, _ = trained("adam")
    agg.save(tmp_path / "a")
    other = fastagg.load(tmp_path / "a", server_optimizer={"name": "adam", "tau": 0.5})
    assert other.server_optimizer.tau == 0.5
    for chosen in ("yogi", "sgd"):
        with pytest.raises(ValueError, match=r"^server_optimizer: expected 'adam', as in the file"):
            fastagg.load(tmp_path / "a", server_optimizer=chosen)


def test_a_state_that_no_steps_lead_to_is_refused(same_bits: Check) -> None:
    agg, _ = trained({"name": "adam", "bias_correction": "adam"})
    state = agg.state_dict()
    for name, value, message in [
        ("s", -state["s"], r"state\['s'\]: expected numbers in \[0"),
        ("s", state["s"] * math.nan, r"state\['s'\]: expected finite"),
        ("m", state["m"].double(), r"state\['m'\]: expected dtype"),
        ("m", state["m"][:-1], r"state\['m'\]: expected shape"),
        ("steps", torch.tensor(-1), r"state\['steps'\]: expected numbers"),
        ("steps", torch.tensor(0), r"state\['m'\]: expected zeros, because there was no step"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            agg.load_state_dict(state | {name: value})
        for key, now in agg.state_dict().items():
            same_bits(now, state[key], key)


def test_forged_moments_near_the_end_of_float32_cannot_make_parameters_infinite() -> None:
    agg, params = trained("momentum")
    agg.load_state_dict(agg.state_dict() | {"m": torch.full((D,), 3e38)})
    before = params.clone()
    with pytest.raises(ValueError, match="float32"):
        agg.step(params, torch.full((1, D), 3e38), [0])
    assert torch.equal(params, before)


@pytest.mark.parametrize("optimizer", NAMES)
def test_the_plan_counts_the_moments(optimizer: str) -> None:
    sizes = {"num_clients": K, "num_active": 3, "num_params": D}
    plain, plan = (fastagg.plan("mifa", **sizes, server_optimizer=o) for o in ("sgd", optimizer))
    cost = optimizer_cost(optimizer, D)
    assert plan.state_bytes - plain.state_bytes == cost.state
    assert plan.bytes_moved - plain.bytes_moved == cost.moved > 0
    assert make("mifa", optimizer).memory_bytes - make("mifa", "sgd").memory_bytes == cost.state


def test_enqueued_rounds_refuse_it() -> None:
    with pytest.raises(ValueError, match=r"server_optimizer='sgd' and min_active=1, because"):
        fastagg.EnqueuedFDMS(make("fdms", "adam"), torch.zeros(D))  # type: ignore[arg-type]

# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all rules: random rounds, a comparison with an oracle, bit-exact comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastagg import Aggregator, ColumnBlocks, StepReport, Theorem2Threshold, UpdateBuffer

# Configurations of every rule, for six clients.
EARLY = Theorem2Threshold(6, rounds=1, beta=1.0, p=0.99, b_max=1, delta_f=0.0, factor=0.12)
WEIGHTS = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]

Configuration = tuple[str, dict[str, Any]]

AVERAGING: list[Configuration] = [
    ("fedavg", {}),
    ("fedavg", {"client_weights": WEIGHTS}),
    ("fdms", {}),
    ("fdms", {"similarity": "distance", "client_weights": WEIGHTS}),
    ("fdms", {"elimination": EARLY}),
    ("fdms", {"sketch": 64, "elimination": EARLY, "client_weights": WEIGHTS}),
    ("fdms", {"max_share": 0.25, "client_weights": WEIGHTS}),
    ("stale", {}),
    ("stale", {"client_weights": WEIGHTS}),
    ("stale-models", {"server_lr": 0.7}),
    ("mifa", {}),
    ("stale", {"max_age": 1}),
    ("stale-models", {"max_age": 1, "client_weights": WEIGHTS}),
    ("mifa", {"client_weights": WEIGHTS}),
    ("mimic", {"server_lr": 0.7}),
    ("mimic", {"max_age": 1}),
    ("mimic", {"mode": "client", "server_lr": 0.7}),
    ("amplified", {"beta": 2.0}),
    ("fdms-means", {}),
    ("fdms-means", {"sketch": 64, "search": "clusters", "client_weights": WEIGHTS}),
    ("fdms-means", {"max_share": 0.25, "min_weight": 1.0}),
    ("fdms-soft", {"friends": 2, "client_weights": WEIGHTS}),
    ("fdms-soft", {"friends": 2, "max_share": 0.3}),
    ("fdms-soft", {"sketch": 64, "seed": 3, "similarity": "distance"}),
    ("mimic-aged", {"fading": 0.5}),
    ("mimic-aged", {"max_age": 2}),
    ("fedvarp", {"max_age": 1}),
    ("fedvarp", {"client_weights": WEIGHTS, "server_lr": 0.7}),
    ("scaffold", {"local_work": 0.5, "server_lr": 0.7}),
]
CLIPPED = {"rule": "centered-clip", "rule_options": {"tau": 5.0}}
ROBUST: list[Configuration] = [
    ("geometric-median", {}),
    ("geometric-median", {"client_weights": WEIGHTS, "reuse": True}),
    ("centered-clip", {"tau": 5.0}),
    ("centered-clip", {"tau": 5.0, "client_weights": WEIGHTS, "reuse": True}),
    ("krum", {}),
    ("krum", {"sketch": 64, "client_weights": WEIGHTS}),
    ("multi-krum", {"keep": 3, "client_weights": WEIGHTS}),
    ("geometric-median", {"client_weights": WEIGHTS, "reuse": True, "max_age": 1}),
    ("nnm", CLIPPED | {"num_byzantine": 1, "reuse": True}),
    ("bucketing", CLIPPED | {"client_weights": WEIGHTS}),
    ("bucketing", {"seed": 5, "bucket_size": 3, "rule": "nnm", "reuse": True}),
    ("bulyan", {}),
    ("bulyan", {"client_weights": WEIGHTS, "reuse": True}),
    ("bulyan", {"sketch": 64}),
    ("median", {}),
    ("trimmed-mean", {}),
    ("meamed", {"server_lr": 0.7}),
]
# Rows are rounded before their norms are taken, and are read with their scales.
INT8: list[Configuration] = [
    ("stale", {"memory_dtype": "int8", "max_age": 1}),
    ("fedvarp", {"memory_dtype": "int8", "client_weights": WEIGHTS}),
    ("fedstale", {"memory_dtype": "int8", "max_age": 2}),
    ("geometric-median", {"memory_dtype": "int8", "reuse": True}),
]
CORRECTED = {"name": "adam", "bias_correction": "flower", "tau": 1e-2}
OPTIMIZED: list[Configuration] = [
    ("fedavg", {"server_optimizer": "adam", "server_lr": 0.1}),
    ("fdms", {"server_optimizer": "momentum"}),
    ("stale-models", {"server_optimizer": "yogi", "max_age": 2}),
    ("mifa", {"server_optimizer": "nesterov"}),
    ("fedstale", {"server_optimizer": "adam"}),
    ("fedvarp", {"server_optimizer": "adagrad", "client_weights": WEIGHTS}),
    ("mimic", {"server_optimizer": CORRECTED}),
    ("mimic", {"mode": "client", "server_optimizer": "adagrad"}),
    ("scaffold", {"local_work": 0.5, "server_optimizer": "yogi"}),
    ("centered-clip", {"tau": 5.0, "server_optimizer": "adam"}),
    ("geometric-median", {"reuse": True, "server_optimizer": "momentum"}),
]
ESTIMATED: list[Configuration] = [
    ("fedau", {"cutoff": 2}),
    ("fedstale", {"cutoff": 2}),
    ("fedstale", {"beta": 1.0, "client_weights": WEIGHTS, "max_age": 1, "server_lr": 0.7}),
]
SUMMED: list[Configuration] = [
    ("mifa-client", {}),
    ("mifa-client", {"client_weights": WEIGHTS, "empty_rounds": "skip", "server_lr": 0.7}),
]
EXACT = [*AVERAGING, *ROBUST, *ESTIMATED, *SUMMED, *OPTIMIZED]
# Rules that take late rows. (The corpus of tests/fuzz has numbers of CONFIGURATIONS: append only.)
LATE_AVERAGING: list[Configuration] = [
    ("fedbuff", {}),
    ("fedbuff", {"buffer_size": 6, "server_lr": 0.7}),
    ("mifa", {"staleness": "constant"}),
    ("mimic", {"staleness": "constant", "max_staleness": 2}),
    ("mimic-aged", {"staleness": "constant", "max_staleness": 3, "max_age": 4}),
]
LATE: list[Configuration] = [
    *LATE_AVERAGING,
    ("krum", {"reuse": True, "staleness": "constant"}),
    ("fdms", {"staleness": "polynomial"}),
]
CONFIGURATIONS = [*EXACT, *INT8, *LATE]
CLIPPING = [case for case in CONFIGURATIONS if case[0] != "mifa-client"]  # it takes no clip_norm


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_rule: for all configurations (name, options)")
    config.addinivalue_line("markers", "clipping_rule: for those that take clip_norm")
    config.addinivalue_line("markers", "exact_rule: for those that use the numbers as given")
    config.addinivalue_line("markers", "averaging_rule: the mean, with all clients active")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    markers = {
        "every_rule": CONFIGURATIONS,
        "clipping_rule": CLIPPING,
        "exact_rule": [*EXACT, *LATE],
        "averaging_rule": [*AVERAGING, *LATE_AVERAGING],
    }
    for marker, configurations in markers.items():
        if not metafunc.definition.get_closest_marker(marker):
            continue
        cases, seen = [], set[str]()
        for name, options in configurations:
            # `make test-quick` tests the first configuration of each rule.
            marks = [pytest.mark.slow] if name in seen else []
            cases.append(pytest.param(name, options, id="-".join([name, *options]), marks=marks))
            seen.add(name)
        metafunc.parametrize(("name", "options"), cases)


@pytest.fixture(name="rules_tested")
def _rules_tested() -> set[str]:
    return {name for name, _ in CONFIGURATIONS}


Oracle = Callable[[np.ndarray, dict[int, np.ndarray]], np.ndarray]
"""(params, updates by client) -> new params, all float64."""


def random_rounds(
    num_clients: int, num_params: int, rounds: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (updates [S, d], clients [S]) per round: about half of the clients, in random order.

    Clients form two groups. Each group has a common direction, so similarities differ clearly.
    """
    generator = torch.Generator().manual_seed(seed)
    directions = 2.0 * torch.randn(2, num_params, generator=generator)
    for _ in range(rounds):
        size = int(torch.randint(0, num_clients + 1, (), generator=generator))
        clients = torch.randperm(num_clients, generator=generator)[:size]
        noise = torch.randn(size, num_params, generator=generator)
        yield directions[clients % 2] + noise, clients


def assert_same_bits(a: Tensor, b: Tensor, what: str = "") -> None:
    """Assert equality of bits: -0.0 differs from 0.0, and a NaN equals the same NaN."""
    assert a.shape == b.shape and a.dtype == b.dtype, what
    flat = (x.contiguous().reshape(-1) for x in (a, b))
    first, second = (x.view(torch.uint8).numpy().tobytes() for x in flat)
    assert first == second, what


def assert_same_state(a: Aggregator, b: Aggregator) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name in first:
        assert_same_bits(first[name], second[name], name)


def assert_same_report(a: StepReport, b: StepReport) -> None:
    for name in ("active", "rejected", "weights"):
        assert_same_bits(getattr(a, name), getattr(b, name), name)
    assert (a.friends is None) == (b.friends is None)
    if a.friends is not None and b.friends is not None:
        assert_same_bits(a.friends, b.friends, "friends")
    assert (a.pairs, a.skipped) == (b.pairs, b.skipped)


def follow(agg: Aggregator, oracle: Oracle, *, tolerance: float, seed: int = 0) -> None:
    """Run twenty random rounds; compare each step with the oracle's step from the same params.

    ``tolerance`` is relative to the largest magnitude in the result.
    """
    params = torch.randn(agg.num_params, generator=torch.Generator().manual_seed(seed + 1))
    for updates, clients in random_rounds(agg.num_clients, agg.num_params, 20, seed):
        given = {int(k): u.double().numpy() for k, u in zip(clients, updates, strict=True)}
        expected = params.double().numpy()
        if given or agg.moves_without_clients:
            expected = oracle(expected, given)
        agg.step(params, updates, clients)
        error = np.abs(params.double().numpy() - expected).max() / np.abs(expected).max()
        assert error <= tolerance


@pytest.fixture(name="follow")
def _follow() -> Callable[..., None]:
    return follow


@pytest.fixture(name="random_rounds")
def _random_rounds() -> Callable[..., Iterator[tuple[Tensor, Tensor]]]:
    return random_rounds


@pytest.fixture(name="same_bits")
def _same_bits() -> Callable[..., None]:
    return assert_same_bits


@pytest.fixture(name="same_state")
def _same_state() -> Callable[..., None]:
    return assert_same_state


@pytest.fixture(name="same_report")
def _same_report() -> Callable[..., None]:
    return assert_same_report


def as_form(form: str, rows: Tensor, clients: list[int], num_clients: int) -> Any:
    """Return rows [S, d] as a step takes them: "matrix", "list", "buffer" or "stream"."""
    if form == "list":
        return list(rows)
    if form == "buffer":
        buffer = UpdateBuffer(num_clients, rows.shape[1])
        for client, row in zip(clients, rows, strict=True):
            buffer.row(client).copy_(row)
        return buffer
    if form == "stream":
        blocks = rows.split(7, dim=1)
        return ColumnBlocks(lambda: iter(blocks), num_rows=len(rows), num_params=rows.shape[1])
    return rows

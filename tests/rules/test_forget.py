# SPDX-License-Identifier: Apache-2.0
"""``forget``: the state of some clients is what it was at first, and that of the others is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator

K, D = 6, 23
every_rule = pytest.mark.every_rule
exact_rule = pytest.mark.exact_rule
# not of single clients
COMMON = {
    *("rounds", "previous", "norms", "norm_count", "m", "s", "steps"),
    *("recent", "aggregates", "before"),
}
SUMS = {"total": 1e-15, "mean_control": 1e-6}  # over clients: one rounding for each that is left


@pytest.fixture(name="trained")
def _trained(
    name: str,
    options: dict[str, Any],
    random_rounds: Callable[..., Iterator[tuple[Tensor, Tensor]]],
) -> tuple[Aggregator, Tensor]:
    agg = fastagg.make(name, num_clients=K, num_params=D, **options)
    params = torch.randn(D, generator=torch.Generator().manual_seed(1))
    for updates, clients in random_rounds(K, D, 12, 7):
        agg.step(params, updates, clients)
    everyone = torch.randn(K, D, generator=torch.Generator().manual_seed(2))
    agg.step(params, everyone, range(K))
    return agg, params


def of_clients(state: dict[str, Tensor], name: str, clients: list[int]) -> Tensor:
    """Return the part of a tensor of the state that belongs to pairs or rows of ``clients``."""
    value = state[name]
    if name == "candidates":
        value = fastagg.bits.unpack(value, K)
    if name in ("scores", "counts", "candidates") and value.dim() == 2:
        return value[clients][:, clients]
    return value[clients]


@exact_rule
def test_the_state_of_others_is_kept(
    trained: tuple[Aggregator, Tensor], same_bits: Callable[..., None], name: str, options: Any
) -> None:
    agg, params = trained
    before, first = agg.state_dict(), fastagg.make(name, num_clients=K, num_params=D, **options)
    if name == "mifa-client":  # the rows are the clients'; see test_mifa_client.py
        with pytest.raises(ValueError, match="withdraw"):
            agg.forget([4, 1])
        for key, value in agg.state_dict().items():
            same_bits(value, before[key], key)
        return
    agg.forget([4, 1])
    after, fresh = agg.state_dict(), first.state_dict()
    kept = [0, 2, 3, 5]
    for key in before.keys() - COMMON - SUMS.keys():
        same_bits(of_clients(after, key, kept), of_clients(before, key, kept), key)
        same_bits(of_clients(after, key, [1, 4]), of_clients(fresh, key, [1, 4]), key)
        if before[key].shape[-1] == K and before[key].dim() == 2 and name.startswith("fdms"):
            same_bits(after[key][[1, 4]], fresh[key][[1, 4]], key)
            same_bits(after[key][:, [1, 4]], fresh[key][:, [1, 4]], key)
    for key in before.keys() & COMMON:
        same_bits(after[key], before[key], key)
    if "total" in before:
        rest = agg._shares[kept] @ after["memory"][kept].double()
        assert torch.allclose(after["total"], rest, rtol=0.0, atol=SUMS["total"] * K * 10.0)
    if "mean_control" in before:
        mean = after["controls"].double().mean(dim=0)
        assert (after["mean_control"] - mean).abs().max() <= SUMS["mean_control"] * mean.abs().max()
    again = fastagg.make(name, num_clients=K, num_params=D, **options)
    again.load_state_dict(after)  # a state to which steps lead
    other = params.clone()
    updates, clients = torch.ones(3, D), [1, 0, 4]
    for rule, vector in ((agg, params), (again, other)):
        rule.step(vector, updates, clients)
    assert torch.isfinite(params).all()
    same_bits(params, other)


@every_rule
def test_to_forget_all_is_to_begin_again(
    trained: tuple[Aggregator, Tensor], same_bits: Callable[..., None], name: str, options: Any
) -> None:
    agg, _ = trained
    agg.forget(torch.arange(K))
    fresh = fastagg.make(name, num_clients=K, num_params=D, **options).state_dict()
    for key, value in agg.state_dict().items():
        if key not in COMMON:
            same_bits(value, fresh[key], key)


@every_rule
def test_wrong_ids_change_nothing(
    trained: tuple[Aggregator, Tensor], same_bits: Callable[..., None], name: str, options: Any
) -> None:
    agg, _ = trained
    before = agg.state_dict()
    wrong: list[tuple[Any, type[Exception]]] = [
        ([0, K], IndexError),
        ([-1], IndexError),
        ([1, 1], ValueError),
        ([1.5], TypeError),
        ("1", TypeError),
    ]
    for clients, error in wrong:
        with pytest.raises(error, match="clients"):
            agg.forget(clients)
    agg.forget([])
    for key, value in agg.state_dict().items():
        same_bits(value, before[key], key)


def test_a_forgotten_client_is_no_friend_and_has_none() -> None:
    agg = fastagg.make("fdms", num_clients=4, num_params=2)
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    agg.step(torch.zeros(2), rows, range(4))
    assert agg.step(torch.zeros(2), rows[1:], [1, 2, 3]).friends.tolist() == [1, 1, 2, 3]
    agg.forget([0])
    report = agg.step(torch.zeros(2), rows[1:], [1, 2, 3])
    assert report.friends.tolist() == [-1, 1, 2, 3]
    assert agg.counts[0].tolist() == [0, 0, 0, 0]


def test_an_absent_row_leaves_the_mean() -> None:
    agg = fastagg.make("mifa", num_clients=4, num_params=2)
    agg.step(torch.zeros(2), torch.tensor([[8.0, 0.0], [0.0, 4.0]]), [0, 1])
    agg.forget([0])
    params = torch.zeros(2)
    agg.step(params, torch.zeros(1, 2), [3])
    assert params.tolist() == [0.0, 1.0]


def test_which_rules_tell_clients_apart() -> None:
    sizes = {"num_clients": 4, "num_params": 2}
    alike = [("fedavg", {}), ("amplified", {}), ("krum", {}), ("geometric-median", {})]
    for rule, options in alike:
        assert not fastagg.make(rule, **sizes, **options).tells_clients_apart
    apart = [
        *(("fedavg", {"client_weights": [1, 2, 3, 4]}), ("krum", {"reuse": True})),
        *(("fdms", {}), ("mifa", {}), ("mimic", {}), ("fedau", {})),
    ]
    for rule, options in apart:
        assert fastagg.make(rule, **sizes, **options).tells_clients_apart


@pytest.mark.parametrize("name", ["mifa", "stale", "fedvarp", "fedstale"])
def test_clients_are_forgotten_in_any_order_with_the_same_bits(name: str) -> None:
    kept = []
    for ids in ([0, 1, 2, 3], [3, 1, 2, 0]):
        agg = fastagg.make(name, num_clients=6, num_params=501)
        rows = torch.randn(6, 501, generator=torch.Generator().manual_seed(1))
        agg.step(torch.zeros(501), rows, range(6))
        agg.forget(ids)
        kept.append(agg.state_dict()["total"])
    assert torch.equal(*kept)

# SPDX-License-Identifier: Apache-2.0
"""``step(..., weights=)``: weights of the active clients that hold for one round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastagg
from fastagg import Aggregator

K, D = 6, 23
COUNTS = [30.0, 10.0, 40.0, 10.0, 50.0, 90.0]  # client_weights
Check = Callable[..., None]
every_rule = pytest.mark.every_rule
TAKING: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fedavg", {"client_weights": COUNTS}),
    ("fedavg", {"server_optimizer": "adam"}),
    ("fdms", {"client_weights": COUNTS}),
    ("fdms", {"client_weights": COUNTS, "similarity": "distance", "max_share": 0.3}),
    ("fdms-soft", {"client_weights": COUNTS, "friends": 2}),
    ("fdms-means", {"client_weights": COUNTS, "sketch": 64}),
    ("fdms-means", {"client_weights": COUNTS, "max_share": 0.3}),
    ("fedau", {"client_weights": COUNTS, "cutoff": 3}),
]
taking = pytest.mark.parametrize(
    ("name", "options"), TAKING, ids=lambda part: part if isinstance(part, str) else "-".join(part)
)


def make(name: str, options: dict[str, Any], **more: Any) -> Aggregator:
    return fastagg.make(name, num_clients=K, num_params=D, **(options | more))


def test_hand_worked() -> None:
    agg, params = fastagg.FedAvg(num_clients=4, num_params=2), torch.zeros(2)
    # (3 * (4, 0) + 1 * (0, 8)) / 4, then equal weights
    rows = torch.tensor([[4.0, 0.0], [0.0, 8.0]])
    report = agg.step(params, rows, [2, 0], weights=[3, 1])
    assert params.tolist() == [3.0, 2.0] and report.weights.tolist() == [0.25, 0.75]
    report = agg.step(params, rows, [2, 0])
    assert params.tolist() == [5.0, 6.0] and report.weights.tolist() == [0.5, 0.5]


def test_hand_worked_substitution() -> None:
    agg = fastagg.FDMS(num_clients=3, num_params=1, client_weights=[2, 4, 6])
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[1.0], [1.0], [-1.0]]), [0, 1, 2])
    # client 1 is absent; its friend is client 0, which has trained on 10 samples this time
    report = agg.step(params.zero_(), torch.tensor([[8.0], [20.0]]), [0, 2], weights=[10, 6])
    assert report.weights.tolist() == pytest.approx([14 / 20, 6 / 20], abs=1e-7)  # in float32
    assert params.item() == pytest.approx((14 * 8 + 6 * 20) / 20, rel=2e-7)  # two roundings


def test_follows_the_oracle() -> None:
    agg, generator = make("fedavg", {}, server_lr=0.7), torch.Generator().manual_seed(0)
    params = torch.randn(D, generator=generator)
    for _ in range(20):
        size = int(torch.randint(1, K + 1, (), generator=generator))
        clients = torch.randperm(K, generator=generator)[:size]
        rows = torch.randn(size, D, generator=generator)
        weights = torch.rand(size, generator=generator, dtype=torch.float64) * 1000
        w, u = weights.numpy(), rows.double().numpy()
        expected = params.double().numpy() + 0.7 * (w @ u) / w.sum()
        agg.step(params, rows, clients, weights=weights)
        error = np.abs(params.double().numpy() - expected).max() / np.abs(expected).max()
        assert error <= 4 * 2.0**-24  # roundings of the aggregate and of the parameters


@taking
def test_a_round_is_that_of_a_rule_with_these_client_weights(
    same_bits: Check, same_report: Check, name: str, options: dict[str, Any]
) -> None:
    agg, params = make(name, options), torch.zeros(D)
    generator = torch.Generator().manual_seed(3)
    for _ in range(8):
        clients = torch.randperm(K, generator=generator)[:4]
        rows = torch.randn(4, D, generator=generator)
        weights = torch.randint(1, 100, (4,), generator=generator).double()
        merged = torch.tensor(options.get("client_weights", [1.0] * K), dtype=torch.float64)
        merged[clients] = weights
        twin_agg, twin = make(name, options | {"client_weights": merged}), params.clone()
        twin_agg.load_state_dict(agg.state_dict())
        expected = twin_agg.step(twin, rows, clients)
        same_report(agg.step(params, rows, clients, weights=weights), expected)
        same_bits(params, twin)
        for key, value in twin_agg.state_dict().items():
            same_bits(agg.state_dict()[key], value, key)


@taking
@given(data=st.data())
def test_any_order_and_form_gives_the_same_bits(
    same_bits: Check, same_report: Check, name: str, options: dict[str, Any], data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, K - 1), min_size=1, unique=True))
    number = st.integers(1, 10**6)
    weights = data.draw(st.lists(number, min_size=len(ids), max_size=len(ids)))
    rows = torch.randn(K, D, generator=torch.Generator().manual_seed(5))
    order = sorted(range(len(ids)), key=ids.__getitem__)
    buffer = fastagg.UpdateBuffer(K, D)
    for client in ids:
        buffer.row(client).copy_(rows[client])
    forms: list[tuple[Any, list[int], Any]] = [
        (rows[ids], ids, weights),
        (rows[sorted(ids)], sorted(ids), torch.tensor(weights)[order]),
        ([rows[k] for k in ids], ids, np.array(weights, dtype=np.float32)),
        (buffer, ids, tuple(weights)),
    ]
    results = []
    for updates, clients, given_weights in forms:
        agg, params = make(name, options), torch.ones(D)
        agg.step(params, rows, range(K))
        report = agg.step(params, updates, clients, weights=given_weights)
        results.append((params, report))
    for params, report in results[1:]:
        same_bits(params, results[0][0])
        same_report(report, results[0][1])


@pytest.mark.parametrize("weight", [1.0, 0.3, 1e-30, 600.0])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_equal_weights_have_the_bits_of_none(same_bits: Check, weight: float, size: int) -> None:
    rows, results = torch.randn(size, D), []
    for weights in (None, [weight] * size):
        agg, params = make("fedavg", {}), torch.zeros(D)
        report = agg.step(params, rows, range(size), weights=weights)
        results.append((params, report.weights))
    same_bits(results[0][0], results[1][0])
    same_bits(results[0][1], results[1][1])


def test_weights_of_rejected_clients_do_not_count() -> None:
    agg, params = make("fedavg", {}, nonfinite="drop", max_norm=None), torch.zeros(D)
    rows = torch.stack([torch.full((D,), value) for value in (4.0, math.nan, 8.0)])
    report = agg.step(params, rows, [5, 3, 1], weights=[1, 100, 3])
    assert report.rejected.tolist() == [3] and (params == 7.0).all()
    with pytest.raises(ValueError, match=r"^weights: expected a weight > 0 among the active"):
        agg.step(params, rows, [5, 3, 1], weights=[0, 100, 0])
    assert (params == 7.0).all()


@every_rule
def test_other_rules_refuse_with_a_reason(
    same_bits: Check, name: str, options: dict[str, Any]
) -> None:
    agg, params = make(name, options), torch.ones(D)
    rows = torch.randn(2, D)
    weighs = name == "fedavg" or (
        name in ("fdms", "fdms-soft", "fdms-means", "fedau") and "client_weights" in options
    )
    assert bool(agg.no_weights) is not weighs
    if hasattr(agg, "client_weights"):  # such a rule need not weigh active clients equally
        assert agg.no_weights != Aggregator.no_weights
    if weighs:
        agg.step(params, rows, [0, 1], weights=[1, 2])
        return
    state = agg.state_dict()
    with pytest.raises(ValueError, match=f"^weights: {name} takes none: it ") as found:
        agg.step(params, rows, [0, 1], weights=[1, 2])
    assert agg.no_weights in str(found.value) and (params == 1.0).all()
    for key, value in agg.state_dict().items():
        same_bits(value, state[key], key)
    agg.step(params, rows, [0, 1])


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "few": ([1.0], ValueError, r"expected one per client, shape \[2\], got \[1\]"),
    "many": ([1.0, 2.0, 3.0], ValueError, r"shape \[2\], got \[3\]"),
    "matrix": ([[1.0, 2.0]], ValueError, r"shape \[2\], got \[1, 2\]"),
    "number": (1.0, ValueError, r"shape \[2\], got \[\]"),
    "negative": ([1.0, -1.0], ValueError, "finite numbers >= 0, got -1"),
    "nan": ([1.0, math.nan], ValueError, "finite numbers >= 0"),
    "infinite": ([1.0, math.inf], ValueError, "finite numbers >= 0"),
    "zeros": ([0.0, 0.0], ValueError, "at least one weight > 0"),
    "text": ("12", TypeError, "expected 2 numbers, got str"),
    "none": ([1.0, None], TypeError, "expected 2 numbers, got list"),
    "complex": (torch.tensor([1 + 1j, 2]), TypeError, "expected real numbers, got torch.complex64"),
    "complex array": (np.array([1 + 1j, 2]), TypeError, "expected real numbers, got complex128"),
    "masked": (np.ma.array([1.0, 2.0], mask=[0, 1]), TypeError, "got a masked array"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_change_nothing(same_bits: Check, case: str) -> None:
    weights, error, match = BAD[case]
    agg, params = make("fdms", {"client_weights": COUNTS}), torch.ones(D)
    agg.step(params, torch.ones(K, D), range(K))
    state, before = agg.state_dict(), params.clone()
    with pytest.raises(error, match=f"^weights: .*{match}"):
        agg.step(params, torch.randn(2, D), [0, 1], weights=weights)
    same_bits(params, before)
    for key, value in agg.state_dict().items():
        same_bits(value, state[key], key)
    agg.step(params, torch.zeros(0, D), [], weights=[])  # a skipped round


def test_a_checkpoint_takes_them_as_the_rule_did(tmp_path: Any) -> None:
    for name, options in (("fdms", {}), ("fdms", {"client_weights": COUNTS}), ("fedavg", {})):
        agg = make(name, options)
        agg.save(tmp_path / "agg")
        assert fastagg.load(tmp_path / "agg").no_weights == agg.no_weights

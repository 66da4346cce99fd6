# SPDX-License-Identifier: Apache-2.0
"""Properties of every rule: invariance to order and thread count, and checks of the input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import Aggregator

K = 6
INTERVALS = {"factors", "intervals", "waiting"}  # of FedAU and FedStale
every_rule = pytest.mark.every_rule  # (name, options): see the conftest of this folder
averaging_rule = pytest.mark.averaging_rule
# Fewer examples: each runs for every configuration, which share most of their code.
few_examples = settings(max_examples=max(3, settings.default.max_examples // 3))


def make(name: str, options: dict[str, Any], num_params: int = 23) -> Aggregator:
    return fastagg.make(name, num_clients=K, num_params=num_params, **options)


def warm(agg: Aggregator, params: Tensor, rounds: int = 6) -> None:
    """Run a few rounds, so that the rule has state that an error could change."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(rounds):
        clients = torch.randperm(K, generator=generator)[:4]
        agg.step(params, torch.randn(4, agg.num_params, generator=generator), clients)


def test_all_rules_are_here(rules_tested: set[str]) -> None:
    assert fastagg.available() == sorted(rules_tested)


# --- order of arrival and number of threads -------------------------------------------


@every_rule
@few_examples
@given(data=st.data())
def test_any_order_and_any_form_of_rows_gives_the_same_bits(
    same_bits: Callable[..., None],
    same_state: Callable[..., None],
    same_report: Callable[..., None],
    name: str,
    options: dict[str, Any],
    data: st.DataObject,
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), "seed"))
    d = data.draw(st.sampled_from([1, 5, 16, 33]), "d")
    sorted_agg, other = make(name, options, d), make(name, options, d)
    params = torch.randn(d, generator=generator)
    twin = params.clone()
    for _ in range(data.draw(st.integers(1, 5), "rounds")):
        ids = data.draw(st.lists(st.integers(0, K - 1), unique=True), "clients")
        rows = {k: torch.randn(d, generator=generator) for k in ids}
        ascending = sorted(ids)
        matrix = torch.stack([rows[k] for k in ascending]) if ids else torch.zeros(0, d)
        first = sorted_agg.step(params, matrix, torch.tensor(ascending, dtype=torch.int64))
        second = other.step(twin, as_drawn(data, [rows[k] for k in ids], d), ids)
        same_bits(params, twin)
        same_state(sorted_agg, other)
        same_report(first, second)


def as_drawn(data: st.DataObject, rows: list[Tensor], d: int) -> Tensor | Sequence[Tensor]:
    form = data.draw(st.sampled_from(["list", "tuple", "matrix", "strided"]), "form")
    if form == "list":
        return rows
    if form == "tuple":
        return tuple(rows)
    matrix = torch.full((len(rows), d + (3 if form == "strided" else 0)), math.nan)
    for s, row in enumerate(rows):
        matrix[s, :d] = row
    return matrix[:, :d]


@every_rule
def test_any_number_of_threads_gives_the_same_bits(
    same_bits: Callable[..., None],
    same_state: Callable[..., None],
    name: str,
    options: dict[str, Any],
) -> None:
    results = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        agg = make(name, options, num_params=30_011)  # several blocks, the last one short
        params = torch.zeros(agg.num_params)
        warm(agg, params, rounds=4)
        results.append((agg, params))
    first_agg, first_params = results[0]
    for agg, params in results[1:]:
        same_bits(params, first_params)
        same_state(agg, first_agg)


# --- identities -------------------------------------------------------------------------------


@averaging_rule
@few_examples
@given(seed=st.integers(0, 2**32), rounds=st.integers(1, 6))
def test_with_all_clients_active_every_averaging_rule_is_the_mean(
    name: str, options: dict[str, Any], seed: int, rounds: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    agg = make(name, options)
    weights = torch.tensor(options.get("client_weights", [1.0] * K), dtype=torch.float64)
    factor = agg.server_lr * options.get("beta", 1.0)
    params = torch.randn(agg.num_params, generator=generator)
    for _ in range(rounds):
        updates = torch.randn(K, agg.num_params, generator=generator)
        expected = params.double() + factor * (weights @ updates.double()) / weights.sum()
        clients = torch.randperm(K, generator=generator)
        report = agg.step(params, updates[clients], clients)
        error = (params - expected).abs().max() / expected.abs().max()
        # One rounding of the result, one of the aggregate or the models; MimiC's corrections
        # carry a rounding of numbers up to 4 times the result from each round before.
        assert error <= (2 + 4 * rounds) * 2.0**-24
        assert report.active.tolist() == list(range(K))


@every_rule
def test_updates_are_never_changed(
    same_bits: Callable[..., None], name: str, options: dict[str, Any]
) -> None:
    agg = make(name, options)
    updates = torch.randn(3, agg.num_params)
    old = updates.clone()
    agg.step(torch.zeros(agg.num_params), updates, [5, 0, 2])
    same_bits(updates, old)


@every_rule
def test_stepping_a_parameter_raises_its_autograd_version(
    name: str, options: dict[str, Any]
) -> None:
    agg = make(name, options)
    params = torch.nn.Parameter(torch.zeros(agg.num_params))
    version = params._version
    agg.step(params, torch.ones(2, agg.num_params, requires_grad=True), [1, 4])
    assert params._version > version
    assert params.requires_grad and params.is_leaf


@every_rule
def test_server_lr_may_change_between_steps(name: str, options: dict[str, Any]) -> None:
    agg = make(name, options)
    params = torch.zeros(agg.num_params)
    agg.server_lr = 0.0
    agg.step(params, torch.ones(2, agg.num_params), [1, 4])
    assert params.tolist() == [0.0] * agg.num_params
    with pytest.raises(ValueError, match="server_lr"):
        agg.server_lr = math.nan


# --- rounds without clients -------------------------------------------------------------------


@every_rule
@pytest.mark.parametrize("empty", ["list", "tensor"])
def test_a_round_without_clients_is_skipped(
    same_bits: Callable[..., None], name: str, options: dict[str, Any], empty: str
) -> None:
    agg = make(name, options)
    params = torch.randn(agg.num_params)
    warm(agg, params)
    old, state = params.clone(), agg.state_dict()
    if empty == "list":
        report = agg.step(params, [], [])
    else:
        none = torch.zeros(0, dtype=torch.int64)
        report = agg.step(params, torch.zeros(0, agg.num_params), none)
    assert report.skipped is not agg.moves_without_clients
    assert report.active.tolist() == report.rejected.tolist() == report.weights.tolist() == []
    assert report.pairs == 0
    if report.skipped:
        same_bits(params, old)
    for key, tensor in agg.state_dict().items():
        if key == "rounds":
            assert int(tensor) == int(state[key]) + 1
        elif key in INTERVALS or key == "before" or (key == "m" and not report.skipped):
            continue  # such rounds count in estimates of rates; a step changes the momentum
        else:
            same_bits(tensor, state[key], key)


# --- bad input --------------------------------------------------------------------------------


def nan_row(rows: Tensor) -> Tensor:
    rows[1, 3] = math.nan
    return rows


def inf_row(rows: Tensor) -> Tensor:
    rows[1, 3] = -math.inf
    return rows


P = Callable[[Tensor], Any]  # params -> params
U = Callable[[Tensor], Any]  # updates -> updates


def same(x: Any) -> Any:
    return x


BAD_INPUT: dict[str, tuple[P, U, Any, type[Exception], str]] = {
    "params short": (lambda p: p[:-1], same, [0, 2, 5], ValueError, "params: expected shape"),
    "params 2-D": (lambda p: p[None], same, [0, 2, 5], ValueError, "params: expected shape"),
    "params double": (torch.Tensor.double, same, [0, 2, 5], TypeError, "params: expected dtype"),
    "params list": (torch.Tensor.tolist, same, [0, 2, 5], TypeError, "params: expected a torch"),
    "params meta": (lambda p: p.to("meta"), same, [0, 2, 5], ValueError, "params: expected device"),
    "params strided": (
        lambda p: torch.stack([p, p], 1)[:, 0],
        same,
        [0, 2, 5],
        ValueError,
        "params: expected a contiguous",
    ),
    "params NaN": (lambda p: p * math.nan, same, [0, 2, 5], ValueError, "params: expected finite"),
    "updates narrow": (same, lambda u: u[:, :-1], [0, 2, 5], ValueError, "updates: expected shape"),
    "updates 1-D": (same, lambda u: u[0], [0], ValueError, "updates: expected shape"),
    "updates 3-D": (same, lambda u: u[None], [0], ValueError, "updates: expected shape"),
    "updates half": (same, torch.Tensor.half, [0, 2, 5], TypeError, "updates: expected dtype"),
    "updates int": (same, torch.Tensor.int, [0, 2, 5], TypeError, "updates: expected dtype"),
    "updates sparse": (same, torch.Tensor.to_sparse, [0, 2, 5], TypeError, "updates: expected a d"),
    "updates meta": (
        same,
        lambda u: u.to("meta"),
        [0, 2, 5],
        ValueError,
        "updates: expected device",
    ),
    "updates transposed": (
        same,
        lambda u: u.T.contiguous().T,
        [0, 2, 5],
        ValueError,
        "updates: expected a contiguous last",
    ),
    "updates numpy": (same, torch.Tensor.numpy, [0, 2, 5], TypeError, "updates: expected a tensor"),
    "row short": (
        same,
        lambda u: [u[0], u[1, 1:], u[2]],
        [0, 2, 5],
        ValueError,
        r"updates\[1\]: expected shape",
    ),
    "row double": (
        same,
        lambda u: [u[0], u[1], u[2].double()],
        [0, 2, 5],
        TypeError,
        r"updates\[2\]: expected dtype",
    ),
    "row strided": (
        same,
        lambda u: [u[0], u[1], u.T.contiguous().T[2]],
        [0, 2, 5],
        ValueError,
        r"updates\[2\]: expected a contiguous",
    ),
    "row list": (same, lambda u: [u[0], [1.0], u[2]], [0, 2, 5], TypeError, r"updates\[1\]"),
    "too few ids": (same, same, [0, 2], ValueError, r"clients: expected one id per row .*\(3\)"),
    "too many ids": (same, same, [0, 2, 5, 1], ValueError, "clients: expected one id per row"),
    "twice": (same, same, [0, 5, 5], ValueError, r"clients: expected distinct ids, got \[5\]"),
    "id too large": (
        same,
        same,
        [0, 2, K],
        IndexError,
        r"clients: expected ids in \[0, 6\), got 6",
    ),
    "id negative": (same, same, [0, 2, -1], IndexError, "clients: .*got -1"),
    "id float": (same, same, [0, 2, 5.0], TypeError, "clients: expected ints"),
    "id bool": (same, same, [0, 2, True], TypeError, "clients: expected ints"),
    "ids string": (same, same, "025", TypeError, "clients: expected a tensor or array"),
    "ids number": (same, same, 3, TypeError, "clients: expected a tensor or array"),
    "ids float": (same, same, torch.tensor([0.0, 2.0, 5.0]), TypeError, "clients: expected int"),
    "ids 2-D": (same, same, torch.tensor([[0, 2, 5]]), ValueError, "clients: expected shape"),
    "ids meta": (
        same,
        same,
        torch.zeros(3, dtype=torch.int64, device="meta"),
        ValueError,
        "clients: .*meta",
    ),
    "NaN": (same, nan_row, [5, 2, 0], ValueError, r"updates: expected finite .*\[2\]"),
    "Inf": (same, inf_row, [5, 2, 0], ValueError, r"updates: expected finite .*\[2\]"),
    "params and updates NaN": (
        lambda p: p * math.nan,
        nan_row,
        [5, 2, 0],
        ValueError,
        "params: expected finite",
    ),
    "overflow": (same, lambda u: torch.full_like(u, 3.3e38), [0, 2, 5], ValueError, "float32"),
}


@every_rule
def test_bad_input_raises_and_changes_nothing(
    same_bits: Callable[..., None], name: str, options: dict[str, Any]
) -> None:
    agg, twin_agg = make(name, options), make(name, options)
    params = torch.randn(agg.num_params)
    twin = params.clone()
    warm(agg, params.clone())
    warm(twin_agg, params.clone())
    lr = agg.server_lr
    for case, (change_params, change_updates, clients, error, match) in BAD_INPUT.items():
        print(case)
        if case == "overflow":
            agg.server_lr = 3e38  # as clipping leaves little of a huge update
        state = agg.state_dict()
        given_params = change_params(params)
        old = given_params.clone() if isinstance(given_params, Tensor) else given_params
        updates = change_updates(torch.randn(3, agg.num_params))
        with pytest.raises(error, match=match):
            agg.step(given_params, updates, clients)
        if isinstance(given_params, Tensor) and given_params.device.type == "cpu":
            same_bits(given_params, old)
        for key, tensor in agg.state_dict().items():
            same_bits(tensor, state[key], key)
        # the next valid step gives the same result as without the failed one
        agg.server_lr = lr
        good = torch.randn(3, agg.num_params)
        agg.step(params, good, [0, 2, 5])
        twin_agg.step(twin, good, [0, 2, 5])
        same_bits(params, twin)


@every_rule
@pytest.mark.parametrize("form", ["matrix", "list", "shifted"])
def test_params_may_not_share_memory_with_a_row(
    name: str, options: dict[str, Any], form: str
) -> None:
    agg = make(name, options)
    bank = torch.randn(4 * agg.num_params)
    rows = bank[: 3 * agg.num_params].view(3, agg.num_params)
    params = rows[1] if form != "shifted" else bank[2 * agg.num_params + 1 : 3 * agg.num_params + 1]
    with pytest.raises(ValueError, match="params: must not share memory"):
        agg.step(params, list(rows) if form == "list" else rows, [0, 1, 2])
    agg.step(bank[3 * agg.num_params :], rows, [0, 1, 2])  # side by side is fine


@every_rule
def test_dropping_a_non_finite_update_is_as_if_its_client_were_absent(
    same_bits: Callable[..., None],
    same_state: Callable[..., None],
    name: str,
    options: dict[str, Any],
) -> None:
    drop = {"nonfinite": "drop", "max_norm": None}
    dropping, twin_agg = make(name, options | drop), make(name, options)
    params = torch.randn(dropping.num_params)
    twin = params.clone()
    warm(dropping, params)
    warm(twin_agg, twin)
    good = torch.randn(2, dropping.num_params)
    bad = [torch.full_like(good[0], math.nan), good[0].clone().fill_(math.inf)]
    report = dropping.step(params, [bad[0], good[0], bad[1], good[1]], [4, 3, 1, 0])
    expected = twin_agg.step(twin, good, [3, 0])
    assert report.rejected.tolist() == [1, 4]
    assert report.active.tolist() == [0, 3]
    same_bits(report.weights, expected.weights)
    assert report.pairs == expected.pairs
    same_bits(params, twin)
    same_state(dropping, twin_agg)


@every_rule
def test_if_all_updates_are_dropped_the_round_is_skipped(
    same_bits: Callable[..., None], name: str, options: dict[str, Any]
) -> None:
    agg = make(name, options | {"nonfinite": "drop"})
    params = torch.randn(agg.num_params)
    old = params.clone()
    report = agg.step(params, torch.full((2, agg.num_params), math.nan), [3, 1])
    assert report.skipped is not agg.moves_without_clients
    assert report.rejected.tolist() == [1, 3]
    same_bits(params, old)  # no rule remembers anything yet


@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        "fdms",
        "amplified",
        "mifa",
        "stale",
        "geometric-median",
        "krum",
        "nnm",
        "bucketing",
    ],
)
def test_a_weight_of_zero_does_not_hide_a_nan(name: str) -> None:
    agg = make(name, {"client_weights": [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]})
    updates = torch.zeros(2, agg.num_params)
    updates[1, -1] = math.nan
    with pytest.raises(ValueError, match=r"client\(s\) \[1\]"):
        agg.step(torch.zeros(agg.num_params), updates, [0, 1])


@every_rule
def test_huge_but_harmless_updates_pass(name: str, options: dict[str, Any]) -> None:
    agg = make(name, options)
    params = torch.zeros(agg.num_params)
    size = 1e18 if agg.server_optimizer.is_adaptive else 1e37  # s has the square
    for _ in range(5):
        agg.step(params.zero_(), torch.full((2, agg.num_params), size), [0, 3])
    assert torch.isfinite(params).all()


# --- checkpoints ------------------------------------------------------------------------------


@every_rule
@few_examples
@given(seed=st.integers(0, 2**32), before=st.integers(0, 4), after=st.integers(1, 4))
def test_saved_and_loaded_it_goes_on_bit_identically(
    tmp_path: Path,
    same_bits: Callable[..., None],
    same_state: Callable[..., None],
    same_report: Callable[..., None],
    random_rounds: Callable[..., Any],
    name: str,
    options: dict[str, Any],
    seed: int,
    before: int,
    after: int,
) -> None:
    agg = make(name, options)
    params = torch.zeros(agg.num_params)
    rounds = list(random_rounds(K, agg.num_params, before + after, seed))
    for updates, clients in rounds[:before]:
        agg.step(params, updates, clients)
    path = tmp_path / "server.safetensors"
    agg.save(path)
    loaded = fastagg.load(path)
    assert type(loaded) is type(agg)
    same_state(agg, loaded)
    twin = params.clone()
    for updates, clients in rounds[before:]:
        same_report(agg.step(params, updates, clients), loaded.step(twin, updates, clients))
        same_bits(params, twin)
    same_state(agg, loaded)


@every_rule
def test_state_dict_is_a_snapshot(
    same_bits: Callable[..., None], name: str, options: dict[str, Any]
) -> None:
    agg = make(name, options)
    params = torch.randn(agg.num_params)
    warm(agg, params)
    state, old = agg.state_dict(), params.clone()
    updates = torch.randn(2, agg.num_params)
    agg.step(params, updates, [0, 1])
    first = params.clone()
    agg.load_state_dict(state)
    params.copy_(old)
    agg.step(params, updates, [0, 1])
    same_bits(params, first)


@every_rule
def test_memory_bytes_counts_the_state(name: str, options: dict[str, Any]) -> None:
    agg = make(name, options)
    state = agg.state_dict()
    assert agg.memory_bytes == sum(t.numel() * t.element_size() for t in state.values())
    stateless = {"fedavg", "amplified", "geometric-median", "krum", "multi-krum", "nnm"}
    remembers = options.get("reuse") or "sketch" in options  # rows, or the number of the round
    stateless_step = agg.server_optimizer.name == "sgd"
    if (name in stateless or options.get("mode") == "client") and stateless_step and not remembers:
        assert agg.memory_bytes == 0


@every_rule
def test_repr_shows_the_class_and_the_given_options(name: str, options: dict[str, Any]) -> None:
    agg = make(name, {"nonfinite": "drop", "max_norm": 2.0} | options)
    shown = repr(agg)
    assert shown.startswith(f"{type(agg).__name__}(num_clients=6, num_params=23, server_lr=")
    assert ", nonfinite='drop', max_norm=2.0" in shown and shown.endswith(")")
    assert all(f", {option}=" in shown for option in options)
    assert "nonfinite" not in repr(make(name, options))

# SPDX-License-Identifier: Apache-2.0
"""``newcomers``, ``confirm``, ``accept``: without a step, growing and forgetting leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator, UpdateBuffer
from fastagg.churn import newcomers

K, MORE = 6, 11
every_rule = pytest.mark.every_rule
Rounds = Callable[..., Iterator[tuple[Tensor, Tensor]]]
Check = Callable[..., None]


class Unwanted(Exception):
    pass


def refuse(reasons: Mapping[int, str]) -> None:
    raise Unwanted


def refuse_if(
    expected: set[int], seen: list[Mapping[int, str]], reasons: Mapping[int, str]
) -> None:
    seen.append(dict(reasons))
    if reasons.keys() == expected:
        raise Unwanted


def rows_of(options: Mapping[str, Any], count: int) -> int:
    return min(count, int(options.get("buffer_size", count)))


def trained(
    name: str, options: dict[str, Any], rounds: Rounds, columns: int
) -> tuple[Aggregator, Tensor]:
    agg = fastagg.make(name, num_clients=K, num_params=columns, **options)
    params = torch.randn(columns, generator=torch.Generator().manual_seed(1))
    for updates, clients in rounds(K, columns, 12, 7):
        agg.step(params, updates, clients)
    everyone = torch.randn(K, columns, generator=torch.Generator().manual_seed(2))
    agg.step(params, everyone, range(K))
    for updates, clients in rounds(K, columns, 2, 8):
        agg.step(params, updates, clients)
    return agg, params


def wider(options: Mapping[str, Any]) -> bool:
    """Return whether a rule grows without further options."""
    weights = options.get("client_weights")
    return weights is None or len(set(weights)) == 1


@every_rule
# A vector [d] is none of K clients.
@pytest.mark.parametrize(("columns", "owned"), [(23, True), (K, False)])
def test_without_a_step_nothing_has_changed(
    name: str,
    options: dict[str, Any],
    random_rounds: Rounds,
    same_state: Check,
    same_bits: Check,
    columns: int,
    owned: bool,
) -> None:
    (agg, params), (twin, vector) = (
        trained(name, options, random_rounds, columns) for _ in range(2)
    )
    forgotten = [] if name == "mifa-client" else [4, 1]
    updates = torch.randn(3, columns, generator=torch.Generator().manual_seed(3))
    for number in [K, MORE] if wider(options) else [K]:
        shown, report = repr(agg), agg.last_report
        ids = [4, 0, min(5, number - 1)]
        given: Any = updates
        if owned and rows_of(options, 3) == 3 and "staleness" not in options:
            given = UpdateBuffer(number, columns)
            for client, row in zip(ids, updates, strict=True):
                given.row(client).copy_(row)
        with pytest.raises(Unwanted), newcomers(agg, number, forgotten):
            assert agg.num_clients == number
            agg.step(params, given, ids, confirm=refuse)
        if given is not updates:
            same_bits(torch.stack(given.rows(ids)), updates)
        with newcomers(agg, number, forgotten):
            pass
        assert repr(agg) == shown and agg.last_report is report
        assert (agg.num_clients, agg.committed) == (K, twin.committed)
        same_state(agg, twin)
    for updates, clients in random_rounds(K, columns, 6, 9):
        agg.step(params, updates, clients)
        twin.step(vector, updates, clients)
        same_bits(params, vector)
    same_state(agg, twin)


@every_rule
def test_with_a_step_both_have_happened(
    name: str,
    options: dict[str, Any],
    random_rounds: Rounds,
    same_state: Check,
    same_bits: Check,
) -> None:
    columns, number = 23, MORE if wider(options) else K
    (agg, params), (twin, vector) = (
        trained(name, options, random_rounds, columns) for _ in range(2)
    )
    forgotten = [] if name == "mifa-client" else [4, 1]
    updates = torch.randn(3, columns, generator=torch.Generator().manual_seed(3))
    seen: list[Mapping[int, str]] = []
    with newcomers(agg, number, forgotten):
        report = agg.step(params, updates, [4, 0, number - 1], confirm=seen.append)
    twin.grow(number)
    twin.forget(forgotten)
    twin.step(vector, updates, [4, 0, number - 1])
    assert agg.num_clients == number and seen[-1] == report.reasons
    same_bits(params, vector)
    same_state(agg, twin)


@every_rule
def test_a_step_that_is_not_confirmed_changes_nothing(
    name: str,
    options: dict[str, Any],
    random_rounds: Rounds,
    same_state: Check,
    same_bits: Check,
) -> None:
    """Also one without clients, and one whose rows are all left out."""
    options = {**options, "nonfinite": "drop", "max_norm": None}
    (agg, params), (twin, vector) = (trained(name, options, random_rounds, 23) for _ in range(2))
    broken = torch.full((2, 23), torch.nan)
    rows = torch.cat([torch.ones(1, 23), broken[:1]])
    cases: list[tuple[Any, list[int], set[int]]] = [
        (rows, [3, 1], {1}),
        (broken, [3, 1], {1, 3}),
        ([], [], set()),
    ]
    for updates, clients, expected in cases:
        seen: list[Mapping[int, str]] = []
        confirm = partial(refuse_if, expected, seen)
        try:
            with pytest.raises(Unwanted):
                agg.step(params, updates, clients, confirm=confirm)
            assert seen[-1].keys() == expected
        except ValueError as error:  # too few rows for this rule
            assert "num_byzantine" in str(error)
        same_bits(params, vector)
        same_state(agg, twin)
    report = agg.step(params, rows, [3, 1], confirm=lambda reasons: None)
    assert report.reasons == twin.step(vector, rows, [3, 1]).reasons
    same_bits(params, vector)


@every_rule
def test_parameters_that_are_not_accepted_change_nothing(
    name: str,
    options: dict[str, Any],
    random_rounds: Rounds,
    same_state: Check,
    same_bits: Check,
) -> None:
    check_accept(name, options, random_rounds, same_state, same_bits)


@pytest.mark.parametrize("optimizer", ["momentum", "nesterov", "adam", "yogi", "adagrad"])
@pytest.mark.parametrize("name", ["fedavg", "mifa"])
def test_moments_do_not_change_either(
    name: str, optimizer: str, random_rounds: Rounds, same_state: Check, same_bits: Check
) -> None:
    check_accept(name, {"server_optimizer": optimizer}, random_rounds, same_state, same_bits)


def check_accept(
    name: str, options: dict[str, Any], rounds: Rounds, same_state: Check, same_bits: Check
) -> None:
    """``accept`` gets the parameters of the step, and refuses it without a trace."""
    (agg, params), (twin, vector) = (trained(name, options, rounds, 23) for _ in range(2))
    count = rows_of(options, K)
    updates = torch.randn(count, 23, generator=torch.Generator().manual_seed(5))
    seen: list[Tensor] = []

    def refuse_params(moved: Tensor) -> None:
        seen.append(moved.clone())
        moved.fill_(torch.nan)  # it is a copy
        raise Unwanted

    with pytest.raises(Unwanted):
        agg.step(params, updates, range(count), accept=refuse_params)
    same_bits(params, vector)
    same_state(agg, twin)
    agg.step(params, updates, range(count), accept=seen.append)
    twin.step(vector, updates, range(count))
    for moved in (params, *seen):
        same_bits(moved, vector)
    same_state(agg, twin)


def test_wrong_arguments_change_nothing(random_rounds: Rounds, same_state: Check) -> None:
    agg, _ = trained("mifa", {}, random_rounds, 23)
    before, attributes = agg.state_dict(), copy.copy(vars(agg))
    for number, forgotten in ((MORE, [MORE]), (MORE, [1, 1]), (K - 1, [])):
        with pytest.raises((ValueError, IndexError)), newcomers(agg, number, forgotten):
            raise AssertionError
        assert vars(agg) == attributes
        assert all(torch.equal(value, before[key]) for key, value in agg.state_dict().items())


def test_memory_in_files_grows_back(random_rounds: Rounds, tmp_path: Path) -> None:
    options = {"memory_folder": tmp_path, "memory_dtype": "bfloat16"}
    (agg, params), (twin, vector) = (
        trained("stale", options, random_rounds, 300) for _ in range(2)
    )
    with newcomers(agg, MORE, [0, 5]):
        pass
    for updates, clients in random_rounds(K, 300, 6, 9):
        agg.step(params, updates, clients)
        twin.step(vector, updates, clients)
    assert torch.equal(params, vector)
    state = twin.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in agg.state_dict().items())


def test_a_learning_rate_does_not_change_within_a_step() -> None:
    """It was checked with the rate of before that the step stays in the range of float32."""
    for options in ({}, {"server_optimizer": "momentum"}):
        agg = fastagg.make("mifa", num_clients=3, num_params=2, **options)
        params, seen = torch.ones(2), []

        def confirm(reasons: Mapping[int, str]) -> None:
            with pytest.raises(RuntimeError, match="server_lr: expected no other call"):
                agg.server_lr = 3e38  # noqa: B023 (called in this iteration)
            seen.append(reasons)  # noqa: B023

        agg.step(params, torch.full((2, 2), 3.0), [0, 1], confirm=confirm)
        assert params.tolist() == [3.0, 3.0] and seen == [{}]
        agg.server_lr = 0.5
        assert agg.server_lr == 0.5

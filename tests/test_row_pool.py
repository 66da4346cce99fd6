# SPDX-License-Identifier: Apache-2.0
"""A pool of rows for the active clients gives the same results as one row per client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fastagg
from fastagg.updates.row_pool import RowPool


@pytest.mark.parametrize(
    "rule", ["fedavg", "fdms", "mifa", "mimic", "stale", "stale-models", "fedvarp"]
)
def test_the_same_bits_as_with_a_full_buffer(rule: str) -> None:
    K, d = 9, 30
    pool, full = RowPool(K, d), fastagg.UpdateBuffer(K, d)
    aggregators = [fastagg.make(rule, num_clients=K, num_params=d) for _ in range(2)]
    params = [torch.zeros(d), torch.zeros(d)]
    for _ in range(6):
        clients = torch.randperm(K)[:4].tolist()
        for client in clients:
            update = torch.randn(d)
            pool.row(client).copy_(update)
            full.row(client).copy_(update)
        aggregators[0].step(params[0], pool, clients)
        aggregators[1].step(params[1], full, clients)
        pool.release()
        assert torch.equal(*params)
    assert pool.allocated <= 4 + 16  # of the nine clients, four answer at a time


def test_rows_are_distinct_and_stay_until_released() -> None:
    pool = RowPool(40, 3)
    rows = [pool.row(client) for client in range(40)]
    assert len({row.data_ptr() for row in rows}) == 40
    assert all(pool.row(client) is rows[client] for client in range(40))
    allocated = pool.allocated
    for _ in range(5):
        pool.release()
        for client in range(40):
            pool.row(client)
    assert pool.allocated == allocated


def test_an_id_of_any_integer_type_is_the_same_client() -> None:
    pool = RowPool(5, 3)
    row = pool.row(3)
    assert pool.row(torch.tensor(3)) is row and pool.row(np.int64(3)) is row  # type: ignore[arg-type]
    clients = torch.tensor([1, 3])
    for client in clients:
        pool.row(client).fill_(float(client))  # type: ignore[arg-type]
    params = torch.zeros(3)
    fastagg.make("fedavg", num_clients=5, num_params=3).step(params, pool, clients)
    assert params.tolist() == [2.0, 2.0, 2.0]
    new = [torch.ones(3), torch.ones(3)]
    pool.exchange(list(clients), new)  # type: ignore[arg-type]
    assert pool.row(1) is new[0] and pool.row(3) is new[1]


@pytest.mark.parametrize("client", [2.5, "1", None, True, torch.tensor(1.5)])
def test_ids_that_are_no_integers(client: Any) -> None:
    for buffer in (RowPool(5, 3), fastagg.UpdateBuffer(5, 3)):
        with pytest.raises(TypeError, match="integer"):
            buffer.row(client)


def test_a_mask_is_no_list_of_ids() -> None:
    for buffer in (RowPool(5, 3), fastagg.UpdateBuffer(5, 3)):
        with pytest.raises(TypeError, match=r"^client: expected an integer, got True"):
            buffer.rows(torch.tensor([True, False, True]))


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ((0, 3), ValueError, "capacity"),
        (("5", 3), TypeError, "capacity"),
        ((5, 3, "gpu"), ValueError, "device"),
    ],
)
def test_bad_sizes_and_devices(
    arguments: tuple[Any, ...], error: type[Exception], name: str
) -> None:
    with pytest.raises(error, match=f"^{name}: expected "):
        RowPool(*arguments)


@pytest.mark.parametrize("client", [-1, 5])
def test_ids_out_of_range(client: int) -> None:
    with pytest.raises(IndexError, match="client"):
        RowPool(5, 3).row(client)

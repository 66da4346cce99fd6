# SPDX-License-Identifier: Apache-2.0
"""The arguments of a step, read in one call or one by one, and the small tensors of a step."""

from __future__ import annotations

import gc
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import _C
from fastagg.ops import memory
from fastagg.updates import cohort
from fastagg.updates.any_rows import SMALL_BYTES, each_row
from fastagg.updates.buffer import UpdateBuffer
from fastagg.updates.cohort import Cohort, read_cohort
from fastagg.updates.row_pool import RowPool

K, S, D = 9, 4, 5
CPU = torch.device("cpu")


def matrix(rows: int = S, columns: int = D) -> Tensor:
    return torch.arange(1.0, rows * columns + 1).view(rows, columns)


def resized() -> Tensor:
    tensor = torch.zeros(D)
    tensor.untyped_storage().resize_(4)
    return tensor


def buffer() -> UpdateBuffer:
    made = UpdateBuffer(K, D)
    for client in range(K):
        made.row(client).fill_(client)
    return made


def pool() -> UpdateBuffer:
    made = RowPool(K, D)
    for client in range(K):
        made.row(client).fill_(client)
    return made


whole = torch.arange(100.0)

PARAMS: dict[str, Callable[[], object]] = {
    "plain": lambda: torch.zeros(D),
    "view": lambda: torch.zeros(3, D)[1],
    "strided": lambda: torch.zeros(2 * D)[::2],
    "short": lambda: torch.zeros(D - 1),
    "matrix": lambda: torch.zeros(1, D),
    "float64": lambda: torch.zeros(D, dtype=torch.float64),
    "gradient": lambda: torch.zeros(D, requires_grad=True),
    "copied": lambda: torch.zeros(D, requires_grad=True) * 2.0,
    "parameter": lambda: torch.nn.Parameter(torch.zeros(D)),
    "meta": lambda: torch.zeros(D, device="meta"),
    "resized": resized,
    "inside": lambda: whole[12 : 12 + D],
    "list": lambda: [0.0] * D,
}
UPDATES: dict[str, Callable[[], object]] = {
    "matrix": matrix,
    "columns": lambda: matrix(S, D + 3)[:, 1 : D + 1],
    "repeated": lambda: torch.ones(D).expand(S, D),
    "turned": lambda: matrix(D, S).T,
    "wide": lambda: matrix(S, D + 1),
    "few": lambda: matrix(S - 1),
    "overlapping": lambda: whole[: S * D].view(S, D),
    "float64": lambda: matrix().double(),
    "negated": lambda: torch._neg_view(matrix()),
    "cut": lambda: matrix()[:, :D].as_strided((S, D), (D, 1)),
    "list": lambda: list(matrix().unbind()),
    "tuple": lambda: tuple(matrix().unbind()),
    "parameters": lambda: [torch.nn.Parameter(row.clone()) for row in matrix()],
    "a strided row": lambda: [*matrix(S - 1).unbind(), torch.zeros(2 * D)[::2]],
    "a short row": lambda: [*matrix(S - 1).unbind(), torch.zeros(D - 1)],
    "an array": lambda: [*matrix(S - 1).unbind(), np.zeros(D)],
    "a shared row": lambda: [*matrix(S - 1).unbind(), whole[10 : 10 + D]],
    "buffer": buffer,
    "pool": pool,
    "wrong buffer": lambda: UpdateBuffer(K, D + 1),
    "small buffer": lambda: UpdateBuffer(3, D),
    "None": lambda: None,
}
CLIENTS: dict[str, Callable[[], object]] = {
    "ascending": lambda: [1, 2, 5, 8],
    "list": lambda: [5, 0, 8, 2],
    "tuple": lambda: (5, 0, 8, 2),
    "tensor": lambda: torch.tensor([5, 0, 8, 2]),
    "every second": lambda: torch.tensor([5, 1, 0, 1, 8, 1, 2])[::2],
    "int32": lambda: torch.tensor([5, 0, 8, 2], dtype=torch.int32),
    "array": lambda: np.array([5, 0, 8, 2]),
    "numpy ints": lambda: list(np.array([5, 0, 8, 2])),
    "twice": lambda: [5, 0, 5, 2],
    "too large": lambda: torch.tensor([5, 0, K, 2]),
    "negative": lambda: [5, -1, 8, 2],
    "huge": lambda: [5, 1 << 70, 8, 2],
    "floats": lambda: torch.tensor([5.0, 0.0, 8.0, 2.0]),
    "bools": lambda: [True, 0, 8, 2],
    "fewer": lambda: [5, 0],
    "none": lambda: [],
}


def outcome(
    params: object, updates: object, clients: object, gather: bool
) -> tuple[Any, list[str]]:
    """Return what ``read_cohort`` returned or raised, and its warnings."""
    arguments: Any = (params, updates, clients)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        try:
            found = read_cohort(*arguments, num_clients=K, num_params=D, device=CPU, gather=gather)
        except Exception as error:
            return (type(error), str(error)), [str(w.message) for w in caught]
    return found, [str(w.message) for w in caught]


def assert_same(one: Cohort, two: Cohort) -> None:
    assert one.ids == two.ids
    assert all(type(client) is int for client in one.ids)
    assert one.clients.dtype == two.clients.dtype == torch.int64
    assert torch.equal(one.clients, two.clients)
    assert type(one.rows) is type(two.rows)
    for row, other in zip(each_row(one.rows), each_row(two.rows), strict=True):
        assert isinstance(row, Tensor)
        assert isinstance(other, Tensor)
        assert torch.equal(row, other)
    assert one.owner is two.owner
    assert (one.ages, one.weights, one.scales) == (two.ages, two.weights, two.scales)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("gather", [False, True])
def test_arguments_read_in_one_call_are_those_read_one_by_one(
    params: str, gather: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for updates, clients in itertools.product(UPDATES, CLIENTS):
        given = PARAMS[params](), UPDATES[updates](), CLIENTS[clients]()
        found, told = outcome(*given, gather)
        with monkeypatch.context() as careful:
            careful.setattr(cohort, "usual_cohort", lambda *_: None)
            expected, said = outcome(*given, gather)
        assert told == said, (updates, clients)
        if isinstance(expected, Cohort):
            assert_same(found, expected)
        else:
            assert found == expected, (updates, clients)


@pytest.mark.parametrize("updates", ["matrix", "columns", "repeated", "list", "tuple", "buffer"])
@pytest.mark.parametrize("clients", ["ascending", "list", "tuple", "tensor", "every second"])
def test_the_usual_forms_are_read_in_one_call(updates: str, clients: str) -> None:
    rows: Any = UPDATES[updates]()
    by_client = updates == "buffer"
    found = memory.usual_cohort(
        torch.zeros(D),
        rows.every_row if by_client else rows,
        CLIENTS[clients](),
        K,
        D,
        by_client,
        SMALL_BYTES,
    )
    assert found is not None


def test_a_large_matrix_is_not_copied() -> None:
    updates, params = matrix(), torch.zeros(D)
    for most, copied in ((updates.nbytes, True), (updates.nbytes - 1, False)):
        found = memory.usual_cohort(params, updates, [5, 0, 8, 2], K, D, False, most)
        assert found is not None
        assert isinstance(found[2], Tensor) == copied
        if not copied:
            assert [row.data_ptr() for row in found[2]] == [
                updates[s].data_ptr() for s in (1, 3, 0, 2)
            ]


def test_the_memory_of_rows_is_kept_by_what_is_returned() -> None:
    found = memory.usual_cohort(torch.zeros(D), [r.clone() for r in matrix()], [5, 0, 8, 2], K, D,
                                False, 0)  # fmt: skip
    assert found is not None
    assert torch.equal(torch.stack(list(found[2])), matrix()[[1, 3, 0, 2]])


numbers = st.floats(allow_nan=False, width=64)


@given(st.lists(numbers))
def test_numbers_as_tensors(values: list[float]) -> None:
    found = memory.float_tensor(values)
    assert found.dtype == torch.float64
    assert found.tolist() == values
    expected = torch.tensor(values, dtype=torch.float64).to(torch.float32)
    assert torch.equal(memory.rounded(found), expected)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_ints_as_tensors(values: list[int]) -> None:
    found = memory.int_tensor(values)
    assert found.dtype == torch.int64
    assert found.tolist() == values


def test_wrong_items_raise() -> None:
    with pytest.raises(TypeError):
        memory.int_tensor([1, "a"])  # type: ignore[list-item]
    with pytest.raises(OverflowError):
        memory.int_tensor([1 << 70, 1])
    with pytest.raises(TypeError):
        memory.float_tensor([1.0, None])  # type: ignore[list-item]
    with pytest.raises(IndexError):
        memory.flags([3], 3)
    with pytest.raises(IndexError):
        memory.take_rows(matrix(), [S])
    with pytest.raises(IndexError):
        memory.replaced(torch.zeros(3, dtype=torch.float64), [3], [1.0])
    with pytest.raises(ValueError, match="items"):
        memory.replaced(torch.zeros(3, dtype=torch.float64), [1], [])
    with pytest.raises(IndexError):
        memory.shares_by_friend(torch.zeros(3, dtype=torch.float64), torch.tensor([0, 3, 1]), [0])


def test_rounding_keeps_nan_and_overflows_to_infinity() -> None:
    found = memory.rounded(torch.tensor([math.nan, 1e300, -1e300, 1e-300], dtype=torch.float64))
    assert math.isnan(found[0])
    assert found[1:].tolist() == [math.inf, -math.inf, 0.0]


def test_flags_and_rows() -> None:
    assert memory.flags([2, 0], 4).tolist() == [True, False, True, False]
    rows = matrix(S, D + 2)[:, 1 : D + 1]
    assert torch.equal(memory.take_rows(rows, [3, 0, 3]), rows[[3, 0, 3]])


@settings(max_examples=50)
@given(st.data())
def test_shares_go_to_friends_in_the_order_of_clients(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 30))
    shares = data.draw(st.lists(st.floats(0.0, 1.0), min_size=size, max_size=size))
    friends = data.draw(st.lists(st.integers(-1, size - 1), min_size=size, max_size=size))
    ids = data.draw(st.lists(st.integers(0, size - 1), unique=True, min_size=1))
    found = memory.shares_by_friend(
        torch.tensor(shares, dtype=torch.float64), torch.tensor(friends), ids
    )
    sums = np.bincount(np.array(friends) + 1, shares, size + 1)[1:]
    without = [share for share, k in zip(shares, friends, strict=True) if k < 0]
    assert found.tolist() == [sums[k] + math.fsum(without) / len(ids) for k in ids]


weights = st.one_of(
    st.floats(0.0, 1e300),
    st.floats(0.0, 1.0),
    # Sums that are halfway between two numbers, or almost: 2^53 + 1, and what is below it.
    st.builds(math.ldexp, st.integers(0, 3), st.integers(-1074, 900)),
    st.sampled_from([0.0, 1.0, 2.0**53, 2.0**-53, 2.0**-54, 2.0**-106, 5e-324]),
)


@settings(max_examples=500)
@given(st.lists(weights, min_size=1, max_size=40), st.data())
def test_shares_are_divided_by_the_correctly_rounded_sum(
    values: list[float], data: st.DataObject
) -> None:
    clients = data.draw(st.lists(st.integers(0, len(values) - 1), unique=True))
    found = memory.shares_of(
        torch.tensor(values, dtype=torch.float64), torch.tensor(clients).long()
    )
    chosen = [values[client] for client in clients]
    whole = math.fsum(chosen)
    if whole == 0.0:
        assert found is None
    else:
        assert found is not None and found.tolist() == [value / whole for value in chosen]


@pytest.mark.parametrize(
    ("values", "whole"),
    [
        ([2.0**53, 1.0], 2.0**53),  # halfway: to even
        ([2.0**53, 1.0, 2.0**-53], 2.0**53 + 2.0),  # above it
        ([2.0**53, 1.0, 2.0**-53, 2.0**-53], 2.0**53 + 2.0),
        ([2.0**53 + 2.0, 1.0], 2.0**53 + 4.0),
        ([1e16, 1.0, 1e-16], 1e16 + 2.0),
    ],
)
def test_a_sum_that_is_almost_halfway(values: list[float], whole: float) -> None:
    for order in itertools.permutations(range(len(values))):
        found = memory.shares_of(torch.tensor(values, dtype=torch.float64), torch.tensor(order))
        assert found is not None and found.tolist() == [values[i] / whole for i in order]


def test_no_shares_of_an_infinite_sum_or_of_unknown_clients() -> None:
    large = torch.tensor([1.7e308, 1.7e308], dtype=torch.float64)
    assert memory.shares_of(large, torch.tensor([0, 1])) is None
    assert memory.shares_of(large, torch.tensor([0])) is not None
    for client in (-1, 2):
        with pytest.raises(IndexError, match="positions"):
            memory.shares_of(large, torch.tensor([client]))
    with pytest.raises(TypeError, match="values"):
        memory.shares_of(large.float(), torch.tensor([0]))


def test_tensors_of_any_shape() -> None:
    assert memory.uninitialized([0], torch.float32).shape == (0,)
    found = memory.uninitialized([3, 2], torch.float64)
    assert found.shape == (3, 2) and found.dtype == torch.float64 and found.is_contiguous()
    with pytest.raises(ValueError, match="shape"):
        memory.uninitialized([2, -1], torch.float32)


def test_items_at_positions_and_on_the_diagonal() -> None:
    values = torch.tensor([1.0, math.nan, 3.0], dtype=torch.float64)
    assert memory.picked(values, torch.tensor([2, 0, 2])).tolist() == [3.0, 1.0, 3.0]
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="positions"):
            memory.picked(values, torch.tensor([wrong]))
    square = torch.arange(9, dtype=torch.float64).view(3, 3)
    assert memory.diagonal(square).tolist() == [0.0, 4.0, 8.0]
    for matrix in (square[:2], square[0], square.float()):
        with pytest.raises((TypeError, ValueError), match="matrix"):
            memory.diagonal(matrix)


def test_counters() -> None:
    counter = torch.tensor(2**40)
    memory.count_up_(counter)
    assert memory.count_of(counter) == 2**40 + 1 == int(counter)
    for wrong in (torch.tensor([1]), torch.tensor(1.0)):
        with pytest.raises((TypeError, ValueError), match="counter"):
            memory.count_up_(wrong)


@given(st.lists(st.tuples(st.floats(-1e100, 1e100), st.floats(-1e100, 1e100))))
def test_dot_products_are_summed_from_left_to_right(pairs: list[tuple[float, float]]) -> None:
    both = torch.tensor(pairs, dtype=torch.float64).view(-1, 2)
    a, b = both[:, 0].contiguous(), both[:, 1].contiguous()
    size = sum(abs(x * y) for x, y in pairs)
    # A compiler may fuse products and sums: each of n sums is rounded by at most 2^-53.
    assert abs(memory.dot(a, b) - math.fsum(x * y for x, y in pairs)) <= len(pairs) * 2**-52 * size
    with pytest.raises(ValueError, match="b: expected shape"):
        memory.dot(a, torch.zeros(len(pairs) + 1, dtype=torch.float64))


def test_items_are_replaced_in_a_copy() -> None:
    values = torch.arange(5, dtype=torch.float64)
    after, old = memory.replaced(values, [3, 0], [7.0, 8.0])
    assert old == [3.0, 0.0]
    assert after.tolist() == [8.0, 1.0, 2.0, 7.0, 4.0]
    assert values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 90), max_size=6),
    st.integers(1, 6),
    st.sets(st.integers(0, 12), max_size=4),
)
def test_the_first_row_that_shares_memory_is_found(
    rows: list[int], length: int, others: set[int]
) -> None:
    vectors = [whole[7 * k : 7 * k + 7] for k in others]
    expected = next(
        (s for s, row in enumerate(rows)
         if any(row < 7 * k + 7 and 7 * k < row + length for k in others)),
        -1,
    )  # fmt: skip
    listed = [whole[row : row + length] for row in rows]
    assert memory.shared_row(listed, vectors) == expected
    assert memory.shared_row([object(), *listed], vectors) == (
        expected + 1 if expected >= 0 else -1
    )


def test_the_rows_of_a_matrix_that_share_memory_are_found() -> None:
    rows = torch.arange(60.0).view(6, 10)[:, 2:6]
    whole_rows = rows._base
    assert whole_rows is not None
    flat = whole_rows.view(-1)
    assert memory.shared_row(rows, [flat[26:32]]) == -1
    assert memory.shared_row(rows, [flat[27:33]]) == 3
    assert memory.shared_row(rows, []) == -1


@pytest.mark.parametrize(
    "numbers",
    [
        torch.zeros(1, dtype=torch.int64).expand(1 << 40),  # 8 TiB, if it were copied
        np.broadcast_to(np.int64(0), (1 << 40,)),
        np.broadcast_to(np.uint8(0), (1 << 40,)),
        range(1 << 40),
    ],
    ids=["tensor", "array", "bytes", "range"],
)
def test_ids_and_ages_without_end_are_refused_and_not_copied(numbers: Any) -> None:
    agg = fastagg.make("fedbuff", num_clients=4, num_params=8)
    params, rows = torch.zeros(8), torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"clients: expected at most 1048576 numbers, got 1099"):
        agg.step(params, rows, numbers)
    with pytest.raises(ValueError, match=r"clients: expected at most 1048576 numbers, got 1099"):
        agg.step(params, UpdateBuffer(4, 8), numbers)
    with pytest.raises(ValueError, match=r"ages: expected at most 1048576 numbers, got 1099"):
        agg.step(params, rows, [0, 1], ages=numbers)
    with pytest.raises(ValueError, match=r"clients: expected at most 1048576 numbers, got 1099"):
        agg.forget(numbers)
    assert params.tolist() == [0.0] * 8


def test_masked_ids_are_refused() -> None:
    agg = fastagg.make("fedavg", num_clients=4, num_params=8)
    with pytest.raises(TypeError, match="clients: expected integers, got a masked array"):
        agg.step(torch.zeros(8), torch.ones(2, 8), np.ma.array([0, 1], mask=[0, 1]))


NO_ROWS: dict[str, Callable[[int], Any]] = {
    "array": lambda d: torch.from_numpy(np.empty((0, d), np.float32)),  # strides of 0
    "transposed": lambda d: torch.empty(d, 0).T,
    "stream": lambda d: fastagg.TensorRows(torch.empty(0, d)),
    "converted": lambda d: fastagg.TensorRows(torch.empty(0, d, dtype=torch.float16)),
    "blocks": lambda d: fastagg.ColumnBlocks(lambda: [], num_rows=0, num_params=d),
}


@pytest.mark.parametrize("form", NO_ROWS)
def test_any_form_may_have_no_rows(form: str) -> None:
    agg, params = fastagg.FedAvg(num_clients=K, num_params=D), torch.ones(D)
    assert agg.step(params, NO_ROWS[form](D), []).skipped and bool((params == 1.0).all())
    with pytest.raises(ValueError, match=rf"^updates: expected .*{D}.*, got .*{D + 1}"):
        agg.step(params, NO_ROWS[form](D + 1), [])


def test_a_stream_of_an_empty_sequence_has_no_rows() -> None:
    agg, rows = fastagg.FedAvg(num_clients=K, num_params=D), fastagg.TensorRows([])
    assert (len(rows), rows.num_params) == (0, 0)
    assert agg.step(torch.zeros(D), rows, []).skipped
    with pytest.raises(ValueError, match=r"^clients: expected one id per row"):
        agg.step(torch.zeros(D), rows, [1])


class EmptiesAList:
    """A cycle whose finalizer empties a list, whenever the garbage collector finds it."""

    def __init__(self, items: list[Tensor]) -> None:
        self.me, self.items = self, items

    def __del__(self) -> None:
        self.items.clear()


@pytest.mark.parametrize("threshold", [1, 2, 5, 10, 100])
def test_rows_stay_alive_if_a_finalizer_empties_their_list(threshold: int) -> None:
    updates = [torch.full((D,), float(k)) for k in range(1000)]
    usual, before = gc.isenabled(), gc.get_threshold()
    gc.disable()
    gc.collect()
    try:
        EmptiesAList(updates)
        gc.set_threshold(threshold)
        gc.enable()
        found = _C.usual_cohort(torch.zeros(D), updates, list(range(1000)), 1000, D, False, 0)
    finally:
        gc.set_threshold(*before)
        (gc.enable if usual else gc.disable)()
    if found is not None:  # the list had all rows when they were read
        assert [float(row[0]) for row in found[2]] == list(range(1000))


def test_numbers_are_read_from_a_copy_of_their_list() -> None:
    class Empties:
        def __init__(self, items: list[object]) -> None:
            self.items = items

        def __index__(self) -> int:
            self.items.clear()
            return 7

    items: list[object] = []
    items += [Empties(items), *range(10_000)]
    assert _C.int_tensor(items).tolist() == [7, *range(10_000)]
    assert items == []
    with pytest.raises(TypeError, match="expected a sequence of numbers"):
        _C.int_tensor(3)
    with pytest.raises(TypeError):
        _C.int_tensor([1, "two", 3])


@pytest.mark.parametrize("weights", [[10**400, 1], torch.ones(2).to_sparse()])
def test_weights_that_are_no_numbers(weights: Any) -> None:
    agg, params = fastagg.make("fedavg", num_clients=2, num_params=3), torch.zeros(3)
    with pytest.raises(TypeError, match="weights: expected 2 numbers"):
        agg.step(params, torch.ones(2, 3), [0, 1], weights=weights)
    assert not params.any() and agg.committed == 0

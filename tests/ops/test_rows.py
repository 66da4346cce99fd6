# SPDX-License-Identifier: Apache-2.0
"""weighted_sum_, mimic_, memory_update_ and abs_max: the ops that pass over d once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference

# Blocks are 1,024 columns for a small d and 16,384 for a large one, less in mimic_ with many rows;
# rows are taken in groups of 8, 4, 2 and 1, vectors are 16, 8 or 4 floats, steps 64.
SHAPES = [
    (1, 1), (2, 5), (3, 64), (4, 4096), (5, 4099), (9, 12_345), (70, 2_049), (600, 700),
    (2, 600_001),
]  # fmt: skip
# Rows are added in float32 in groups of at most 8 (9 roundings of 2**-24 of the sum of magnitudes),
# in float64 beyond, and the result is rounded at most twice (mimic_: v, then v - u).
ROUNDED = 11 * 2.0**-24


class Server:
    """Random arguments of the right shapes."""

    def __init__(self, S: int, d: int, seed: int = 0, K: int | None = None) -> None:
        g = torch.Generator().manual_seed(seed)
        K = K or S + 3
        self.updates = torch.randn(S, d, generator=g) + torch.randn(d, generator=g)
        self.clients = torch.randperm(K, generator=g)[:S]
        self.weights = torch.rand(S, generator=g, dtype=torch.float64)
        self.params = torch.randn(d, generator=g)
        self.memory = torch.randn(K, d, generator=g)
        self.total = self.memory.double().sum(dim=0)

    def permuted(self, order: Tensor) -> Server:
        other = copy.deepcopy(self)
        other.updates = self.updates[order]
        other.clients = self.clients[order]
        other.weights = self.weights[order]
        return other

    def state(self) -> list[Tensor]:
        return [self.params, self.memory, self.total]


def mimic(module: object, s: Server) -> None:
    module.mimic_(s.params, s.updates, s.memory, s.clients, 0.7)  # type: ignore[attr-defined]


def remember_updates(module: object, s: Server) -> None:
    module.memory_update_(  # type: ignore[attr-defined]
        s.params, s.total, s.memory, s.updates, s.clients, s.weights, 0.7, 0.1
    )


def remember_models(module: object, s: Server) -> None:
    module.memory_update_(  # type: ignore[attr-defined]
        s.params, s.total, s.memory, s.updates, s.clients, s.weights, 0.7, 0.1, models=True
    )


def sum_rows(module: object, s: Server) -> None:
    module.weighted_sum_(s.params, s.updates, s.weights, beta=0.9)  # type: ignore[attr-defined]


CALLS = [mimic, remember_updates, remember_models, sum_rows]
ORDER_FREE = [mimic, remember_updates, remember_models]


def close(got: Tensor, expected: Tensor, scale: float) -> bool:
    bound = (ROUNDED if got.dtype == torch.float32 else 1e-13) * scale
    return bool(((got.double() - expected.double()).abs() <= bound).all())


@pytest.mark.parametrize(("S", "d"), SHAPES)
@pytest.mark.parametrize("call", CALLS)
def test_against_oracle(isa: str, S: int, d: int, call: Callable[[object, Server], None]) -> None:
    ours, oracle = Server(S, d), Server(S, d)
    for _ in range(3):
        call(ops, ours)
        call(reference, oracle)
    # What is added up is at most twice the largest magnitude of a row (mimic_: u + c) or, with
    # weights, S times that; three rounds of it.
    largest = max(t.abs().max().item() for t in [oracle.updates, *oracle.state()])
    scale = 3 * largest * (S if call is sum_rows else 2)
    for got, expected in zip(ours.state(), oracle.state(), strict=True):
        assert close(got, expected, scale)


@pytest.mark.parametrize("call", CALLS)
def test_independent_of_threads(isa: str, call: Callable[[object, Server], None]) -> None:
    results = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        server = Server(13, 30_001)
        call(ops, server)
        results.append(server.state())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@given(seed=st.integers(0, 2**31), S=st.integers(1, 12), d=st.integers(1, 300))
@pytest.mark.parametrize("call", ORDER_FREE)
def test_order_of_clients_does_not_matter(
    call: Callable[[object, Server], None], seed: int, S: int, d: int
) -> None:
    server = Server(S, d, seed)
    shuffled = server.permuted(torch.randperm(S, generator=torch.Generator().manual_seed(seed)))
    call(ops, server)
    call(ops, shuffled)
    assert all(torch.equal(a, b) for a, b in zip(server.state(), shuffled.state(), strict=True))


def test_sequences_and_strides(isa: str) -> None:
    for call in CALLS:
        plain, views, strided = Server(6, 999), Server(6, 999), Server(6, 999)
        views.updates = list(views.updates)  # type: ignore[assignment]
        strided.updates = torch.stack([strided.updates, strided.updates], dim=1)[:, 0]
        for server in (plain, views, strided):
            call(ops, server)
        for other in (views, strided):
            assert all(torch.equal(a, b) for a, b in zip(plain.state(), other.state(), strict=True))


def test_weighted_sum_by_hand(isa: str) -> None:
    out = torch.tensor([10.0, 20.0])
    rows = torch.tensor([[1.0, 2.0], [3.0, -4.0]])
    assert ops.weighted_sum_(out, rows, torch.tensor([2.0, 0.5]), beta=0.5) is out
    assert out.tolist() == [5.0 + 2.0 + 1.5, 10.0 + 4.0 - 2.0]
    ops.weighted_sum_(out, [rows[1]], torch.tensor([1.0]))
    assert out.tolist() == [11.5, 8.0]


def test_weighted_sum_ignores_old_content_with_beta_zero(isa: str) -> None:
    out = torch.full((5,), float("nan"))
    ops.weighted_sum_(out, torch.ones(2, 5), torch.tensor([1.0, 2.0]), beta=0.0)
    assert out.tolist() == [3.0] * 5
    ops.weighted_sum_(out, torch.empty(0, 5), torch.empty(0), beta=2.0)
    assert out.tolist() == [6.0] * 5


@pytest.mark.parametrize("offset", [0, 1])
def test_a_weighted_sum_of_no_rows_scales_all_columns(isa: str, offset: int) -> None:
    d = 40_000  # on a GPU with few multiprocessors, each block has several tasks
    out = torch.arange(d + offset, dtype=torch.float32)[offset:]
    expected = 0.5 * out
    ops.weighted_sum_(out, torch.empty(0, d), torch.empty(0), beta=0.5)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("S", [1, 3, 7, 8, 21])
def test_the_common_factor_of_weights_is_not_rounded(isa: str, S: int) -> None:
    # Sums of these rows are exact, so a result has only the roundings of its factor and its end.
    g = torch.Generator().manual_seed(S)
    rows = torch.randint(-1000, 1000, (S, 70), generator=g).float()
    times = torch.randint(1, 6, (S,), generator=g).double()
    times[0] = 1.0  # quotients of multiples of the smallest weight are exact
    for factor in (0.1, 1 / 3, 1e-6 / S):
        out = torch.empty(70)
        ops.weighted_sum_(out, rows, torch.full((S,), factor, dtype=torch.float64), beta=0.0)
        assert torch.equal(out, (factor * rows.double().sum(dim=0)).float())
        ops.weighted_sum_(out, rows, factor * times, beta=0.0)
        assert torch.equal(out, (factor * (times @ rows.double())).float())
    v, peaks = torch.empty(70, dtype=torch.float64), torch.empty(S)
    ops.mimic_mean_(v, out, peaks, rows, torch.zeros(S, 70), torch.arange(S))
    expected = rows.double().sum(dim=0) / S
    assert ((v - expected).abs() <= 1e-15 * expected.abs()).all()  # float64 throughout


def test_weights_of_any_size(isa: str) -> None:
    large = torch.full((16, 5), 1.5 * 2.0**127)  # its multiples are exact
    out = torch.zeros(5)
    ops.weighted_sum_(out, large, torch.full((16,), 1 / 16, dtype=torch.float64), beta=0.0)
    assert out.tolist() == large[0].tolist()  # no partial sum leaves the range of float32
    ones = torch.ones(3, 5)
    for weights, result in [
        ([0.0, 0.0, 0.0], 0.0),
        ([1e-300, 0.0, 1.0], 1.0),
        ([-2.0, 0.0, 0.5], -1.5),
        ([math.inf, 0.0, 1.0], math.inf),
    ]:
        ops.weighted_sum_(out, ones, torch.tensor(weights, dtype=torch.float64), beta=0.0)
        assert out.tolist() == [result] * 5
    ops.weighted_sum_(out, ones, torch.tensor([math.nan, 0.0, 1.0]), beta=0.0)
    assert out.isnan().all()
    ops.weighted_sum_(out, torch.full((1, 5), math.nan), torch.zeros(1), beta=0.0)
    assert out.isnan().all()  # a weight of zero does not hide a broken row


def test_mimic_by_hand(isa: str) -> None:
    # Clients 2 and 0 are active: v = ((3 + 1) + (5 - 1)) / 2 = 4, c_2 = 4 - 3, c_0 = 4 - 5.
    params, corrections = torch.tensor([100.0]), torch.tensor([[-1.0], [7.0], [1.0]])
    updates, clients = torch.tensor([[3.0], [5.0]]), torch.tensor([2, 0])
    ops.mimic_(params, updates, corrections, clients, lr=0.5)
    assert params.tolist() == [102.0]
    assert corrections.tolist() == [[-1.0], [7.0], [1.0]]
    ops.mimic_(params, updates[:1] * 2, corrections, clients[:1], lr=1.0)  # v = 6 + 1
    assert params.tolist() == [109.0]
    assert corrections.tolist() == [[-1.0], [7.0], [1.0]]


def test_memory_update_by_hand(isa: str) -> None:
    params, total = torch.tensor([10.0]), torch.zeros(1, dtype=torch.float64)
    memory, one = torch.zeros(2, 1), torch.ones(1)
    client = torch.tensor([1])
    ops.memory_update_(params, total, memory, torch.tensor([[4.0]]), client, one, 0.5, 1.0)
    assert (params.item(), total.item(), memory.tolist()) == (12.0, 4.0, [[0.0], [4.0]])
    ops.memory_update_(params, total, memory, torch.tensor([[1.0]]), client, one, 1.0, 0.5)
    assert (params.item(), total.item(), memory.tolist()) == (12.5, 1.0, [[0.0], [1.0]])
    # As a model: 12.5 + 2 is remembered; halfway from 12.5 to the mean model 14.5.
    memory.zero_()
    total.zero_()
    ops.memory_update_(
        params, total, memory, torch.tensor([[2.0]]), client, one, 0.5, 1.0, models=True
    )
    assert (params.item(), total.item(), memory.tolist()) == (13.5, 14.5, [[0.0], [14.5]])


def test_running_total_does_not_drift() -> None:
    # After 2,000 rounds the total equals a fresh sum to float64 accuracy: differences of float32
    # numbers are exact in float64 up to exponents, so errors are 1e-16 of the largest sum each.
    server = Server(5, 257, K=20)
    for t in range(2_000):
        server.clients = torch.randperm(20)[:5]
        server.updates = torch.randn(5, 257) * (100.0 if t % 7 == 0 else 0.01)
        ops.memory_update_(
            server.params, server.total, server.memory, server.updates, server.clients,
            torch.ones(5), 0.0, 1.0,
        )  # fmt: skip
    fresh = server.memory.double().sum(dim=0)
    assert (server.total - fresh).abs().max() < 1e-10


@pytest.mark.parametrize("n", [1, 3, 16, 17, 64, 65, 70_000])
def test_abs_max(isa: str, n: int) -> None:
    rows = torch.randn(4, n)
    assert torch.equal(ops.abs_max(rows), rows.abs().amax(dim=1))
    for position in (0, n // 2, n - 1):
        bad = rows.clone()
        bad[1, position] = float("nan")
        bad[2, position] = -float("inf")
        largest = ops.abs_max(bad)
        assert largest[1].isnan() and largest[2] == float("inf")
        assert torch.equal(largest[[0, 3]], rows[[0, 3]].abs().amax(dim=1))


def test_abs_max_of_nothing() -> None:
    assert ops.abs_max([]).shape == (0,)
    assert ops.abs_max(torch.empty(2, 0)).tolist() == [0.0, 0.0]


BAD = {
    "params dtype": ({"params": torch.ones(9, dtype=torch.float64)}, TypeError, "params"),
    "params shape": ({"params": torch.ones(3, 3)}, ValueError, "params"),
    "params stride": ({"params": torch.ones(18)[::2]}, ValueError, "params: expected a contig"),
    "updates length": (
        {"updates": torch.ones(4, 8)},
        ValueError,
        "updates: expected rows of d",
    ),
    "updates dtype": ({"updates": torch.ones(4, 9).double()}, TypeError, "updates"),
    "too few ids": ({"clients": torch.tensor([1, 2, 3])}, ValueError, "clients: expected shape"),
    "id dtype": ({"clients": torch.tensor([1, 2, 3, 4]).int()}, TypeError, "clients"),
    "id twice": ({"clients": torch.tensor([1, 2, 1, 4])}, ValueError, "got 1 twice"),
    "id too large": ({"clients": torch.tensor([1, 2, 7, 4])}, IndexError, r"\[0, 7\), got 7"),
    "id negative": ({"clients": torch.tensor([1, 2, -1, 4])}, IndexError, "got -1"),
    "memory length": ({"memory": torch.ones(7, 8)}, ValueError, "expected shape"),
    "memory dtype": ({"memory": torch.ones(7, 9).double()}, TypeError, "expected dtype Float"),
}


@pytest.mark.parametrize("change", BAD, ids=list(BAD))
@pytest.mark.parametrize("call", ORDER_FREE)
def test_bad_arguments_change_nothing(call: Callable[[object, Server], None], change: str) -> None:
    values, error, message = BAD[change]
    server = Server(4, 9)
    for name, value in values.items():
        setattr(server, name, value)
    before = copy.deepcopy(server.state())
    with pytest.raises(error, match=message):
        call(ops, server)
    assert all(torch.equal(a, b) for a, b in zip(before, server.state(), strict=True))


def test_weights_and_total_are_checked() -> None:
    server = Server(4, 9)
    with pytest.raises(TypeError, match="weights: expected dtype Float or Double"):
        ops.weighted_sum_(server.params, server.updates, torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="weights: expected shape"):
        ops.weighted_sum_(server.params, server.updates, torch.ones(3))
    server.total = server.total.float()
    with pytest.raises(TypeError, match="total: expected dtype Double"):
        remember_updates(ops, server)


def test_rows_must_not_overlap_the_output() -> None:
    bank = torch.randn(8, 9)
    clients = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="shares memory with out"):
        ops.weighted_sum_(bank[1], bank[:3], torch.ones(3))
    with pytest.raises(ValueError, match="shares memory with corrections"):
        ops.mimic_(torch.ones(9), bank[1:3], bank, clients, 1.0)
    with pytest.raises(ValueError, match="shares memory with params"):
        ops.mimic_(bank[0], bank[:2], torch.zeros(2, 9), clients, 1.0)

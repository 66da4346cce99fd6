# SPDX-License-Identifier: Apache-2.0
"""Properties of every Gram-matrix rule: rows read, values reused, and symmetries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastagg
from fastagg import UpdateBuffer, ops
from fastagg.rules._gram_rule import GramRule

Same = Callable[..., None]

RULES: list[tuple[str, dict[str, Any]]] = [
    ("geometric-median", {}),
    ("geometric-median", {"start": "zero", "nu": 0.1}),
    ("centered-clip", {"tau": 5.0}),
    ("krum", {"num_byzantine": 1}),
    ("multi-krum", {"num_byzantine": 1}),
    ("bulyan", {}),
    ("nnm", {"num_byzantine": 1}),
    ("nnm", {"num_byzantine": 1, "rule": "centered-clip", "rule_options": {"tau": 5.0}}),
    ("bucketing", {"rule": "krum"}),
    ("bucketing", {"rule": "nnm", "rule_options": {"rule": "krum", "num_byzantine": 1}}),
]
IDS = [name + "".join(f"-{o.get('rule', '')}" for o in [options]) for name, options in RULES]
every_robust_rule = pytest.mark.parametrize(("name", "options"), RULES, ids=IDS)


def make(name: str, options: dict[str, Any], K: int, d: int, **more: Any) -> GramRule:
    agg = fastagg.make(name, num_clients=K, num_params=d, **options, **more)
    assert isinstance(agg, GramRule)
    return agg


def aggregate(name: str, options: dict[str, Any], rows: Tensor, **more: Any) -> Tensor:
    params = torch.zeros(rows.shape[1])
    agg = make(name, options, len(rows), rows.shape[1], **more)
    agg.step(params, rows, range(len(rows)))
    return params


# --- reuse ------------------------------------------------------------------------------------


@every_robust_rule
def test_reuse_applies_the_rule_to_the_last_row_of_every_client(
    same_bits: Same, random_rounds: Callable[..., Any], name: str, options: dict[str, Any]
) -> None:
    """The kept part of the Gram matrix has the bits of a full recomputation."""
    K, d = 7, 600
    reusing, full = make(name, options, K, d, reuse=True), make(name, options, K, d)
    last = torch.zeros(K, d)
    params, twin = torch.randn(d), torch.zeros(d)
    twin.copy_(params)
    for updates, clients in random_rounds(K, d, 12, seed=4):
        last[clients] = updates
        report = reusing.step(params, updates, clients)
        if len(clients) == 0:
            full.step(twin, [], [])
            continue
        expected = full.step(twin, last, range(K))
        same_bits(params, twin)
        same_bits(report.weights, expected.weights[clients.sort().values])
        assert reusing.memory is not None
        same_bits(reusing.memory.clone(), last)


@every_robust_rule
def test_rows_of_a_buffer_are_kept_without_copying(
    same_bits: Same, same_state: Same, name: str, options: dict[str, Any]
) -> None:
    K, d = 6, 40
    copying, taking = (make(name, options, K, d, reuse=True) for _ in range(2))
    buffer, params, twin = UpdateBuffer(K, d), torch.zeros(d), torch.zeros(d)
    for clients in ([0, 1, 2, 3, 4, 5], [5, 1], [3, 4, 1], [0]):
        for row in buffer.rows(clients):
            row.normal_().mul_(torch.rand(d) < 0.8)  # zeros of both signs
        copying.step(params, [row.clone() for row in buffer.rows(clients)], clients)
        given = buffer.row(clients[0])
        taking.step(twin, buffer, clients)
        same_bits(params, twin)
        same_state(copying, taking)
        assert taking.memory is not None
        assert taking.memory.rows[clients[0]].data_ptr() == given.data_ptr()
        assert buffer.row(clients[0]).data_ptr() != given.data_ptr()


def test_reuse_computes_only_the_entries_of_changed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int] | None] = []
    whole, some = ops.gram, ops.gram_rows

    def spy_on_whole(updates: Any, **options: Any) -> Tensor:
        asked.append(None)
        return whole(updates, **options)

    def spy_on_some(updates: Any, changed: Tensor) -> Tensor:
        asked.append(changed.tolist())
        return some(updates, changed)

    monkeypatch.setattr(ops, "gram", spy_on_whole)
    monkeypatch.setattr(ops, "gram_rows", spy_on_some)
    agg = make("centered-clip", {"tau": 1.0}, 5, 10, reuse=True)
    agg.step(torch.zeros(10), torch.randn(2, 10), [3, 1])
    assert asked == [[1, 3, 5]]  # and the previous aggregate
    agg.step(torch.zeros(10), torch.randn(5, 10), range(5))
    assert asked[1:] == [None]  # everything


def test_a_rejected_row_is_not_remembered(same_bits: Same) -> None:
    agg = make("geometric-median", {}, 3, 4, reuse=True, nonfinite="drop")
    good = torch.randn(2, 4)
    agg.step(torch.zeros(4), good, [0, 2])
    report = agg.step(torch.zeros(4), torch.full((1, 4), math.nan), [2])
    assert report.skipped and report.rejected.tolist() == [2]
    assert agg.memory is not None
    same_bits(agg.memory.clone()[[0, 2]], good)


def test_a_memory_row_is_refused_as_an_update(same_bits: Same) -> None:
    agg = make("krum", {}, 4, 6, reuse=True)
    params = torch.zeros(6)
    agg.step(params, torch.randn(4, 6), range(4))
    assert agg.memory is not None
    old, memory = params.clone(), agg.memory.clone()
    for k in (1, 2):
        with pytest.raises(ValueError, match=r"must not share memory .* client 2"):
            agg.step(params, [torch.randn(6), agg.memory.rows[k]], [0, 2])
    same_bits(params, old)
    same_bits(agg.memory.clone(), memory)


# --- memory accesses --------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Record the sizes of all storages that torch operations allocate."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.bytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.bytes.append(storage.nbytes())
        return result


@every_robust_rule
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.slow
def test_nothing_of_the_size_of_a_row_is_allocated(
    name: str, options: dict[str, Any], reuse: bool
) -> None:
    d = 5_000
    agg = make(name, options, 12, d, reuse=reuse)
    params, rows = torch.zeros(d), torch.randn(8, d)
    agg.step(params, rows, range(3, 11))  # allocates spare rows, if the rule needs any
    state = [t for t in (agg.previous, agg._aggregate) if t is not None]
    if agg.memory is not None:
        state += [*agg.memory.rows, *agg.memory.spares.rows(range(8))]
    with Allocations([params, rows, *state]) as allocations:
        agg.step(params, rows, range(3, 11))
    assert allocations.bytes
    assert max(allocations.bytes) < 4 * d


@every_robust_rule
def test_rows_are_read_twice(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    calls: list[tuple[str, int]] = []
    for op, place in (("gram", 0), ("weighted_sum_", 1), ("meamed_", 2), ("apply_aggregate_", 2)):
        real = getattr(ops, op)

        def spy(
            *args: Any, op: str = op, place: int = place, real: Any = real, **kwargs: Any
        ) -> Any:
            calls.append((op, len(args[place])))
            return real(*args, **kwargs)

        monkeypatch.setattr(ops, op, spy)
    agg = make(name, options, 9, 50)
    agg.step(torch.zeros(50), torch.randn(9, 50), range(9))
    extra = int(agg.previous is not None)
    second = "weighted_sum_" if agg.sums_rows else "meamed_"
    assert [op for op, _ in calls] == ["gram", second, "apply_aggregate_"]
    assert calls[0][1] == 9 + extra
    assert calls[1][1] <= 9 + extra
    assert calls[2][1] == 50  # the aggregate, into the parameters
    if name == "krum":
        assert calls[1][1] == 1


@every_robust_rule
def test_many_clients_and_any_number_of_threads_give_the_same_bits(
    same_bits: Same, name: str, options: dict[str, Any]
) -> None:
    """S x S = 34,225 numbers: torch adds this many in several threads."""
    rows = torch.randn(185, 40)
    results = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        results.append(aggregate(name, options, rows))
    for params in results[1:]:
        same_bits(params, results[0])


# --- symmetries -------------------------------------------------------------------------------


@every_robust_rule
def test_a_client_of_weight_zero_is_as_if_absent(
    same_bits: Same, name: str, options: dict[str, Any]
) -> None:
    weights = [1.0, 2.0, 0.0, 1.0, 1.0, 3.0, 1.0]
    rows = torch.randn(7, 30)
    rows[2] = 1e6
    first, second = (make(name, options, 7, 30, client_weights=weights) for _ in range(2))
    params, twin = torch.zeros(30), torch.zeros(30)
    report = first.step(params, rows, range(7))
    others = [0, 1, 3, 4, 5, 6]
    second.step(twin, rows[others], others)
    same_bits(params, twin)
    assert report.weights[2] == 0.0
    with pytest.raises(ValueError, match="expected a weight > 0 among the active clients"):
        first.step(params, rows[2:3], [2])


@every_robust_rule
def test_copies_of_one_row_give_that_row(name: str, options: dict[str, Any]) -> None:
    row = torch.randn(30)
    if name == "centered-clip" or options.get("rule") == "centered-clip":
        row = row / row.norm()  # less than tau from v_0 = 0
    result = aggregate(name, options, row.expand(8, 30))
    torch.testing.assert_close(result, row, rtol=1e-6, atol=1e-6)  # factors sum to 1 in float32


@every_robust_rule
def test_scaling_by_a_power_of_two(same_bits: Same, name: str, options: dict[str, Any]) -> None:
    rows = torch.randn(9, 30)
    scaled = dict(options)
    if "tau" in options:
        scaled["tau"] = 64.0 * options["tau"]
    if options.get("rule") == "centered-clip":
        scaled["rule_options"] = {"tau": 64.0 * options["rule_options"]["tau"]}
    same_bits(aggregate(name, scaled, 64.0 * rows), 64.0 * aggregate(name, options, rows))


@pytest.mark.parametrize(
    ("name", "options"),
    [case for case in RULES if "tau" not in str(case)],  # clipping starts from zero
)
def test_moves_with_translation_and_rotation(name: str, options: dict[str, Any]) -> None:
    rows = torch.randn(9, 24)
    shift = torch.randn(24)
    rotation, _ = torch.linalg.qr(torch.randn(24, 24))
    result = aggregate(name, options, rows)
    # Distances from inner products err by 1e-7 of the squared norms; no choice is that close.
    torch.testing.assert_close(
        aggregate(name, options, rows + shift), result + shift, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        aggregate(name, options, rows @ rotation), result @ rotation, rtol=1e-5, atol=1e-5
    )


@every_robust_rule
def test_the_aggregate_is_a_convex_combination(name: str, options: dict[str, Any]) -> None:
    agg = make(name, options, 9, 30)
    for _ in range(3):
        report = agg.step(torch.zeros(30), torch.randn(9, 30), range(9))
        assert bool((report.weights >= 0).all())
        total = report.weights.sum().item()
        if agg.previous is None:
            assert total == pytest.approx(1.0, abs=1e-6)  # nine roundings to float32
        else:
            assert total <= 1.0 + 1e-6


@every_robust_rule
def test_without_outliers_it_stays_near_the_mean(name: str, options: dict[str, Any]) -> None:
    center = torch.randn(40)
    rows = center / center.norm() + 0.01 * torch.randn(9, 40)
    result = aggregate(name, options, rows)
    spread = (rows - rows.mean(0)).norm(dim=1).max()
    assert (result - rows.mean(0)).norm() <= spread

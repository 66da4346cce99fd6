# SPDX-License-Identifier: Apache-2.0
"""How the ops behave inside torch: schemas, autograd, torch.compile, versions."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from fastagg import ops
from fastagg.ops._dispatch import TABLE
from fastagg.ops._examples import ExampleData
from fastagg.ops.selfcheck import tensors_in

K, S, D = 7, 4, 33
NAMES = sorted(TABLE)


def registered() -> set[str]:
    schemas = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1] for name in schemas if name.startswith("fastagg::")}


def schema(name: str) -> Any:
    return getattr(torch.ops.fastagg, name).default._schema


def test_every_operator_has_a_wrapper() -> None:
    assert registered() == set(TABLE)
    assert registered() == set(ops.__all__) - {"Rows"}
    assert all(getattr(ops, name) is op.wrapper for name, op in TABLE.items())


@pytest.mark.parametrize("name", NAMES)
def test_the_name_says_whether_arguments_change(name: str) -> None:
    assert schema(name).is_mutable == name.endswith("_")
    assert bool(schema(name).returns) != name.endswith("_")


class Calls(TorchDispatchMode):
    """Records the calls of fastagg's operators, with the arguments that the wrappers pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[object, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "fastagg":
            assert not kwargs
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


def check_registration(operator: Any, args: tuple[object, ...]) -> None:
    result = torch.library.opcheck(operator, args)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_opcheck(name: str) -> None:
    with Calls() as calls:
        TABLE[name].example(getattr(ops, name), ExampleData.random(K, S, D))
    assert calls.seen
    for operator, args in calls.seen:
        assert operator is getattr(torch.ops.fastagg, name).default
        check_registration(operator, args)


@pytest.mark.slow
def test_opcheck_of_lists_that_mix_rows_and_matrices() -> None:
    x = ExampleData.random(K, S, D)
    mixed = [x.updates[0], x.updates[1:]]
    check_registration(torch.ops.fastagg.gram.default, (mixed, x.pairs))
    check_registration(torch.ops.fastagg.weighted_sum_.default, (x.params, mixed, x.weights, 0.5))


@pytest.mark.slow
def test_opcheck_of_a_transposed_gram_matrix() -> None:
    gram, weights = ExampleData.random(K, S, D).gram.t(), torch.ones(S, dtype=torch.float64)
    assert not gram.is_contiguous()
    check_registration(torch.ops.fastagg.nearest_means.default, (gram, weights, 3))


def every_op(
    params: Tensor, rows: Tensor, memory: Tensor, total: Tensor, scores: Tensor, counts: Tensor,
    clients: Tensor, active: Tensor, candidates: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    gram = ops.gram(rows)
    ops.update_scores_(scores, counts, ops.cosine_scores(gram), clients)
    ops.eliminate_(candidates, scores, counts, 0.1)
    friends = ops.select_friends(scores, counts, active, candidates)
    ops.weighted_sum_(params, rows, torch.ones(S))
    ops.mimic_(params, rows, memory, clients, 0.5)
    ops.memory_update_(params, total, memory, rows, clients, torch.ones(S), 0.5, 0.1)
    wide, peaks = torch.zeros_like(total), torch.zeros(S)
    own, references = [memory[k] for k in range(S)], [params.clone(), None, None, None]
    ops.mimic_mean_(wide, torch.zeros(D), peaks, rows, own, clients, references)
    ops.add_total_(params, wide, 0.5, 1.0)
    ops.apply_aggregate_(params, active[0], rows[0], 0.5, 1.0, 1e30, 1e38)
    ops.memory_total_(wide, peaks, total, own, rows, clients, torch.ones(S), references)
    ops.mimic_(params, rows, list(memory[:S].clone().unbind()), clients, 0.5)
    ops.add_momentum_(params, rows[0], wide, 0.5, 0.9)
    ops.add_adaptive_(params, rows[1], rows[2].abs_(), wide, "adam", 0.5, 0.9, 0.99, 1e-3)
    return friends, ops.distance_scores(gram), ops.abs_max(rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_torch_compile_full_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The cache of compiled code does not notice that a new build has changed the schema of an op.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    values = [
        torch.randn(D), torch.randn(S, D), torch.randn(K, D), torch.zeros(D, dtype=torch.float64),
        torch.rand(K, K), torch.randint(0, 3, (K, K), dtype=torch.int32),
        torch.tensor([5, 1, 3, 0]), torch.rand(K) > 0.5, torch.ones(K, K, dtype=torch.bool),
    ]  # fmt: skip
    eager, compiled = ([v.clone() for v in values] for _ in range(2))
    expected = every_op(*eager)
    got = torch.compile(every_op, fullgraph=True)(*compiled)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_")])
def test_version_counters(name: str) -> None:
    changes = {a.name for a in schema(name).arguments if a.alias_info and a.alias_info.is_write}
    signature = inspect.signature(TABLE[name].wrapper)
    calls = 0

    def call(*args: object, **kwargs: object) -> None:
        given = signature.bind(*args, **kwargs).arguments
        before = {key: [t._version for t in tensors_in(value)] for key, value in given.items()}
        assert getattr(ops, name)(*args, **kwargs) is args[0]
        for key, value in given.items():
            for tensor, version in zip(tensors_in(value), before[key], strict=True):
                assert (tensor._version > version) == (key in changes), key
        nonlocal calls
        calls += 1

    TABLE[name].example(call, ExampleData.random(K, S, D))
    assert calls and changes <= set(signature.parameters)


def test_backward_through_a_changed_tensor_is_refused() -> None:
    x = torch.randn(D, requires_grad=True)
    out = torch.randn(D)
    loss = (x * out).sum()  # saves out for backward
    ops.weighted_sum_(out, torch.randn(S, D), torch.ones(S))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_parameter_changes_only_under_no_grad() -> None:
    p = torch.nn.Parameter(torch.zeros(D))
    rows, weights = torch.ones(S, D), torch.ones(S)
    with pytest.raises(RuntimeError, match="requires gradients; detach it, or call"):
        ops.weighted_sum_(p, rows, weights)
    assert p.abs().max() == 0
    with torch.no_grad():
        ops.weighted_sum_(p, rows, weights)
    assert p.min() == S
    with torch.inference_mode():
        ops.weighted_sum_(torch.zeros(D), rows, weights)


def test_not_differentiable() -> None:
    rows = torch.randn(S, D, requires_grad=True)
    with pytest.raises(RuntimeError, match="derivative for fastagg::gram is not implemented"):
        ops.gram(rows).sum().backward()


@pytest.mark.parametrize("tensor", ["out", "rows"])
def test_what_is_changed_in_place_has_no_wrong_gradient(tensor: str) -> None:
    leaf = torch.ones(S, D, requires_grad=True)
    out, rows = torch.zeros(D), list(torch.ones(S, D))
    if tensor == "out":
        out = leaf[0] * 2.0
    else:
        rows[-1] = leaf[-1] * 2.0
    before = out.detach().clone()
    error = "fastagg::weighted_sum_ changes tensors in place and is not differentiable"
    with pytest.raises(RuntimeError, match=error):
        ops.weighted_sum_(out, rows, torch.ones(S))
    assert torch.equal(out.detach(), before)
    with torch.no_grad():
        ops.weighted_sum_(out, rows, torch.ones(S))
    assert torch.equal(out.detach(), before + sum(row.detach() for row in rows))


def test_a_row_among_absent_ones_may_not_require_gradients() -> None:
    rows, v, peaks = torch.ones(2, D), torch.zeros(D, dtype=torch.float64), torch.zeros(2)
    before = [None, torch.ones(D, requires_grad=True)]
    given = (v, torch.zeros(D), peaks, rows, torch.zeros(2, D), torch.arange(2))
    with pytest.raises(RuntimeError, match=r"fastagg::mimic_mean_ .* not differentiable"):
        ops.mimic_mean_(*given, references=before)
    with torch.no_grad():
        ops.mimic_mean_(*given, references=before)


def test_forward_mode_is_refused() -> None:
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(torch.ones(D), torch.ones(D))
        with pytest.raises(RuntimeError, match=r"fastagg::weighted_sum_ .* not differentiable"):
            ops.weighted_sum_(torch.zeros(D), [dual], torch.ones(1))

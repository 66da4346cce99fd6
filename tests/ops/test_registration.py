# SPDX-License-Identifier: Apache-2.0
"""How the ops behave inside torch: schemas, autograd, torch.compile, versions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastagg import ops

K, S, D = 7, 4, 33


def arguments() -> dict[str, tuple[object, ...]]:
    """Valid arguments for every registered operator."""
    rows, params, memory = torch.randn(S, D), torch.randn(D), torch.randn(K, D)
    clients, weights = torch.tensor([5, 1, 3, 0]), torch.rand(S)
    gram = rows @ rows.T
    scores, counts = torch.rand(K, K), torch.randint(0, 3, (K, K), dtype=torch.int32)
    flags, active = torch.ones(K, K, dtype=torch.bool), torch.rand(K) > 0.5
    total = torch.zeros(D, dtype=torch.float64)
    pairs = torch.ones(S, S, dtype=torch.bool)
    own, references = list(memory[clients].unbind()), [None, torch.randn(D), None, None]
    wide, peaks = torch.zeros(D, dtype=torch.float64), torch.zeros(S)
    kept = [torch.zeros(D) for _ in range(S)]
    return {
        "gram": ([rows], pairs),
        "gram_rows": ([rows], torch.tensor([2, 0])),
        "replace_rows": (gram[:3, :3].double(), torch.tensor([3, 1]), gram[[3, 1]].double()),
        "bucketed_gram": (gram.double(), torch.tensor([1, 0, 2]), torch.rand(3).double(), 2),
        "weiszfeld": (gram.double(), weights.double(), weights.double(), 0.1, 2),
        "clip_towards": (gram.double(), weights[:3].double(), 0.5, 2),
        "abs_max": ([rows],),
        "cosine_scores": (gram,),
        "distance_scores": (gram,),
        "update_scores_": (scores, counts, gram, clients, pairs),
        "select_friends": (scores, counts, active, flags, 0.2),
        "eliminate_": (flags, scores, counts, 0.1),
        "weighted_sum_": (params, [rows[0], rows[1:]], torch.rand(S), 0.5),
        "gram_and_sum_": (params, gram.double(), [rows], torch.rand(S)),
        "mimic_": (params, list(rows), own, clients, 0.5),
        "memory_update_": (params, total, [memory], [rows], clients, weights, 0.5, 0.1, True),
        "mimic_mean_": (wide, params, peaks, [rows], own, clients, references, kept),
        "memory_total_": (
            *(wide, peaks, total, own, [rows], clients, weights, references, params, kept),
        ),
        "add_total_": (params, total, 0.5, 0.1, True),
    }


def registered() -> set[str]:
    schemas = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1] for name in schemas if name.startswith("fastagg::")}


def test_every_operator_is_tested_here_and_wrapped() -> None:
    assert registered() == set(arguments())
    assert registered() == set(ops.__all__) - {"Rows"}


@pytest.mark.parametrize("name", sorted(arguments()))
def test_opcheck(name: str) -> None:
    operator = getattr(torch.ops.fastagg, name).default
    result = torch.library.opcheck(operator, arguments()[name])
    assert set(result.values()) == {"SUCCESS"}


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
    ops.memory_total_(wide, peaks, total, own, rows, clients, torch.ones(S), references)
    ops.mimic_(params, rows, list(memory[:S].clone().unbind()), clients, 0.5)
    return friends, ops.distance_scores(gram), ops.abs_max(rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_torch_compile_full_graph() -> None:
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


def as_rows(argument: object) -> object:
    """A list of rows for an operator, as its wrapper takes it: [S, d], or a list of [d]."""
    if isinstance(argument, list) and len(argument) == 1:
        return argument[0]
    if isinstance(argument, list) and any(t is not None and t.dim() == 2 for t in argument):
        return torch.cat([t.reshape(-1, D) for t in argument])
    return argument


def test_version_counters() -> None:
    wrappers = {name: call for name, call in arguments().items() if name.endswith("_")}
    changed = {"update_scores_": 2, "eliminate_": 1, "weighted_sum_": 1, "mimic_": 1 + S}
    changed |= {"gram_and_sum_": 2}
    changed |= {"memory_update_": 3, "mimic_mean_": 3 + S, "memory_total_": 2 + S, "add_total_": 1}
    assert set(wrappers) == set(changed)
    for name, call in wrappers.items():
        call = tuple(as_rows(a) for a in call)
        tensors = [t for a in call for t in (a if isinstance(a, list) else [a])]
        tensors = [t for t in tensors if isinstance(t, Tensor)]
        before = [t._version for t in tensors]
        result = getattr(ops, name)(*call)
        assert result is call[0]
        bumped = sum(t._version > v for t, v in zip(tensors, before, strict=True))
        assert bumped == changed[name], name


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
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
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

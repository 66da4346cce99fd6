# SPDX-License-Identifier: Apache-2.0
"""Memory that a call changes must not overlap anything else that the call reads or changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fastagg import build_info, ops

S, d, K = 4, 10, 8  # every argument has a multiple of eight bytes
F32, F64, BF16, I8 = torch.float32, torch.float64, torch.bfloat16, torch.int8
CLIENTS = torch.tensor([2, 0, 5, 1])
WEIGHTS = torch.full((S,), 0.5)


@dataclass(frozen=True)
class Op:
    """An op, the shapes and dtypes of its arguments, and the arguments that it changes."""

    call: Callable[[Any], object]
    changed: tuple[str, ...]
    arguments: dict[str, tuple[tuple[int, ...], torch.dtype]]


VECTORS = {"params": ((d,), F32), "total": ((d,), F64)}
OPS = {
    "weighted_sum_": Op(
        lambda a: ops.weighted_sum_(a["out"], a["rows"], WEIGHTS, 0.5),
        ("out",),
        {"out": ((d,), F32), "rows": ((S, d), F32)},
    ),
    "gram_and_sum_": Op(
        lambda a: ops.gram_and_sum_(a["out"], a["gram"], a["rows"], WEIGHTS),
        ("out", "gram"),
        {"out": ((d,), F32), "gram": ((S, S), F64), "rows": ((S, d), F32)},
    ),
    "mimic_": Op(
        lambda a: ops.mimic_(a["params"], a["updates"], list(a["corrections"]), CLIENTS, 0.5),
        ("params", "corrections"),
        {"params": ((d,), F32), "updates": ((S, d), F32), "corrections": ((S, d), F32)},
    ),
    "mimic_, short": Op(
        lambda a: ops.mimic_(a["params"], a["updates"], list(a["corrections"]), CLIENTS, 0.5),
        ("params", "corrections"),
        {"params": ((d,), F32), "updates": ((S, d), BF16), "corrections": ((S, d), F32)},
    ),
    "memory_update_": Op(
        lambda a: ops.memory_update_(
            a["params"], a["total"], list(a["memory"]), a["updates"], CLIENTS, WEIGHTS, 0.5, 0.5
        ),
        ("params", "total", "memory"),
        {**VECTORS, "memory": ((S, d), F32), "updates": ((S, d), F32)},
    ),
    "mimic_mean_": Op(
        lambda a: ops.mimic_mean_(
            a["out"], a["rounded"], a["peaks"], a["updates"], list(a["corrections"]), CLIENTS,
            [a["references"][0], None, *a["references"][2:]], list(a["kept"]),
        ),
        ("out", "rounded", "peaks", "kept"),
        {
            "out": ((d,), F64),
            "rounded": ((d,), F32),
            "peaks": ((S,), F32),
            "updates": ((S, d), F32),
            "corrections": ((S, d), F32),
            "references": ((S, d), F32),
            "kept": ((S, d), F32),
        },
    ),
    "memory_total_": Op(
        lambda a: ops.memory_total_(
            a["out"], a["peaks"], a["total"], list(a["memory"]), a["updates"], CLIENTS, WEIGHTS,
            [a["references"][0], None, *a["references"][2:]], a["params"], list(a["kept"]),
        ),
        ("out", "peaks", "kept"),
        {
            **VECTORS,
            "kept": ((S, d), F32),
            "out": ((d,), F64),
            "peaks": ((S,), F32),
            "updates": ((S, d), F32),
            "memory": ((S, d), F32),
            "references": ((S, d), F32),
        },
    ),
    "memory_total_, faded": Op(
        lambda a: ops.memory_total_(
            a["out"], a["peaks"], a["total"], list(a["memory"]), a["updates"], CLIENTS, WEIGHTS,
            kept=list(a["kept"]), faded=a["faded"], faded_weights=WEIGHTS,
        ),
        ("out", "peaks", "kept", "faded"),
        {
            "total": ((d,), F64),
            "kept": ((S, d), F32),
            "out": ((d,), F64),
            "faded": ((d,), F64),
            "peaks": ((S,), F32),
            "updates": ((S, d), F32),
            "memory": ((S, d), F32),
        },
    ),
    "quantize_": Op(
        lambda a: ops.quantize_(list(a["numbers"]), a["scales"], a["rows"]),
        ("numbers", "scales"),
        {"numbers": ((S, 16), I8), "scales": ((S, 1), F32), "rows": ((S, 16), F32)},
    ),
    "dequantize_": Op(
        lambda a: ops.dequantize_(list(a["out"]), list(a["numbers"]), list(a["scales"])),
        ("out",),
        {"out": ((S, 16), F32), "numbers": ((S, 16), I8), "scales": ((S, 1), F32)},
    ),
    "quantized_total_": Op(
        lambda a: ops.quantized_total_(
            a["out"], a["peaks"], a["total"], list(a["memory"]), list(a["memory_scales"]),
            a["updates"], CLIENTS, WEIGHTS, list(a["kept"]), a["kept_scales"],
            faded=a["faded"], faded_weights=WEIGHTS,
        ),
        ("out", "peaks", "kept", "kept_scales", "faded"),
        {
            "out": ((16,), F64),
            "faded": ((16,), F64),
            "peaks": ((S,), F32),
            "total": ((16,), F64),
            "memory": ((S, 16), I8),
            "memory_scales": ((S, 1), F32),
            "updates": ((S, 16), F32),
            "kept": ((S, 16), I8),
            "kept_scales": ((S, 1), F32),
        },
    ),
    "scaffold_mean_": Op(
        lambda a: ops.scaffold_mean_(
            a["out"], a["next"], a["peaks"], a["mean"], a["updates"], list(a["controls"]), CLIENTS,
            WEIGHTS, WEIGHTS, 0.1, list(a["kept"]),
        ),
        ("out", "next", "peaks", "kept"),
        {
            "out": ((d,), F64),
            "next": ((d,), F32),
            "peaks": ((S,), F32),
            "mean": ((d,), F32),
            "updates": ((S, d), F32),
            "controls": ((S, d), F32),
            "kept": ((S, d), F32),
        },
    ),
    "lerp_total_": Op(
        lambda a: ops.lerp_total_(a["total"], a["end"], 0.5),
        ("total",),
        {"total": ((d,), F64), "end": ((d,), F64)},
    ),
    "add_total_": Op(
        lambda a: ops.add_total_(a["params"], a["total"], 0.5, 0.5), ("params",), VECTORS
    ),
    "apply_aggregate_": Op(
        lambda a: ops.apply_aggregate_(
            a["params"], torch.tensor(False), a["total"], 0.5, 0.5, 1e30, 1e38
        ),
        ("params",),
        VECTORS,
    ),
    "add_momentum_": Op(
        lambda a: ops.add_momentum_(a["params"], a["m"], a["aggregate"], 0.5, 0.5),
        ("params", "m"),
        {"params": ((d,), F32), "m": ((d,), F32), "aggregate": ((d,), F64)},
    ),
    "add_adaptive_": Op(
        lambda a: ops.add_adaptive_(
            a["params"], a["m"], a["s"], a["aggregate"], "adam", 0.5, 0.5, 0.5, 0.5
        ),
        ("params", "m", "s"),
        {name: ((d,), F32) for name in ("params", "m", "s", "aggregate")},
    ),
    "update_scores_": Op(
        lambda a: ops.update_scores_(
            a["scores"], a["counts"], a["round_scores"], CLIENTS, a["pairs"]
        ),
        ("scores", "counts"),
        {
            "scores": ((K, K), F32),
            "counts": ((K, K), torch.int16),
            "round_scores": ((S, S), F64),
            "pairs": ((S, S), torch.bool),
        },
    ),
    "eliminate_": Op(
        lambda a: ops.eliminate_(a["candidates"], a["scores"], a["counts"], 0.1),
        ("candidates",),
        {
            "candidates": ((K, 1), torch.uint8),
            "scores": ((K, K), F32),
            "counts": ((K, K), torch.int16),
        },
    ),
}  # fmt: skip


class Arena:
    """Arguments in one block of memory, at chosen offsets."""

    def __init__(self) -> None:
        self.memory = torch.zeros(4096, dtype=torch.uint8)
        self.used: dict[str, range] = {}
        self.end = 2048  # room before it, for an argument that ends in another

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> Tensor:
        size = torch.empty(shape, dtype=dtype).nbytes
        self.used[name] = range(at, at + size)
        self.end = max(self.end, -(-(at + size) // 8) * 8)
        return self.memory[at : at + size].view(dtype).view(shape)


def fill(arguments: dict[str, Tensor]) -> None:
    torch.manual_seed(0)
    for tensor in arguments.values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape))
        else:
            tensor.copy_(torch.ones(tensor.shape))


@pytest.fixture(autouse=True, params=["cuda" if build_info()["torch"] == "emulated" else "cpu"])
def _bindings(request: pytest.FixtureRequest) -> None:
    """The name of the bindings: CPU, or CUDA in an emulated build (tests/cuda/emulator)."""


@pytest.mark.parametrize("name", OPS)
def test_neighbours_are_accepted(name: str) -> None:
    """Parts of one storage that touch but do not overlap."""
    op, arena = OPS[name], Arena()
    packed = {
        argument: arena.place(argument, shape, dtype, arena.end)
        for argument, (shape, dtype) in op.arguments.items()
    }
    apart = {argument: tensor.clone() for argument, tensor in packed.items()}
    for arguments in (packed, apart):
        fill(arguments)
        op.call(arguments)
    assert all(torch.equal(packed[argument], apart[argument]) for argument in packed)


@pytest.mark.parametrize("side", ["begins in", "ends in"])
@pytest.mark.parametrize(
    ("name", "changed", "other"),
    [
        (name, changed, other)
        for name, op in OPS.items()
        for changed in op.changed
        for other in op.arguments
        if other != changed
    ],
)
def test_an_overlap_is_an_error_and_changes_nothing(
    name: str, changed: str, other: str, side: str
) -> None:
    op, arena = OPS[name], Arena()
    arguments = {changed: arena.place(changed, *op.arguments[changed], arena.end)}
    shape, dtype = op.arguments[other]
    size, target = torch.empty(shape, dtype=dtype).nbytes, arena.used[changed]
    at = target.stop - 8 if side == "begins in" else target.start - size + 8
    arguments[other] = arena.place(other, shape, dtype, at)
    for argument, (shape, dtype) in op.arguments.items():
        if argument not in arguments:
            arguments[argument] = arena.place(argument, shape, dtype, arena.end)
    fill(arguments)
    before = arena.memory.clone()
    with pytest.raises(ValueError, match=r"shares memory with \w+, which this call changes"):
        op.call(arguments)
    assert torch.equal(arena.memory, before)


def test_rows_that_are_changed_must_not_overlap_each_other() -> None:
    memory = torch.zeros(S * d)
    rows = [memory[s * d - (s == 2) :][:d] for s in range(S)]  # row 2 begins in row 1
    params, updates = torch.zeros(d), torch.zeros(S, d)
    with pytest.raises(ValueError, match="corrections: expected rows that share no memory"):
        ops.mimic_(params, updates, rows, CLIENTS, 1.0)
    with pytest.raises(ValueError, match="memory: expected rows that share no memory"):
        ops.memory_update_(
            params, torch.zeros(d, dtype=F64), rows, updates, CLIENTS, WEIGHTS, 1.0, 1.0
        )


def test_rows_of_no_client_of_the_round_may_be_read() -> None:
    """Of a memory [K, d] only the rows of the round's clients are changed."""
    memory, expected = torch.rand(K, d), torch.zeros(d)
    others = [memory[3], memory[4]]  # not among CLIENTS
    clients = CLIENTS[:2]
    params = ops.mimic_(torch.zeros(d), others, memory.clone(), clients, 0.5)
    expected = ops.mimic_(expected, others, memory, clients, 0.5)
    assert torch.equal(params, expected)
